"""Arrays in the memory of GPUs: the only part of the library that imports CuPy."""

from mpidist.cuda.ahead import HostCopy, Landing, side_stream
from mpidist.cuda.blocks import device_pool, pinned_pool
from mpidist.cuda.delivery import Delivery, Parcel
from mpidist.cuda.device_array import DeviceArray, lies_on_gpu
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
    "HostCopy",
    "Landing",
    "Mirror",
    "Parcel",
    "check_dtype",
    "cupy",
    "current_stream",
    "device_count",
    "device_pool",
    "has_dtype",
    "layout_of",
    "lies_on_gpu",
    "make_current",
    "mark",
    "mirror",
    "on_device",
    "pinned_pool",
    "side_stream",
]
