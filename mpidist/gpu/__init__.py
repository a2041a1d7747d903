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
from mpidist.gpu.staging_stream import Pinned, StagingStream, allocate_persistent, pin
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
    "has_dtype",
    "kernel",
    "layout_of",
    "lies_on_gpu",
    "make_current",
    "on_device",
    "pin",
    "record_event",
    "stage",
    "synchronize",
    "wait_for",
    "why_no_gpu",
]
