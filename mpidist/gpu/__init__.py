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
from mpidist.gpu.kernels import HALVES_TEXT, Kernel, kernel
from mpidist.gpu.memory_pool import device_pool, pinned_pool
from mpidist.gpu.persistent import Pinned, allocate_persistent, pin
from mpidist.gpu.staging import (
    Download,
    HostStaging,
    PrefetchBatch,
    Prefetcher,
    StagingStream,
    Upload,
    copy_stream,
    layout_of,
    stage,
)
from mpidist.gpu.streams import current_stream, record_event, synchronize, wait_for

__all__ = [
    "DeviceArray",
    "Download",
    "HALVES_TEXT",
    "HostStaging",
    "Kernel",
    "Pinned",
    "PrefetchBatch",
    "Prefetcher",
    "StagingStream",
    "Upload",
    "allocate_persistent",
    "bus_id",
    "check_dtype",
    "copy_stream",
    "cupy",
    "current_stream",
    "device_count",
    "device_pool",
    "has_dtype",
    "kernel",
    "layout_of",
    "lies_on_gpu",
    "make_current",
    "on_device",
    "pin",
    "pinned_pool",
    "record_event",
    "stage",
    "synchronize",
    "wait_for",
    "why_no_gpu",
]
