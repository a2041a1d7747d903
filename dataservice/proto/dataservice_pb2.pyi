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
OFF: ShardingPolicy
DYNAMIC: ShardingPolicy

class RegisterDatasetRequest(_message.Message):
    __slots__ = ("digest", "summary", "pickle", "source_length")
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    SUMMARY_FIELD_NUMBER: _ClassVar[int]
    PICKLE_FIELD_NUMBER: _ClassVar[int]
    SOURCE_LENGTH_FIELD_NUMBER: _ClassVar[int]
    digest: bytes
    summary: str
    pickle: bytes
    source_length: int
    def __init__(self, digest: _Optional[bytes] = ..., summary: _Optional[str] = ..., pickle: _Optional[bytes] = ..., source_length: _Optional[int] = ...) -> None: ...

class RegisterDatasetReply(_message.Message):
    __slots__ = ("dataset_id",)
    DATASET_ID_FIELD_NUMBER: _ClassVar[int]
    dataset_id: int
    def __init__(self, dataset_id: _Optional[int] = ...) -> None: ...

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

class IterationRequest(_message.Message):
    __slots__ = ("dataset_id", "policy", "job_name", "repetition")
    DATASET_ID_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    JOB_NAME_FIELD_NUMBER: _ClassVar[int]
    REPETITION_FIELD_NUMBER: _ClassVar[int]
    dataset_id: int
    policy: ShardingPolicy
    job_name: str
    repetition: int
    def __init__(self, dataset_id: _Optional[int] = ..., policy: _Optional[_Union[ShardingPolicy, str]] = ..., job_name: _Optional[str] = ..., repetition: _Optional[int] = ...) -> None: ...

class IterationReply(_message.Message):
    __slots__ = ("client_id", "state")
    CLIENT_ID_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    client_id: int
    state: IterationState
    def __init__(self, client_id: _Optional[int] = ..., state: _Optional[_Union[IterationState, _Mapping]] = ...) -> None: ...

class ClientRequest(_message.Message):
    __slots__ = ("client_id",)
    CLIENT_ID_FIELD_NUMBER: _ClassVar[int]
    client_id: int
    def __init__(self, client_id: _Optional[int] = ...) -> None: ...

class TaskAddress(_message.Message):
    __slots__ = ("task_id", "worker")
    TASK_ID_FIELD_NUMBER: _ClassVar[int]
    WORKER_FIELD_NUMBER: _ClassVar[int]
    task_id: int
    worker: str
    def __init__(self, task_id: _Optional[int] = ..., worker: _Optional[str] = ...) -> None: ...

class IterationState(_message.Message):
    __slots__ = ("tasks", "lost", "finished")
    TASKS_FIELD_NUMBER: _ClassVar[int]
    LOST_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    tasks: _containers.RepeatedCompositeFieldContainer[TaskAddress]
    lost: _containers.RepeatedCompositeFieldContainer[TaskAddress]
    finished: bool
    def __init__(self, tasks: _Optional[_Iterable[_Union[TaskAddress, _Mapping]]] = ..., lost: _Optional[_Iterable[_Union[TaskAddress, _Mapping]]] = ..., finished: bool = ...) -> None: ...

class RegisterWorkerRequest(_message.Message):
    __slots__ = ("address",)
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    address: str
    def __init__(self, address: _Optional[str] = ...) -> None: ...

class RegisterWorkerReply(_message.Message):
    __slots__ = ("worker_id",)
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    worker_id: int
    def __init__(self, worker_id: _Optional[int] = ...) -> None: ...

class WorkerRequest(_message.Message):
    __slots__ = ("worker_id", "task_ids")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    TASK_IDS_FIELD_NUMBER: _ClassVar[int]
    worker_id: int
    task_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, worker_id: _Optional[int] = ..., task_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class RemoveTasksRequest(_message.Message):
    __slots__ = ("task_ids",)
    TASK_IDS_FIELD_NUMBER: _ClassVar[int]
    task_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, task_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class TaskRequest(_message.Message):
    __slots__ = ("task_id",)
    TASK_ID_FIELD_NUMBER: _ClassVar[int]
    task_id: int
    def __init__(self, task_id: _Optional[int] = ...) -> None: ...

class Task(_message.Message):
    __slots__ = ("dataset_id", "policy", "repetition", "seed", "worker_number")
    DATASET_ID_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    REPETITION_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    WORKER_NUMBER_FIELD_NUMBER: _ClassVar[int]
    dataset_id: int
    policy: ShardingPolicy
    repetition: int
    seed: int
    worker_number: int
    def __init__(self, dataset_id: _Optional[int] = ..., policy: _Optional[_Union[ShardingPolicy, str]] = ..., repetition: _Optional[int] = ..., seed: _Optional[int] = ..., worker_number: _Optional[int] = ...) -> None: ...

class GetSplitRequest(_message.Message):
    __slots__ = ("task_id", "passes")
    TASK_ID_FIELD_NUMBER: _ClassVar[int]
    PASSES_FIELD_NUMBER: _ClassVar[int]
    task_id: int
    passes: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, task_id: _Optional[int] = ..., passes: _Optional[_Iterable[int]] = ...) -> None: ...

class Split(_message.Message):
    __slots__ = ("start", "stop")
    START_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    start: int
    stop: int
    def __init__(self, start: _Optional[int] = ..., stop: _Optional[int] = ...) -> None: ...

class GetElementRequest(_message.Message):
    __slots__ = ("task_id", "client_id", "sequence", "max_elements", "hold")
    TASK_ID_FIELD_NUMBER: _ClassVar[int]
    CLIENT_ID_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    MAX_ELEMENTS_FIELD_NUMBER: _ClassVar[int]
    HOLD_FIELD_NUMBER: _ClassVar[int]
    task_id: int
    client_id: int
    sequence: int
    max_elements: int
    hold: bool
    def __init__(self, task_id: _Optional[int] = ..., client_id: _Optional[int] = ..., sequence: _Optional[int] = ..., max_elements: _Optional[int] = ..., hold: bool = ...) -> None: ...

class GetElementReply(_message.Message):
    __slots__ = ("count", "pickle", "end", "failure")
    COUNT_FIELD_NUMBER: _ClassVar[int]
    PICKLE_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    count: int
    pickle: bytes
    end: bool
    failure: bytes
    def __init__(self, count: _Optional[int] = ..., pickle: _Optional[bytes] = ..., end: bool = ..., failure: _Optional[bytes] = ...) -> None: ...

class ReleaseClientRequest(_message.Message):
    __slots__ = ("client_id", "task_ids")
    CLIENT_ID_FIELD_NUMBER: _ClassVar[int]
    TASK_IDS_FIELD_NUMBER: _ClassVar[int]
    client_id: int
    task_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, client_id: _Optional[int] = ..., task_ids: _Optional[_Iterable[int]] = ...) -> None: ...
