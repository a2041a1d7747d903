from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Rule(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ASSIGN: _ClassVar[Rule]
    ADD: _ClassVar[Rule]
    SUB: _ClassVar[Rule]
    MUL: _ClassVar[Rule]
    DIV: _ClassVar[Rule]
    MIN: _ClassVar[Rule]
    MAX: _ClassVar[Rule]
    FIRST_OPTIMIZER: _ClassVar[Rule]
ASSIGN: Rule
ADD: Rule
SUB: Rule
MUL: Rule
DIV: Rule
MIN: Rule
MAX: Rule
FIRST_OPTIMIZER: Rule

class AttachRequest(_message.Message):
    __slots__ = ("worker", "mode", "strategy", "gpu")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    MODE_FIELD_NUMBER: _ClassVar[int]
    STRATEGY_FIELD_NUMBER: _ClassVar[int]
    GPU_FIELD_NUMBER: _ClassVar[int]
    worker: int
    mode: Mode
    strategy: int
    gpu: int
    def __init__(self, worker: _Optional[int] = ..., mode: _Optional[_Union[Mode, _Mapping]] = ..., strategy: _Optional[int] = ..., gpu: _Optional[int] = ...) -> None: ...

class Mode(_message.Message):
    __slots__ = ("name", "backup_workers", "staleness", "compression", "one_sided")
    NAME_FIELD_NUMBER: _ClassVar[int]
    BACKUP_WORKERS_FIELD_NUMBER: _ClassVar[int]
    STALENESS_FIELD_NUMBER: _ClassVar[int]
    COMPRESSION_FIELD_NUMBER: _ClassVar[int]
    ONE_SIDED_FIELD_NUMBER: _ClassVar[int]
    name: str
    backup_workers: int
    staleness: int
    compression: str
    one_sided: bool
    def __init__(self, name: _Optional[str] = ..., backup_workers: _Optional[int] = ..., staleness: _Optional[int] = ..., compression: _Optional[str] = ..., one_sided: bool = ...) -> None: ...

class AttachReply(_message.Message):
    __slots__ = ("connection",)
    CONNECTION_FIELD_NUMBER: _ClassVar[int]
    connection: int
    def __init__(self, connection: _Optional[int] = ...) -> None: ...

class CreateRequest(_message.Message):
    __slots__ = ("name", "shape", "dtype", "ordinal", "worker", "connection", "only_shared", "server", "part")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    ORDINAL_FIELD_NUMBER: _ClassVar[int]
    WORKER_FIELD_NUMBER: _ClassVar[int]
    CONNECTION_FIELD_NUMBER: _ClassVar[int]
    ONLY_SHARED_FIELD_NUMBER: _ClassVar[int]
    SERVER_FIELD_NUMBER: _ClassVar[int]
    PART_FIELD_NUMBER: _ClassVar[int]
    name: str
    shape: _containers.RepeatedScalarFieldContainer[int]
    dtype: str
    ordinal: int
    worker: int
    connection: int
    only_shared: bool
    server: int
    part: PartOf
    def __init__(self, name: _Optional[str] = ..., shape: _Optional[_Iterable[int]] = ..., dtype: _Optional[str] = ..., ordinal: _Optional[int] = ..., worker: _Optional[int] = ..., connection: _Optional[int] = ..., only_shared: bool = ..., server: _Optional[int] = ..., part: _Optional[_Union[PartOf, _Mapping]] = ...) -> None: ...

class PartOf(_message.Message):
    __slots__ = ("variable", "shape", "axis", "start", "stop", "count")
    VARIABLE_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    AXIS_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    variable: str
    shape: _containers.RepeatedScalarFieldContainer[int]
    axis: int
    start: int
    stop: int
    count: int
    def __init__(self, variable: _Optional[str] = ..., shape: _Optional[_Iterable[int]] = ..., axis: _Optional[int] = ..., start: _Optional[int] = ..., stop: _Optional[int] = ..., count: _Optional[int] = ...) -> None: ...

class CreateReply(_message.Message):
    __slots__ = ("variable", "versions_offset", "data_offset", "must_initialize", "segment", "private", "version", "gpu", "grow")
    VARIABLE_FIELD_NUMBER: _ClassVar[int]
    VERSIONS_OFFSET_FIELD_NUMBER: _ClassVar[int]
    DATA_OFFSET_FIELD_NUMBER: _ClassVar[int]
    MUST_INITIALIZE_FIELD_NUMBER: _ClassVar[int]
    SEGMENT_FIELD_NUMBER: _ClassVar[int]
    PRIVATE_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    GPU_FIELD_NUMBER: _ClassVar[int]
    GROW_FIELD_NUMBER: _ClassVar[int]
    variable: int
    versions_offset: int
    data_offset: int
    must_initialize: bool
    segment: int
    private: bool
    version: int
    gpu: int
    grow: int
    def __init__(self, variable: _Optional[int] = ..., versions_offset: _Optional[int] = ..., data_offset: _Optional[int] = ..., must_initialize: bool = ..., segment: _Optional[int] = ..., private: bool = ..., version: _Optional[int] = ..., gpu: _Optional[int] = ..., grow: _Optional[int] = ...) -> None: ...

class GrowRequest(_message.Message):
    __slots__ = ("segment", "create")
    SEGMENT_FIELD_NUMBER: _ClassVar[int]
    CREATE_FIELD_NUMBER: _ClassVar[int]
    segment: int
    create: CreateRequest
    def __init__(self, segment: _Optional[int] = ..., create: _Optional[_Union[CreateRequest, _Mapping]] = ...) -> None: ...

class GrowReply(_message.Message):
    __slots__ = ("enter", "nbytes", "segment")
    ENTER_FIELD_NUMBER: _ClassVar[int]
    NBYTES_FIELD_NUMBER: _ClassVar[int]
    SEGMENT_FIELD_NUMBER: _ClassVar[int]
    enter: bool
    nbytes: int
    segment: int
    def __init__(self, enter: bool = ..., nbytes: _Optional[int] = ..., segment: _Optional[int] = ...) -> None: ...

class OptimizerDef(_message.Message):
    __slots__ = ("kind", "values", "name", "schedule", "function", "slots")
    class ValuesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    KIND_FIELD_NUMBER: _ClassVar[int]
    VALUES_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    SCHEDULE_FIELD_NUMBER: _ClassVar[int]
    FUNCTION_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    kind: str
    values: _containers.ScalarMap[str, float]
    name: str
    schedule: bytes
    function: bytes
    slots: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, kind: _Optional[str] = ..., values: _Optional[_Mapping[str, float]] = ..., name: _Optional[str] = ..., schedule: _Optional[bytes] = ..., function: _Optional[bytes] = ..., slots: _Optional[_Iterable[str]] = ...) -> None: ...

class ConfigureReply(_message.Message):
    __slots__ = ("rule",)
    RULE_FIELD_NUMBER: _ClassVar[int]
    rule: int
    def __init__(self, rule: _Optional[int] = ...) -> None: ...

class SliceRequest(_message.Message):
    __slots__ = ("connection", "index")
    CONNECTION_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    connection: int
    index: int
    def __init__(self, connection: _Optional[int] = ..., index: _Optional[int] = ...) -> None: ...

class EnterRequest(_message.Message):
    __slots__ = ("connection", "step", "gives", "description")
    CONNECTION_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    GIVES_FIELD_NUMBER: _ClassVar[int]
    DESCRIPTION_FIELD_NUMBER: _ClassVar[int]
    connection: int
    step: int
    gives: bool
    description: str
    def __init__(self, connection: _Optional[int] = ..., step: _Optional[int] = ..., gives: bool = ..., description: _Optional[str] = ...) -> None: ...

class EnterReply(_message.Message):
    __slots__ = ("step", "members", "problem")
    STEP_FIELD_NUMBER: _ClassVar[int]
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    PROBLEM_FIELD_NUMBER: _ClassVar[int]
    step: int
    members: _containers.RepeatedScalarFieldContainer[int]
    problem: str
    def __init__(self, step: _Optional[int] = ..., members: _Optional[_Iterable[int]] = ..., problem: _Optional[str] = ...) -> None: ...

class AwaitRequest(_message.Message):
    __slots__ = ("connection", "step")
    CONNECTION_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    connection: int
    step: int
    def __init__(self, connection: _Optional[int] = ..., step: _Optional[int] = ...) -> None: ...

class ClockRequest(_message.Message):
    __slots__ = ("connection", "clock")
    CONNECTION_FIELD_NUMBER: _ClassVar[int]
    CLOCK_FIELD_NUMBER: _ClassVar[int]
    connection: int
    clock: int
    def __init__(self, connection: _Optional[int] = ..., clock: _Optional[int] = ...) -> None: ...

class MissingReply(_message.Message):
    __slots__ = ("workers",)
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    workers: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, workers: _Optional[_Iterable[int]] = ...) -> None: ...

class ReadRequest(_message.Message):
    __slots__ = ("variable", "start", "stop")
    VARIABLE_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    variable: int
    start: int
    stop: int
    def __init__(self, variable: _Optional[int] = ..., start: _Optional[int] = ..., stop: _Optional[int] = ...) -> None: ...

class ReadReply(_message.Message):
    __slots__ = ("version",)
    VERSION_FIELD_NUMBER: _ClassVar[int]
    version: int
    def __init__(self, version: _Optional[int] = ...) -> None: ...

class ReadManyRequest(_message.Message):
    __slots__ = ("variables",)
    VARIABLES_FIELD_NUMBER: _ClassVar[int]
    variables: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, variables: _Optional[_Iterable[int]] = ...) -> None: ...

class ReadManyReply(_message.Message):
    __slots__ = ("versions",)
    VERSIONS_FIELD_NUMBER: _ClassVar[int]
    versions: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, versions: _Optional[_Iterable[int]] = ...) -> None: ...

class HoldRequest(_message.Message):
    __slots__ = ("connection", "path")
    CONNECTION_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    connection: int
    path: str
    def __init__(self, connection: _Optional[int] = ..., path: _Optional[str] = ...) -> None: ...

class HoldReply(_message.Message):
    __slots__ = ("last",)
    LAST_FIELD_NUMBER: _ClassVar[int]
    last: _containers.RepeatedCompositeFieldContainer[Sent]
    def __init__(self, last: _Optional[_Iterable[_Union[Sent, _Mapping]]] = ...) -> None: ...

class Sent(_message.Message):
    __slots__ = ("worker", "strategy", "sent")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    STRATEGY_FIELD_NUMBER: _ClassVar[int]
    SENT_FIELD_NUMBER: _ClassVar[int]
    worker: int
    strategy: int
    sent: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, worker: _Optional[int] = ..., strategy: _Optional[int] = ..., sent: _Optional[_Iterable[int]] = ...) -> None: ...

class SaveRequest(_message.Message):
    __slots__ = ("path", "targets")
    PATH_FIELD_NUMBER: _ClassVar[int]
    TARGETS_FIELD_NUMBER: _ClassVar[int]
    path: str
    targets: _containers.RepeatedCompositeFieldContainer[Target]
    def __init__(self, path: _Optional[str] = ..., targets: _Optional[_Iterable[_Union[Target, _Mapping]]] = ...) -> None: ...

class SaveReply(_message.Message):
    __slots__ = ("nbytes",)
    NBYTES_FIELD_NUMBER: _ClassVar[int]
    nbytes: int
    def __init__(self, nbytes: _Optional[int] = ...) -> None: ...

class FetchRequest(_message.Message):
    __slots__ = ("path", "start", "stop")
    PATH_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    path: str
    start: int
    stop: int
    def __init__(self, path: _Optional[str] = ..., start: _Optional[int] = ..., stop: _Optional[int] = ...) -> None: ...

class Target(_message.Message):
    __slots__ = ("worker", "strategy", "sequence")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    STRATEGY_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    worker: int
    strategy: int
    sequence: int
    def __init__(self, worker: _Optional[int] = ..., strategy: _Optional[int] = ..., sequence: _Optional[int] = ...) -> None: ...

class CheckRestoreRequest(_message.Message):
    __slots__ = ("checkpoint", "worker", "connection")
    CHECKPOINT_FIELD_NUMBER: _ClassVar[int]
    WORKER_FIELD_NUMBER: _ClassVar[int]
    CONNECTION_FIELD_NUMBER: _ClassVar[int]
    checkpoint: Checkpoint
    worker: int
    connection: int
    def __init__(self, checkpoint: _Optional[_Union[Checkpoint, _Mapping]] = ..., worker: _Optional[int] = ..., connection: _Optional[int] = ...) -> None: ...

class Checkpoint(_message.Message):
    __slots__ = ("path", "names", "index")
    PATH_FIELD_NUMBER: _ClassVar[int]
    NAMES_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    path: str
    names: _containers.RepeatedScalarFieldContainer[str]
    index: bytes
    def __init__(self, path: _Optional[str] = ..., names: _Optional[_Iterable[str]] = ..., index: _Optional[bytes] = ...) -> None: ...

class CheckRestoreReply(_message.Message):
    __slots__ = ("found", "restores", "unseen")
    FOUND_FIELD_NUMBER: _ClassVar[int]
    RESTORES_FIELD_NUMBER: _ClassVar[int]
    UNSEEN_FIELD_NUMBER: _ClassVar[int]
    found: _containers.RepeatedScalarFieldContainer[str]
    restores: int
    unseen: bool
    def __init__(self, found: _Optional[_Iterable[str]] = ..., restores: _Optional[int] = ..., unseen: bool = ...) -> None: ...

class CarryRequest(_message.Message):
    __slots__ = ("checkpoint", "connection", "file", "start", "size")
    CHECKPOINT_FIELD_NUMBER: _ClassVar[int]
    CONNECTION_FIELD_NUMBER: _ClassVar[int]
    FILE_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    checkpoint: Checkpoint
    connection: int
    file: int
    start: int
    size: int
    def __init__(self, checkpoint: _Optional[_Union[Checkpoint, _Mapping]] = ..., connection: _Optional[int] = ..., file: _Optional[int] = ..., start: _Optional[int] = ..., size: _Optional[int] = ...) -> None: ...

class RestoreRequest(_message.Message):
    __slots__ = ("checkpoint", "ordinal", "worker", "connection")
    CHECKPOINT_FIELD_NUMBER: _ClassVar[int]
    ORDINAL_FIELD_NUMBER: _ClassVar[int]
    WORKER_FIELD_NUMBER: _ClassVar[int]
    CONNECTION_FIELD_NUMBER: _ClassVar[int]
    checkpoint: Checkpoint
    ordinal: int
    worker: int
    connection: int
    def __init__(self, checkpoint: _Optional[_Union[Checkpoint, _Mapping]] = ..., ordinal: _Optional[int] = ..., worker: _Optional[int] = ..., connection: _Optional[int] = ...) -> None: ...

class RestoreReply(_message.Message):
    __slots__ = ("needed",)
    NEEDED_FIELD_NUMBER: _ClassVar[int]
    needed: _containers.RepeatedCompositeFieldContainer[Stretch]
    def __init__(self, needed: _Optional[_Iterable[_Union[Stretch, _Mapping]]] = ...) -> None: ...

class Stretch(_message.Message):
    __slots__ = ("file", "start", "stop")
    FILE_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    file: int
    start: int
    stop: int
    def __init__(self, file: _Optional[int] = ..., start: _Optional[int] = ..., stop: _Optional[int] = ...) -> None: ...
