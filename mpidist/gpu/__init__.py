"""Arrays in the memory of GPUs: the only part of the library that imports CuPy."""

from mpidist.gpu.cupy_api import (
    bus_id,
    check_dtype,
    cupy,
    device_count,
    has_dtype,
    make_current,
    on_device,
    why_no_gpu,
)
from mpidist.gpu.device_array import DeviceArray, lies_on_gpu
from mpidist.gpu.kernels import divided, stored_as, widened
from mpidist.gpu.persistent import allocate_persistent, pin
from mpidist.gpu.staging import (
    Download,
    HostStaging,
    PrefetchBatch,
    Prefetcher,
    Upload,
    copy_stream,
    layout_of,
    stage,
)
from mpidist.gpu.streams import (
    current_stream,
    new_stream,
    record_event,
    synchronize,
    use_stream,
    wait_for,
)

__all__ = [
    "DeviceArray",
    "Download",
    "HostStaging",
    "PrefetchBatch",
    "Prefetcher",
    "Upload",
    "allocate_persistent",
    "bus_id",
    "check_dtype",
    "copy_stream",
    "cupy",
    "current_stream",
    "device_count",
    "divided",
    "has_dtype",
    "layout_of",
    "lies_on_gpu",
    "make_current",
    "new_stream",
    "on_device",
    "pin",
    "record_event",
    "stage",
    "stored_as",
    "synchronize",
    "use_stream",
    "wait_for",
    "why_no_gpu",
    "widened",
]
