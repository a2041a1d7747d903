"""Arrays in the memory of GPUs: the only part of the library that imports CuPy."""

from mpidist.cuda.blocks import device_pool, pinned_pool
from mpidist.cuda.delivery import Delivery, Parcel
from mpidist.cuda.device_array import DeviceArray, lies_on_gpu
from mpidist.cuda.kernels import Kernel, kernel
from mpidist.cuda.lane import Lane
from mpidist.cuda.lasting import Pinned, lasting_array, pin
from mpidist.cuda.library import (
    check_dtype,
    cupy,
    device_count,
    has_dtype,
    make_current,
    on_device,
)
from mpidist.cuda.mirror import Mirror, layout_of, mirror
from mpidist.cuda.streams import current_stream, mark

__all__ = [
    "Delivery",
    "DeviceArray",
    "Kernel",
    "Lane",
    "Mirror",
    "Parcel",
    "Pinned",
    "check_dtype",
    "cupy",
    "current_stream",
    "device_count",
    "device_pool",
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
    "pinned_pool",
]
