from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ShardingPolicy(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    OFF: _ClassVar[ShardingPolicy]
    DYNAMIC: _ClassVar[ShardingPolicy]
    FILE: _ClassVar[ShardingPolicy]
    DATA: _ClassVar[ShardingPolicy]
    FILE_OR_DATA: _ClassVar[ShardingPolicy]
    HINT: _ClassVar[ShardingPolicy]

class Consumption(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    EXCLUSIVE: _ClassVar[Consumption]
    FIRST_COME: _ClassVar[Consumption]
    DETERMINISTIC: _ClassVar[Consumption]
    COORDINATED: _ClassVar[Consumption]
    CROSS_TRAINER: _ClassVar[Consumption]
    SNAPSHOT: _ClassVar[Consumption]

class Delivery(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    EXACTLY_ONCE: _ClassVar[Delivery]
    AT_LEAST_ONCE: _ClassVar[Delivery]
    AT_MOST_ONCE: _ClassVar[Delivery]

class Target(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    AUTO: _ClassVar[Target]
    ANY: _ClassVar[Target]
    LOCAL: _ClassVar[Target]
OFF: ShardingPolicy
DYNAMIC: ShardingPolicy
FILE: ShardingPolicy
DATA: ShardingPolicy
FILE_OR_DATA: ShardingPolicy
HINT: ShardingPolicy
EXCLUSIVE: Consumption
FIRST_COME: Consumption
DETERMINISTIC: Consumption
COORDINATED: Consumption
CROSS_TRAINER: Consumption
SNAPSHOT: Consumption
EXACTLY_ONCE: Delivery
AT_LEAST_ONCE: Delivery
AT_MOST_ONCE: Delivery
AUTO: Target
ANY: Target
LOCAL: Target

class RegisterDatasetRequest(_message.Message):
    __slots__ = ("digest", "summary", "pickle", "source_length", "name", "spec", "cardinality", "identity")
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    SUMMARY_FIELD_NUMBER: _ClassVar[int]
    PICKLE_FIELD_NUMBER: _ClassVar[int]
    SOURCE_LENGTH_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    SPEC_FIELD_NUMBER: _ClassVar[int]
    CARDINALITY_FIELD_NUMBER: _ClassVar[int]
    IDENTITY_FIELD_NUMBER: _ClassVar[int]
    digest: bytes
    summary: str
    pickle: bytes
    source_length: int
    name: str
    spec: bytes
    cardinality: int
    identity: bytes
    def __init__(self, digest: _Optional[bytes] = ..., summary: _Optional[str] = ..., pickle: _Optional[bytes] = ..., source_length: _Optional[int] = ..., name: _Optional[str] = ..., spec: _Optional[bytes] = ..., cardinality: _Optional[int] = ..., identity: _Optional[bytes] = ...) -> None: ...

class RegisterDatasetReply(_message.Message):
    __slots__ = ("dataset_id", "name")
    DATASET_ID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    dataset_id: int
    name: str
    def __init__(self, dataset_id: _Optional[int] = ..., name: _Optional[str] = ...) -> None: ...

class DatasetInfoRequest(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class DatasetInfo(_message.Message):
    __slots__ = ("dataset_id", "summary", "spec", "cardinality", "source_length", "identity")
    DATASET_ID_FIELD_NUMBER: _ClassVar[int]
    SUMMARY_FIELD_NUMBER: _ClassVar[int]
    SPEC_FIELD_NUMBER: _ClassVar[int]
    CARDINALITY_FIELD_NUMBER: _ClassVar[int]
    SOURCE_LENGTH_FIELD_NUMBER: _ClassVar[int]
    IDENTITY_FIELD_NUMBER: _ClassVar[int]
    dataset_id: int
    summary: str
    spec: bytes
    cardinality: int
    source_length: int
    identity: bytes
    def __init__(self, dataset_id: _Optional[int] = ..., summary: _Optional[str] = ..., spec: _Optional[bytes] = ..., cardinality: _Optional[int] = ..., source_length: _Optional[int] = ..., identity: _Optional[bytes] = ...) -> None: ...

class SaveRequest(_message.Message):
    __slots__ = ("dataset_id", "path", "compression", "spec")
    DATASET_ID_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    COMPRESSION_FIELD_NUMBER: _ClassVar[int]
    SPEC_FIELD_NUMBER: _ClassVar[int]
    dataset_id: int
    path: str
    compression: str
    spec: bytes
    def __init__(self, dataset_id: _Optional[int] = ..., path: _Optional[str] = ..., compression: _Optional[str] = ..., spec: _Optional[bytes] = ...) -> None: ...

class GetDatasetRequest(_message.Message):
    __slots__ = ("dataset_id",)
    DATASET_ID_FIELD_NUMBER: _ClassVar[int]
    dataset_id: int
    def __init__(self, dataset_id: _Optional[int] = ...) -> None: ...

class Dataset(_message.Message):
    __slots__ = ("pickle",)
    PICKLE_FIELD_NUMBER: _ClassVar[int]
    pickle: bytes
    def __init__(self, pickle: _Optional[bytes] = ...) -> None: ...

class Terms(_message.Message):
    __slots__ = ("policy", "consumption", "delivery", "target", "num_shards", "num_consumers", "path")
    POLICY_FIELD_NUMBER: _ClassVar[int]
    CONSUMPTION_FIELD_NUMBER: _ClassVar[int]
    DELIVERY_FIELD_NUMBER: _ClassVar[int]
    TARGET_FIELD_NUMBER: _ClassVar[int]
    NUM_SHARDS_FIELD_NUMBER: _ClassVar[int]
    NUM_CONSUMERS_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    policy: ShardingPolicy
    consumption: Consumption
    delivery: Delivery
    target: Target
    num_shards: int
    num_consumers: int
    path: str
    def __init__(self, policy: _Optional[_Union[ShardingPolicy, str]] = ..., consumption: _Optional[_Union[Consumption, str]] = ..., delivery: _Optional[_Union[Delivery, str]] = ..., target: _Optional[_Union[Target, str]] = ..., num_shards: _Optional[int] = ..., num_consumers: _Optional[int] = ..., path: _Optional[str] = ...) -> None: ...

class IterationRequest(_message.Message):
    __slots__ = ("dataset_id", "terms", "job_name", "repetition", "process", "consumer_index", "state", "token")
    DATASET_ID_FIELD_NUMBER: _ClassVar[int]
    TERMS_FIELD_NUMBER: _ClassVar[int]
    JOB_NAME_FIELD_NUMBER: _ClassVar[int]
    REPETITION_FIELD_NUMBER: _ClassVar[int]
    PROCESS_FIELD_NUMBER: _ClassVar[int]
    CONSUMER_INDEX_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    dataset_id: int
    terms: Terms
    job_name: str
    repetition: int
    process: str
    consumer_index: int
    state: State
    token: int
    def __init__(self, dataset_id: _Optional[int] = ..., terms: _Optional[_Union[Terms, _Mapping]] = ..., job_name: _Optional[str] = ..., repetition: _Optional[int] = ..., process: _Optional[str] = ..., consumer_index: _Optional[int] = ..., state: _Optional[_Union[State, _Mapping]] = ..., token: _Optional[int] = ...) -> None: ...

class IterationReply(_message.Message):
    __slots__ = ("client_id", "state", "begin", "lease_s")
    CLIENT_ID_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    BEGIN_FIELD_NUMBER: _ClassVar[int]
    LEASE_S_FIELD_NUMBER: _ClassVar[int]
    client_id: int
    state: IterationState
    begin: State
    lease_s: float
    def __init__(self, client_id: _Optional[int] = ..., state: _Optional[_Union[IterationState, _Mapping]] = ..., begin: _Optional[_Union[State, _Mapping]] = ..., lease_s: _Optional[float] = ...) -> None: ...

class Ranges(_message.Message):
    __slots__ = ("part", "bounds")
    PART_FIELD_NUMBER: _ClassVar[int]
    BOUNDS_FIELD_NUMBER: _ClassVar[int]
    part: int
    bounds: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, part: _Optional[int] = ..., bounds: _Optional[_Iterable[int]] = ...) -> None: ...

class ClientRequest(_message.Message):
    __slots__ = ("client_id", "used", "held", "settled", "version", "unreachable", "work", "at_end")
    CLIENT_ID_FIELD_NUMBER: _ClassVar[int]
    USED_FIELD_NUMBER: _ClassVar[int]
    HELD_FIELD_NUMBER: _ClassVar[int]
    SETTLED_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    UNREACHABLE_FIELD_NUMBER: _ClassVar[int]
    WORK_FIELD_NUMBER: _ClassVar[int]
    AT_END_FIELD_NUMBER: _ClassVar[int]
    client_id: int
    used: _containers.RepeatedCompositeFieldContainer[Ranges]
    held: _containers.RepeatedCompositeFieldContainer[Ranges]
    settled: _containers.RepeatedScalarFieldContainer[int]
    version: int
    unreachable: _containers.RepeatedScalarFieldContainer[int]
    work: ClientWork
    at_end: bool
    def __init__(self, client_id: _Optional[int] = ..., used: _Optional[_Iterable[_Union[Ranges, _Mapping]]] = ..., held: _Optional[_Iterable[_Union[Ranges, _Mapping]]] = ..., settled: _Optional[_Iterable[int]] = ..., version: _Optional[int] = ..., unreachable: _Optional[_Iterable[int]] = ..., work: _Optional[_Union[ClientWork, _Mapping]] = ..., at_end: bool = ...) -> None: ...

class ClientWork(_message.Message):
    __slots__ = ("elements", "seconds", "waited_s")
    ELEMENTS_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    WAITED_S_FIELD_NUMBER: _ClassVar[int]
    elements: int
    seconds: float
    waited_s: float
    def __init__(self, elements: _Optional[int] = ..., seconds: _Optional[float] = ..., waited_s: _Optional[float] = ...) -> None: ...

class TaskAddress(_message.Message):
    __slots__ = ("task_id", "worker", "part")
    TASK_ID_FIELD_NUMBER: _ClassVar[int]
    WORKER_FIELD_NUMBER: _ClassVar[int]
    PART_FIELD_NUMBER: _ClassVar[int]
    task_id: int
    worker: str
    part: int
    def __init__(self, task_id: _Optional[int] = ..., worker: _Optional[str] = ..., part: _Optional[int] = ...) -> None: ...

class IterationState(_message.Message):
    __slots__ = ("tasks", "settle", "finished", "waiting", "version", "dropped", "ended", "elsewhere", "over", "beat_soon", "given_out")
    TASKS_FIELD_NUMBER: _ClassVar[int]
    SETTLE_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    DROPPED_FIELD_NUMBER: _ClassVar[int]
    ENDED_FIELD_NUMBER: _ClassVar[int]
    ELSEWHERE_FIELD_NUMBER: _ClassVar[int]
    OVER_FIELD_NUMBER: _ClassVar[int]
    BEAT_SOON_FIELD_NUMBER: _ClassVar[int]
    GIVEN_OUT_FIELD_NUMBER: _ClassVar[int]
    tasks: _containers.RepeatedCompositeFieldContainer[TaskAddress]
    settle: _containers.RepeatedScalarFieldContainer[int]
    finished: bool
    waiting: int
    version: int
    dropped: int
    ended: _containers.RepeatedCompositeFieldContainer[PartState]
    elsewhere: int
    over: bool
    beat_soon: bool
    given_out: int
    def __init__(self, tasks: _Optional[_Iterable[_Union[TaskAddress, _Mapping]]] = ..., settle: _Optional[_Iterable[int]] = ..., finished: bool = ..., waiting: _Optional[int] = ..., version: _Optional[int] = ..., dropped: _Optional[int] = ..., ended: _Optional[_Iterable[_Union[PartState, _Mapping]]] = ..., elsewhere: _Optional[int] = ..., over: bool = ..., beat_soon: bool = ..., given_out: _Optional[int] = ...) -> None: ...

class RegisterWorkerRequest(_message.Message):
    __slots__ = ("address", "process", "tags")
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    PROCESS_FIELD_NUMBER: _ClassVar[int]
    TAGS_FIELD_NUMBER: _ClassVar[int]
    address: str
    process: str
    tags: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, address: _Optional[str] = ..., process: _Optional[str] = ..., tags: _Optional[_Iterable[str]] = ...) -> None: ...

class RegisterWorkerReply(_message.Message):
    __slots__ = ("worker_id",)
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    worker_id: int
    def __init__(self, worker_id: _Optional[int] = ...) -> None: ...

class Checkpoint(_message.Message):
    __slots__ = ("index", "state", "position")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    index: int
    state: bytes
    position: int
    def __init__(self, index: _Optional[int] = ..., state: _Optional[bytes] = ..., position: _Optional[int] = ...) -> None: ...

class TaskProgress(_message.Message):
    __slots__ = ("task_id", "checkpoint", "ended", "total", "code", "message", "used_up")
    TASK_ID_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINT_FIELD_NUMBER: _ClassVar[int]
    ENDED_FIELD_NUMBER: _ClassVar[int]
    TOTAL_FIELD_NUMBER: _ClassVar[int]
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    USED_UP_FIELD_NUMBER: _ClassVar[int]
    task_id: int
    checkpoint: Checkpoint
    ended: bool
    total: int
    code: int
    message: str
    used_up: bool
    def __init__(self, task_id: _Optional[int] = ..., checkpoint: _Optional[_Union[Checkpoint, _Mapping]] = ..., ended: bool = ..., total: _Optional[int] = ..., code: _Optional[int] = ..., message: _Optional[str] = ..., used_up: bool = ...) -> None: ...

class WorkerRequest(_message.Message):
    __slots__ = ("worker_id", "task_ids", "progress", "work", "holders")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    TASK_IDS_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    WORK_FIELD_NUMBER: _ClassVar[int]
    HOLDERS_FIELD_NUMBER: _ClassVar[int]
    worker_id: int
    task_ids: _containers.RepeatedScalarFieldContainer[int]
    progress: _containers.RepeatedCompositeFieldContainer[TaskProgress]
    work: _containers.RepeatedCompositeFieldContainer[TaskWork]
    holders: _containers.RepeatedCompositeFieldContainer[Holders]
    def __init__(self, worker_id: _Optional[int] = ..., task_ids: _Optional[_Iterable[int]] = ..., progress: _Optional[_Iterable[_Union[TaskProgress, _Mapping]]] = ..., work: _Optional[_Iterable[_Union[TaskWork, _Mapping]]] = ..., holders: _Optional[_Iterable[_Union[Holders, _Mapping]]] = ...) -> None: ...

class Holders(_message.Message):
    __slots__ = ("task_id", "client_ids")
    TASK_ID_FIELD_NUMBER: _ClassVar[int]
    CLIENT_IDS_FIELD_NUMBER: _ClassVar[int]
    task_id: int
    client_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, task_id: _Optional[int] = ..., client_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class TaskWork(_message.Message):
    __slots__ = ("task_id", "elements", "seconds", "waited_s", "stages")
    TASK_ID_FIELD_NUMBER: _ClassVar[int]
    ELEMENTS_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    WAITED_S_FIELD_NUMBER: _ClassVar[int]
    STAGES_FIELD_NUMBER: _ClassVar[int]
    task_id: int
    elements: int
    seconds: float
    waited_s: float
    stages: _containers.RepeatedCompositeFieldContainer[Stage]
    def __init__(self, task_id: _Optional[int] = ..., elements: _Optional[int] = ..., seconds: _Optional[float] = ..., waited_s: _Optional[float] = ..., stages: _Optional[_Iterable[_Union[Stage, _Mapping]]] = ...) -> None: ...

class Stage(_message.Message):
    __slots__ = ("name", "seconds")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    name: str
    seconds: float
    def __init__(self, name: _Optional[str] = ..., seconds: _Optional[float] = ...) -> None: ...

class TasksUpdate(_message.Message):
    __slots__ = ("forget", "begin", "departures")
    FORGET_FIELD_NUMBER: _ClassVar[int]
    BEGIN_FIELD_NUMBER: _ClassVar[int]
    DEPARTURES_FIELD_NUMBER: _ClassVar[int]
    forget: _containers.RepeatedScalarFieldContainer[int]
    begin: _containers.RepeatedScalarFieldContainer[int]
    departures: _containers.RepeatedCompositeFieldContainer[Departure]
    def __init__(self, forget: _Optional[_Iterable[int]] = ..., begin: _Optional[_Iterable[int]] = ..., departures: _Optional[_Iterable[_Union[Departure, _Mapping]]] = ...) -> None: ...

class Departure(_message.Message):
    __slots__ = ("client_id", "task_id", "used")
    CLIENT_ID_FIELD_NUMBER: _ClassVar[int]
    TASK_ID_FIELD_NUMBER: _ClassVar[int]
    USED_FIELD_NUMBER: _ClassVar[int]
    client_id: int
    task_id: int
    used: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, client_id: _Optional[int] = ..., task_id: _Optional[int] = ..., used: _Optional[_Iterable[int]] = ...) -> None: ...

class TaskRequest(_message.Message):
    __slots__ = ("task_id",)
    TASK_ID_FIELD_NUMBER: _ClassVar[int]
    task_id: int
    def __init__(self, task_id: _Optional[int] = ...) -> None: ...

class Task(_message.Message):
    __slots__ = ("dataset_id", "policy", "repetition", "seed", "part", "consumption", "num_parts", "num_consumers", "checkpoint", "used", "held", "start", "delivery", "path", "attempt")
    DATASET_ID_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    REPETITION_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    PART_FIELD_NUMBER: _ClassVar[int]
    CONSUMPTION_FIELD_NUMBER: _ClassVar[int]
    NUM_PARTS_FIELD_NUMBER: _ClassVar[int]
    NUM_CONSUMERS_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINT_FIELD_NUMBER: _ClassVar[int]
    USED_FIELD_NUMBER: _ClassVar[int]
    HELD_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    DELIVERY_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    dataset_id: int
    policy: ShardingPolicy
    repetition: int
    seed: int
    part: int
    consumption: Consumption
    num_parts: int
    num_consumers: int
    checkpoint: Checkpoint
    used: Ranges
    held: _containers.RepeatedCompositeFieldContainer[Held]
    start: int
    delivery: Delivery
    path: str
    attempt: int
    def __init__(self, dataset_id: _Optional[int] = ..., policy: _Optional[_Union[ShardingPolicy, str]] = ..., repetition: _Optional[int] = ..., seed: _Optional[int] = ..., part: _Optional[int] = ..., consumption: _Optional[_Union[Consumption, str]] = ..., num_parts: _Optional[int] = ..., num_consumers: _Optional[int] = ..., checkpoint: _Optional[_Union[Checkpoint, _Mapping]] = ..., used: _Optional[_Union[Ranges, _Mapping]] = ..., held: _Optional[_Iterable[_Union[Held, _Mapping]]] = ..., start: _Optional[int] = ..., delivery: _Optional[_Union[Delivery, str]] = ..., path: _Optional[str] = ..., attempt: _Optional[int] = ...) -> None: ...

class Held(_message.Message):
    __slots__ = ("client_id", "ranges")
    CLIENT_ID_FIELD_NUMBER: _ClassVar[int]
    RANGES_FIELD_NUMBER: _ClassVar[int]
    client_id: int
    ranges: Ranges
    def __init__(self, client_id: _Optional[int] = ..., ranges: _Optional[_Union[Ranges, _Mapping]] = ...) -> None: ...

class GetSplitRequest(_message.Message):
    __slots__ = ("task_id", "position")
    TASK_ID_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    task_id: int
    position: int
    def __init__(self, task_id: _Optional[int] = ..., position: _Optional[int] = ...) -> None: ...

class Split(_message.Message):
    __slots__ = ("start", "stop")
    START_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    start: int
    stop: int
    def __init__(self, start: _Optional[int] = ..., stop: _Optional[int] = ...) -> None: ...

class GetElementRequest(_message.Message):
    __slots__ = ("task_id", "client_id", "sequence", "max_elements", "hold", "acknowledged", "seek", "start", "period", "offset", "consumer_index", "trainer_id", "codec", "until", "used")
    TASK_ID_FIELD_NUMBER: _ClassVar[int]
    CLIENT_ID_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    MAX_ELEMENTS_FIELD_NUMBER: _ClassVar[int]
    HOLD_FIELD_NUMBER: _ClassVar[int]
    ACKNOWLEDGED_FIELD_NUMBER: _ClassVar[int]
    SEEK_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    PERIOD_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    CONSUMER_INDEX_FIELD_NUMBER: _ClassVar[int]
    TRAINER_ID_FIELD_NUMBER: _ClassVar[int]
    CODEC_FIELD_NUMBER: _ClassVar[int]
    UNTIL_FIELD_NUMBER: _ClassVar[int]
    USED_FIELD_NUMBER: _ClassVar[int]
    task_id: int
    client_id: int
    sequence: int
    max_elements: int
    hold: bool
    acknowledged: int
    seek: bool
    start: int
    period: int
    offset: int
    consumer_index: int
    trainer_id: str
    codec: str
    until: int
    used: Ranges
    def __init__(self, task_id: _Optional[int] = ..., client_id: _Optional[int] = ..., sequence: _Optional[int] = ..., max_elements: _Optional[int] = ..., hold: bool = ..., acknowledged: _Optional[int] = ..., seek: bool = ..., start: _Optional[int] = ..., period: _Optional[int] = ..., offset: _Optional[int] = ..., consumer_index: _Optional[int] = ..., trainer_id: _Optional[str] = ..., codec: _Optional[str] = ..., until: _Optional[int] = ..., used: _Optional[_Union[Ranges, _Mapping]] = ...) -> None: ...

class GetElementReply(_message.Message):
    __slots__ = ("count", "pickle", "end", "failure", "first", "stop", "sizes")
    COUNT_FIELD_NUMBER: _ClassVar[int]
    PICKLE_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    FIRST_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    SIZES_FIELD_NUMBER: _ClassVar[int]
    count: int
    pickle: bytes
    end: bool
    failure: bytes
    first: int
    stop: int
    sizes: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, count: _Optional[int] = ..., pickle: _Optional[bytes] = ..., end: bool = ..., failure: _Optional[bytes] = ..., first: _Optional[int] = ..., stop: _Optional[int] = ..., sizes: _Optional[_Iterable[int]] = ...) -> None: ...

class ProbeRequest(_message.Message):
    __slots__ = ("nbytes",)
    NBYTES_FIELD_NUMBER: _ClassVar[int]
    nbytes: int
    def __init__(self, nbytes: _Optional[int] = ...) -> None: ...

class CheckpointRequest(_message.Message):
    __slots__ = ("task_id", "index")
    TASK_ID_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    task_id: int
    index: int
    def __init__(self, task_id: _Optional[int] = ..., index: _Optional[int] = ...) -> None: ...

class Status(_message.Message):
    __slots__ = ("workers", "jobs")
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    JOBS_FIELD_NUMBER: _ClassVar[int]
    workers: _containers.RepeatedCompositeFieldContainer[WorkerStatus]
    jobs: _containers.RepeatedCompositeFieldContainer[JobStatus]
    def __init__(self, workers: _Optional[_Iterable[_Union[WorkerStatus, _Mapping]]] = ..., jobs: _Optional[_Iterable[_Union[JobStatus, _Mapping]]] = ...) -> None: ...

class WorkerStatus(_message.Message):
    __slots__ = ("address", "silent_s", "work")
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    SILENT_S_FIELD_NUMBER: _ClassVar[int]
    WORK_FIELD_NUMBER: _ClassVar[int]
    address: str
    silent_s: float
    work: _containers.RepeatedCompositeFieldContainer[TaskWork]
    def __init__(self, address: _Optional[str] = ..., silent_s: _Optional[float] = ..., work: _Optional[_Iterable[_Union[TaskWork, _Mapping]]] = ...) -> None: ...

class JobStatus(_message.Message):
    __slots__ = ("name", "dataset", "repetition", "parts", "finished", "waiting", "clients")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DATASET_FIELD_NUMBER: _ClassVar[int]
    REPETITION_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    CLIENTS_FIELD_NUMBER: _ClassVar[int]
    name: str
    dataset: str
    repetition: int
    parts: int
    finished: int
    waiting: int
    clients: _containers.RepeatedCompositeFieldContainer[ClientStatus]
    def __init__(self, name: _Optional[str] = ..., dataset: _Optional[str] = ..., repetition: _Optional[int] = ..., parts: _Optional[int] = ..., finished: _Optional[int] = ..., waiting: _Optional[int] = ..., clients: _Optional[_Iterable[_Union[ClientStatus, _Mapping]]] = ...) -> None: ...

class ClientStatus(_message.Message):
    __slots__ = ("client_id", "process", "consumer_index", "silent_s", "work")
    CLIENT_ID_FIELD_NUMBER: _ClassVar[int]
    PROCESS_FIELD_NUMBER: _ClassVar[int]
    CONSUMER_INDEX_FIELD_NUMBER: _ClassVar[int]
    SILENT_S_FIELD_NUMBER: _ClassVar[int]
    WORK_FIELD_NUMBER: _ClassVar[int]
    client_id: int
    process: str
    consumer_index: int
    silent_s: float
    work: ClientWork
    def __init__(self, client_id: _Optional[int] = ..., process: _Optional[str] = ..., consumer_index: _Optional[int] = ..., silent_s: _Optional[float] = ..., work: _Optional[_Union[ClientWork, _Mapping]] = ...) -> None: ...

class Splits(_message.Message):
    __slots__ = ("first", "bounds")
    FIRST_FIELD_NUMBER: _ClassVar[int]
    BOUNDS_FIELD_NUMBER: _ClassVar[int]
    first: int
    bounds: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, first: _Optional[int] = ..., bounds: _Optional[_Iterable[int]] = ...) -> None: ...

class PartState(_message.Message):
    __slots__ = ("part", "start", "checkpoint", "splits", "total")
    PART_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINT_FIELD_NUMBER: _ClassVar[int]
    SPLITS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_FIELD_NUMBER: _ClassVar[int]
    part: int
    start: int
    checkpoint: Checkpoint
    splits: Splits
    total: int
    def __init__(self, part: _Optional[int] = ..., start: _Optional[int] = ..., checkpoint: _Optional[_Union[Checkpoint, _Mapping]] = ..., splits: _Optional[_Union[Splits, _Mapping]] = ..., total: _Optional[int] = ...) -> None: ...

class State(_message.Message):
    __slots__ = ("summary", "terms", "seed", "repetition", "parts", "next_index", "position", "skip", "next_part", "begin_round", "over", "identity")
    SUMMARY_FIELD_NUMBER: _ClassVar[int]
    TERMS_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    REPETITION_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    NEXT_INDEX_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    SKIP_FIELD_NUMBER: _ClassVar[int]
    NEXT_PART_FIELD_NUMBER: _ClassVar[int]
    BEGIN_ROUND_FIELD_NUMBER: _ClassVar[int]
    OVER_FIELD_NUMBER: _ClassVar[int]
    IDENTITY_FIELD_NUMBER: _ClassVar[int]
    summary: str
    terms: Terms
    seed: int
    repetition: int
    parts: _containers.RepeatedCompositeFieldContainer[PartState]
    next_index: int
    position: int
    skip: int
    next_part: int
    begin_round: int
    over: bool
    identity: bytes
    def __init__(self, summary: _Optional[str] = ..., terms: _Optional[_Union[Terms, _Mapping]] = ..., seed: _Optional[int] = ..., repetition: _Optional[int] = ..., parts: _Optional[_Iterable[_Union[PartState, _Mapping]]] = ..., next_index: _Optional[int] = ..., position: _Optional[int] = ..., skip: _Optional[int] = ..., next_part: _Optional[int] = ..., begin_round: _Optional[int] = ..., over: bool = ..., identity: _Optional[bytes] = ...) -> None: ...

class StateRequest(_message.Message):
    __slots__ = ("client_id", "parts")
    CLIENT_ID_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    client_id: int
    parts: _containers.RepeatedCompositeFieldContainer[PartState]
    def __init__(self, client_id: _Optional[int] = ..., parts: _Optional[_Iterable[_Union[PartState, _Mapping]]] = ...) -> None: ...

class JournalState(_message.Message):
    __slots__ = ("records",)
    RECORDS_FIELD_NUMBER: _ClassVar[int]
    records: _containers.RepeatedCompositeFieldContainer[JournalRecord]
    def __init__(self, records: _Optional[_Iterable[_Union[JournalRecord, _Mapping]]] = ...) -> None: ...

class JournalRecord(_message.Message):
    __slots__ = ("kind", "key", "value", "file", "crc")
    KIND_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    FILE_FIELD_NUMBER: _ClassVar[int]
    CRC_FIELD_NUMBER: _ClassVar[int]
    kind: str
    key: int
    value: bytes
    file: int
    crc: int
    def __init__(self, kind: _Optional[str] = ..., key: _Optional[int] = ..., value: _Optional[bytes] = ..., file: _Optional[int] = ..., crc: _Optional[int] = ...) -> None: ...

class StoredDataset(_message.Message):
    __slots__ = ("request", "buffers")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    BUFFERS_FIELD_NUMBER: _ClassVar[int]
    request: RegisterDatasetRequest
    buffers: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, request: _Optional[_Union[RegisterDatasetRequest, _Mapping]] = ..., buffers: _Optional[_Iterable[bytes]] = ...) -> None: ...

class StoredWorker(_message.Message):
    __slots__ = ("address", "process", "tags")
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    PROCESS_FIELD_NUMBER: _ClassVar[int]
    TAGS_FIELD_NUMBER: _ClassVar[int]
    address: str
    process: str
    tags: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, address: _Optional[str] = ..., process: _Optional[str] = ..., tags: _Optional[_Iterable[str]] = ...) -> None: ...

class StoredJob(_message.Message):
    __slots__ = ("name", "dataset_id", "terms", "finished")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DATASET_ID_FIELD_NUMBER: _ClassVar[int]
    TERMS_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    name: str
    dataset_id: int
    terms: Terms
    finished: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, name: _Optional[str] = ..., dataset_id: _Optional[int] = ..., terms: _Optional[_Union[Terms, _Mapping]] = ..., finished: _Optional[_Iterable[int]] = ...) -> None: ...

class StoredIteration(_message.Message):
    __slots__ = ("job_id", "repetition", "seed", "begin", "next_index", "dropped", "served", "joined", "code", "message")
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    REPETITION_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    BEGIN_FIELD_NUMBER: _ClassVar[int]
    NEXT_INDEX_FIELD_NUMBER: _ClassVar[int]
    DROPPED_FIELD_NUMBER: _ClassVar[int]
    SERVED_FIELD_NUMBER: _ClassVar[int]
    JOINED_FIELD_NUMBER: _ClassVar[int]
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    job_id: int
    repetition: int
    seed: int
    begin: State
    next_index: int
    dropped: int
    served: _containers.RepeatedScalarFieldContainer[str]
    joined: _containers.RepeatedScalarFieldContainer[int]
    code: int
    message: str
    def __init__(self, job_id: _Optional[int] = ..., repetition: _Optional[int] = ..., seed: _Optional[int] = ..., begin: _Optional[_Union[State, _Mapping]] = ..., next_index: _Optional[int] = ..., dropped: _Optional[int] = ..., served: _Optional[_Iterable[str]] = ..., joined: _Optional[_Iterable[int]] = ..., code: _Optional[int] = ..., message: _Optional[str] = ...) -> None: ...

class StoredPart(_message.Message):
    __slots__ = ("iteration_id", "state", "used", "finished", "home", "task_id", "worker_id", "running", "unsettled", "lost", "held", "marks", "address", "attempts")
    class MarksEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: int
        def __init__(self, key: _Optional[int] = ..., value: _Optional[int] = ...) -> None: ...
    ITERATION_ID_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    USED_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    HOME_FIELD_NUMBER: _ClassVar[int]
    TASK_ID_FIELD_NUMBER: _ClassVar[int]
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    UNSETTLED_FIELD_NUMBER: _ClassVar[int]
    LOST_FIELD_NUMBER: _ClassVar[int]
    HELD_FIELD_NUMBER: _ClassVar[int]
    MARKS_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    ATTEMPTS_FIELD_NUMBER: _ClassVar[int]
    iteration_id: int
    state: PartState
    used: Ranges
    finished: bool
    home: int
    task_id: int
    worker_id: int
    running: bool
    unsettled: _containers.RepeatedScalarFieldContainer[int]
    lost: bool
    held: _containers.RepeatedCompositeFieldContainer[Held]
    marks: _containers.ScalarMap[int, int]
    address: str
    attempts: int
    def __init__(self, iteration_id: _Optional[int] = ..., state: _Optional[_Union[PartState, _Mapping]] = ..., used: _Optional[_Union[Ranges, _Mapping]] = ..., finished: bool = ..., home: _Optional[int] = ..., task_id: _Optional[int] = ..., worker_id: _Optional[int] = ..., running: bool = ..., unsettled: _Optional[_Iterable[int]] = ..., lost: bool = ..., held: _Optional[_Iterable[_Union[Held, _Mapping]]] = ..., marks: _Optional[_Mapping[int, int]] = ..., address: _Optional[str] = ..., attempts: _Optional[int] = ...) -> None: ...

class StoredClient(_message.Message):
    __slots__ = ("iteration_id", "process", "consumer_index", "token")
    ITERATION_ID_FIELD_NUMBER: _ClassVar[int]
    PROCESS_FIELD_NUMBER: _ClassVar[int]
    CONSUMER_INDEX_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    iteration_id: int
    process: str
    consumer_index: int
    token: int
    def __init__(self, iteration_id: _Optional[int] = ..., process: _Optional[str] = ..., consumer_index: _Optional[int] = ..., token: _Optional[int] = ...) -> None: ...
