"""Arrays in the memory of GPUs: the only part of the library that imports CuPy."""

from mpidist.cuda.ahead import HostCopy, Landing, side_stream
from mpidist.cuda.blocks import copy, device_pool, pinned_bytes, pinned_pool
from mpidist.cuda.delivery import Delivery, Parcel
from mpidist.cuda.device_array import DeviceArray, lies_on_gpu
from mpidist.cuda.kernels import HALVES_TEXT, Kernel, kernel
from mpidist.cuda.lane import Lane
from mpidist.cuda.lasting import Pinned, lasting_array, pin
from mpidist.cuda.library import (
    bus_id,
    check_dtype,
    cupy,
    device_count,
    has_dtype,
    make_current,
    on_device,
    why_no_gpu,
)
from mpidist.cuda.mirror import Mirror, layout_of, mirror
from mpidist.cuda.streams import current_stream, finish, mark, wait_for

__all__ = [
    "Delivery",
    "DeviceArray",
    "HALVES_TEXT",
    "HostCopy",
    "Kernel",
    "Landing",
    "Lane",
    "Mirror",
    "Parcel",
    "Pinned",
    "bus_id",
    "check_dtype",
    "copy",
    "cupy",
    "current_stream",
    "device_count",
    "device_pool",
    "finish",
    "has_dtype",
    "kernel",
    "lasting_array",
    "layout_of",
    "lies_on_gpu",
    "make_current",
    "mark",
    "mirror",
    "on_device",
    "pin",
    "pinned_bytes",
    "pinned_pool",
    "side_stream",
    "wait_for",
    "why_no_gpu",
]
