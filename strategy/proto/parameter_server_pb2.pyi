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
    __slots__ = ("worker", "strategy", "mode", "gpu", "one_sided")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    STRATEGY_FIELD_NUMBER: _ClassVar[int]
    MODE_FIELD_NUMBER: _ClassVar[int]
    GPU_FIELD_NUMBER: _ClassVar[int]
    ONE_SIDED_FIELD_NUMBER: _ClassVar[int]
    worker: int
    strategy: str
    mode: Mode
    gpu: int
    one_sided: bool
    def __init__(self, worker: _Optional[int] = ..., strategy: _Optional[str] = ..., mode: _Optional[_Union[Mode, _Mapping]] = ..., gpu: _Optional[int] = ..., one_sided: bool = ...) -> None: ...

class Mode(_message.Message):
    __slots__ = ("name", "backup_workers", "staleness", "compression")
    NAME_FIELD_NUMBER: _ClassVar[int]
    BACKUP_WORKERS_FIELD_NUMBER: _ClassVar[int]
    STALENESS_FIELD_NUMBER: _ClassVar[int]
    COMPRESSION_FIELD_NUMBER: _ClassVar[int]
    name: str
    backup_workers: int
    staleness: int
    compression: str
    def __init__(self, name: _Optional[str] = ..., backup_workers: _Optional[int] = ..., staleness: _Optional[int] = ..., compression: _Optional[str] = ...) -> None: ...

class AttachReply(_message.Message):
    __slots__ = ("connection", "step", "restores")
    CONNECTION_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    RESTORES_FIELD_NUMBER: _ClassVar[int]
    connection: int
    step: int
    restores: int
    def __init__(self, connection: _Optional[int] = ..., step: _Optional[int] = ..., restores: _Optional[int] = ...) -> None: ...

class Definition(_message.Message):
    __slots__ = ("name", "shape", "dtype", "parts", "worker", "connection")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    WORKER_FIELD_NUMBER: _ClassVar[int]
    CONNECTION_FIELD_NUMBER: _ClassVar[int]
    name: str
    shape: _containers.RepeatedScalarFieldContainer[int]
    dtype: str
    parts: _containers.RepeatedCompositeFieldContainer[PartOf]
    worker: int
    connection: int
    def __init__(self, name: _Optional[str] = ..., shape: _Optional[_Iterable[int]] = ..., dtype: _Optional[str] = ..., parts: _Optional[_Iterable[_Union[PartOf, _Mapping]]] = ..., worker: _Optional[int] = ..., connection: _Optional[int] = ...) -> None: ...

class PartOf(_message.Message):
    __slots__ = ("axis", "start", "stop", "server")
    AXIS_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    SERVER_FIELD_NUMBER: _ClassVar[int]
    axis: int
    start: int
    stop: int
    server: int
    def __init__(self, axis: _Optional[int] = ..., start: _Optional[int] = ..., stop: _Optional[int] = ..., server: _Optional[int] = ...) -> None: ...

class CreateRequest(_message.Message):
    __slots__ = ("name", "shape", "dtype", "worker", "connection", "variable", "whole", "part")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    WORKER_FIELD_NUMBER: _ClassVar[int]
    CONNECTION_FIELD_NUMBER: _ClassVar[int]
    VARIABLE_FIELD_NUMBER: _ClassVar[int]
    WHOLE_FIELD_NUMBER: _ClassVar[int]
    PART_FIELD_NUMBER: _ClassVar[int]
    name: str
    shape: _containers.RepeatedScalarFieldContainer[int]
    dtype: str
    worker: int
    connection: int
    variable: str
    whole: _containers.RepeatedScalarFieldContainer[int]
    part: PartOf
    def __init__(self, name: _Optional[str] = ..., shape: _Optional[_Iterable[int]] = ..., dtype: _Optional[str] = ..., worker: _Optional[int] = ..., connection: _Optional[int] = ..., variable: _Optional[str] = ..., whole: _Optional[_Iterable[int]] = ..., part: _Optional[_Union[PartOf, _Mapping]] = ...) -> None: ...

class CreateReply(_message.Message):
    __slots__ = ("variable", "versions_offset", "data_offset", "must_initialize", "version", "gpu", "segment", "address")
    VARIABLE_FIELD_NUMBER: _ClassVar[int]
    VERSIONS_OFFSET_FIELD_NUMBER: _ClassVar[int]
    DATA_OFFSET_FIELD_NUMBER: _ClassVar[int]
    MUST_INITIALIZE_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    GPU_FIELD_NUMBER: _ClassVar[int]
    SEGMENT_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    variable: int
    versions_offset: int
    data_offset: int
    must_initialize: bool
    version: int
    gpu: int
    segment: bytes
    address: int
    def __init__(self, variable: _Optional[int] = ..., versions_offset: _Optional[int] = ..., data_offset: _Optional[int] = ..., must_initialize: bool = ..., version: _Optional[int] = ..., gpu: _Optional[int] = ..., segment: _Optional[bytes] = ..., address: _Optional[int] = ...) -> None: ...

class AbandonRequest(_message.Message):
    __slots__ = ("variable", "connection")
    VARIABLE_FIELD_NUMBER: _ClassVar[int]
    CONNECTION_FIELD_NUMBER: _ClassVar[int]
    variable: int
    connection: int
    def __init__(self, variable: _Optional[int] = ..., connection: _Optional[int] = ...) -> None: ...

class ConfigureRequest(_message.Message):
    __slots__ = ("optimizer", "connection", "dropped")
    OPTIMIZER_FIELD_NUMBER: _ClassVar[int]
    CONNECTION_FIELD_NUMBER: _ClassVar[int]
    DROPPED_FIELD_NUMBER: _ClassVar[int]
    optimizer: OptimizerDef
    connection: int
    dropped: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, optimizer: _Optional[_Union[OptimizerDef, _Mapping]] = ..., connection: _Optional[int] = ..., dropped: _Optional[_Iterable[int]] = ...) -> None: ...

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
    strategy: str
    sent: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, worker: _Optional[int] = ..., strategy: _Optional[str] = ..., sent: _Optional[_Iterable[int]] = ...) -> None: ...

class SaveRequest(_message.Message):
    __slots__ = ("path", "targets", "copies")
    PATH_FIELD_NUMBER: _ClassVar[int]
    TARGETS_FIELD_NUMBER: _ClassVar[int]
    COPIES_FIELD_NUMBER: _ClassVar[int]
    path: str
    targets: _containers.RepeatedCompositeFieldContainer[Target]
    copies: bool
    def __init__(self, path: _Optional[str] = ..., targets: _Optional[_Iterable[_Union[Target, _Mapping]]] = ..., copies: bool = ...) -> None: ...

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
    strategy: str
    sequence: int
    def __init__(self, worker: _Optional[int] = ..., strategy: _Optional[str] = ..., sequence: _Optional[int] = ...) -> None: ...

class RestoreRequest(_message.Message):
    __slots__ = ("connection", "path", "index", "number")
    CONNECTION_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    connection: int
    path: str
    index: bytes
    number: int
    def __init__(self, connection: _Optional[int] = ..., path: _Optional[str] = ..., index: _Optional[bytes] = ..., number: _Optional[int] = ...) -> None: ...

class EndRestoreRequest(_message.Message):
    __slots__ = ("connection", "path", "index", "problem")
    CONNECTION_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    PROBLEM_FIELD_NUMBER: _ClassVar[int]
    connection: int
    path: str
    index: bytes
    problem: str
    def __init__(self, connection: _Optional[int] = ..., path: _Optional[str] = ..., index: _Optional[bytes] = ..., problem: _Optional[str] = ...) -> None: ...

class VariablesReply(_message.Message):
    __slots__ = ("variables",)
    VARIABLES_FIELD_NUMBER: _ClassVar[int]
    variables: _containers.RepeatedCompositeFieldContainer[ServedVariable]
    def __init__(self, variables: _Optional[_Iterable[_Union[ServedVariable, _Mapping]]] = ...) -> None: ...

class ServedVariable(_message.Message):
    __slots__ = ("name", "number", "dtype", "variable", "whole", "part")
    NAME_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    VARIABLE_FIELD_NUMBER: _ClassVar[int]
    WHOLE_FIELD_NUMBER: _ClassVar[int]
    PART_FIELD_NUMBER: _ClassVar[int]
    name: str
    number: int
    dtype: str
    variable: str
    whole: _containers.RepeatedScalarFieldContainer[int]
    part: PartOf
    def __init__(self, name: _Optional[str] = ..., number: _Optional[int] = ..., dtype: _Optional[str] = ..., variable: _Optional[str] = ..., whole: _Optional[_Iterable[int]] = ..., part: _Optional[_Union[PartOf, _Mapping]] = ...) -> None: ...

class RestoreArrayRequest(_message.Message):
    __slots__ = ("connection", "variable", "slices", "slot", "dtype", "state")
    CONNECTION_FIELD_NUMBER: _ClassVar[int]
    VARIABLE_FIELD_NUMBER: _ClassVar[int]
    SLICES_FIELD_NUMBER: _ClassVar[int]
    SLOT_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    connection: int
    variable: int
    slices: int
    slot: str
    dtype: str
    state: VariableState
    def __init__(self, connection: _Optional[int] = ..., variable: _Optional[int] = ..., slices: _Optional[int] = ..., slot: _Optional[str] = ..., dtype: _Optional[str] = ..., state: _Optional[_Union[VariableState, _Mapping]] = ...) -> None: ...

class VariableState(_message.Message):
    __slots__ = ("slots", "steps")
    class SlotsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    class StepsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    slots: _containers.ScalarMap[str, str]
    steps: _containers.ScalarMap[str, int]
    def __init__(self, slots: _Optional[_Mapping[str, str]] = ..., steps: _Optional[_Mapping[str, int]] = ...) -> None: ...
