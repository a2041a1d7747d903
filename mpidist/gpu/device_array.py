"""Arrays of any framework in the memory of a GPU."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Sequence
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpidist.gpu.cupy_api import cupy, on_device, with_rank
from mpidist.gpu.pinned_pool import Block, start_copy
from mpidist.gpu.streams import current_stream, record_event, stream_of, use_stream
from mpidist.tensors import check_tensor, numpy_dtype

_CUDA = (2, 13)  # DLPack's numbers for device memory and managed memory
_WIDTHS = (1, 2, 4, 8, 16)
_PART_BYTES = 32 << 20  # strided arrays are packed in parts, in memory of the device


def lies_on_gpu(array: Any) -> bool:
    """Return whether an array of another framework lies in the memory of a CUDA device."""
    package: Any = sys.modules.get("cupy")
    torch: Any = sys.modules.get("torch")
    # The names are missing while another thread imports the packages.
    if hasattr(package, "ndarray") and isinstance(array, package.ndarray):
        return True
    if hasattr(torch, "Tensor") and isinstance(array, torch.Tensor):
        return bool(array.is_cuda)
    if not hasattr(array, "__dlpack_device__"):
        return hasattr(array, "__cuda_array_interface__")
    try:
        return array.__dlpack_device__()[0] in _CUDA
    except (BufferError, RuntimeError, ValueError):  # on a device without a number in DLPack
        return False


class DeviceArray:
    """An array on a device, and the stream on which its owner works.

    Args:
        array: A CuPy array, torch tensor or JAX array, or an object with DLPack or the CUDA array
            interface.

    Attributes:
        dtype: The dtype, which CuPy may not know.
        shape: The shape.
        nbytes: Size of the elements.
        pointer: Address of the first element; without meaning if there is none.
        device: Device index.
        stream: CuPy's object for the stream on which the owner works.
        is_contiguous: Whether the elements are contiguous, in C order.
        writeable: Whether the array may be written.

    Raises:
        FailedPreconditionError: There is no CuPy, or the stream is the per-thread default stream.
        DistBackendError: CUDA failed.
        TypeError: The dtype has no NumPy dtype, or CuPy cannot take the array.
        ValueError: A torch tensor requires grad, or has a lazy conjugation or negation.
    """

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    pointer: int
    device: int
    stream: Any
    is_contiguous: bool

    def __init__(self, array: Any) -> None:
        self.writeable = True
        self._array: Any = None  # a CuPy array of the elements, if it is known
        self._owner: Any = array
        with on_device(None, "looking at a %s", type(array).__name__):
            self._take(array)
            self.nbytes = math.prod(self.shape) * _bits_dtype(self.dtype).itemsize

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)} on GPU {self.device}"

    @cached_property
    def header(self) -> NDArray[Any]:
        """A NumPy array with the address, shape and strides of the array on the device.

        It serves to compare places in memory. It must never be read or written.
        """
        if self.nbytes:
            return np.asarray(_Header(self))
        header = np.empty(self.shape, _bits_dtype(self.dtype))
        header.flags.writeable = self.writeable
        return header

    @property
    def strides(self) -> tuple[int, ...]:
        """The strides in bytes."""
        return self._strides if self._array is None else tuple(self._array.strides)

    def packed(self, *, copy: bool = False) -> Any:
        """Return the elements in C order as a flat CuPy array of unsigned integers.

        The result shares memory with a contiguous array. Of a strided array it is a copy, which
        the stream of the array makes.

        Args:
            copy: Copy a contiguous array, too.
        """
        if self.is_contiguous and not copy:
            return self._bits.reshape(-1)
        with use_stream(self.stream):
            packed = cupy().empty(self.shape, self._bits.dtype)
            packed[...] = self._bits
        return packed.reshape(-1)

    def unpack(self, packed: Any, stream: Any = None) -> None:
        """Copy the result of :meth:`packed` back into a strided array.

        Args:
            packed: The result of :meth:`packed`.
            stream: The stream that copies, by default the stream of the array.
        """
        if not self.is_contiguous:
            with use_stream(self.stream if stream is None else stream):
                self._bits[...] = packed.reshape(self.shape)

    def start_download(self, block: Block, stream: Any) -> None:
        """Start to copy the elements to host memory, behind the work on the array's stream.

        Args:
            block: The host memory. Keep the array until the block's event is done.
            stream: A stream of the device, which must be current. A strided array is packed and
                copied by its own stream in place of this one.

        Raises:
            CUDARuntimeError: CUDA failed, or the device has no memory to pack a strided array.
        """
        if self.is_contiguous:
            if stream is not self.stream:
                stream.wait_event(record_event(self.stream))
            start_copy(
                block.address, self.pointer, self.nbytes, "memcpyDeviceToHost", stream, block
            )
            return
        with use_stream(self.stream):
            for part, address in _parts(self._bits, block.address):
                packed, kind = cupy().ascontiguousarray(part), "memcpyDeviceToHost"
                start_copy(address, packed.data.ptr, packed.nbytes, kind, self.stream, block)

    def upload(self, block: Block) -> None:
        """Start to copy from host memory to the elements, behind the work on the stream.

        Args:
            block: The host memory; receives an event behind the copy.

        Raises:
            ResourceExhaustedError: The device has no memory to unpack into a strided array.
            DistBackendError: CUDA failed.
        """
        if not self.nbytes:
            return
        kind = "memcpyHostToDevice"
        with on_device(self.device, "copying %s from the host", self) as package:
            if self.is_contiguous:
                start_copy(self.pointer, block.address, self.nbytes, kind, self.stream, block)
                return
            with use_stream(self.stream):
                for part, address in _parts(self._bits, block.address):
                    packed = package.empty(part.shape, part.dtype)
                    start_copy(packed.data.ptr, address, packed.nbytes, kind, self.stream, block)
                    part[...] = packed

    @cached_property
    def _bits(self) -> Any:
        """The elements as a CuPy array of unsigned integers: copies need no more of the dtype."""
        if self._array is not None:
            return self._array.view(_bits_dtype(self.dtype))
        return _cupy_array(self)

    def _take(self, array: Any) -> None:
        torch = sys.modules.get("torch")
        if isinstance(array, cupy().ndarray):
            self._take_cupy(array, array.dtype)
        elif torch is not None and isinstance(array, torch.Tensor):
            self._take_tensor(array, torch)
        elif type(array).__module__.partition(".")[0] in ("jax", "jaxlib"):
            self._take_jax(array)
        elif hasattr(array, "__cuda_array_interface__"):
            self._take_interface(array)
        else:
            array = _from_dlpack(array)
            self._take_cupy(array, array.dtype)

    def _take_cupy(self, array: Any, dtype: Any) -> None:
        memory = array.data
        self._array = array
        self.dtype, self.shape = np.dtype(dtype), tuple(array.shape)
        self.pointer, self.device = int(memory.ptr), int(memory.device_id)
        self.is_contiguous = bool(array.flags.c_contiguous)
        self.stream = current_stream(self.device)

    def _take_tensor(self, tensor: Any, torch: Any) -> None:
        check_tensor(tensor, torch)
        self.dtype, self.shape = numpy_dtype(tensor.dtype), tuple(tensor.shape)
        self.pointer, self.device = tensor.data_ptr(), tensor.device.index
        self.is_contiguous = tensor.is_contiguous()
        self._strides = tuple(self.dtype.itemsize * stride for stride in tensor.stride())
        self.stream = stream_of(int(torch.cuda.current_stream(tensor.device).cuda_stream))

    def _take_jax(self, array: Any) -> None:
        # Only DLPack waits until the values exist. CuPy lacks some dtypes, so it gets integers.
        dtype = np.dtype(array.dtype)
        self._take_cupy(
            _from_dlpack(array.view(_bits_dtype(dtype)) if dtype.kind == "V" else array), dtype
        )
        self.writeable = False

    def _take_interface(self, array: Any) -> None:
        facts = array.__cuda_array_interface__
        if facts.get("mask") is not None:
            raise TypeError(f"a {type(array).__name__} with a mask cannot be sent")
        self.dtype, self.shape = np.dtype(facts["typestr"]), tuple(facts["shape"])
        pointer, read_only = facts["data"]
        packed = _packed_strides(self.shape, self.dtype.itemsize)
        strides = facts.get("strides")
        self._strides = packed if strides is None else tuple(strides)
        self.is_contiguous = not all(self.shape) or all(
            count == 1 or stride == wanted
            for count, stride, wanted in zip(self.shape, self._strides, packed, strict=True)
        )
        self.pointer, self.writeable = int(pointer), not read_only
        self.device = _device_of(self.pointer, array)
        handle: int | None = facts.get("stream")
        self.stream = current_stream(self.device) if handle is None else stream_of(handle)


def _packed_strides(shape: Sequence[int], itemsize: int) -> tuple[int, ...]:
    return tuple(math.prod(shape[axis + 1 :]) * itemsize for axis in range(len(shape)))


def _cupy_array(array: DeviceArray) -> Any:
    """Return a CuPy array of unsigned integers over the memory of another framework's array."""
    cuda, dtype = cupy().cuda, _bits_dtype(array.dtype)
    ends = [(n - 1) * stride for n, stride in zip(array.shape, array.strides, strict=True)]
    span = dtype.itemsize + sum(end for end in ends if end > 0) if array.nbytes else 0
    memory = cuda.UnownedMemory(array.pointer, span, array._owner, array.device)
    pointer = cuda.MemoryPointer(memory, 0)
    return cupy().ndarray(array.shape, dtype, pointer, strides=array.strides)


def _device_of(pointer: int, owner: Any) -> int:
    """Return the device of an address; of pinned host memory, the device that pinned it."""
    runtime = cupy().cuda.runtime
    if not pointer:
        return int(runtime.getDevice())  # the array has no elements
    facts = runtime.pointerGetAttributes(pointer)
    if facts.type == runtime.memoryTypeUnregistered:
        raise ValueError(
            f"a {type(owner).__name__} has its memory at {pointer:#x}, which CUDA of "
            f"{with_rank('this process')} does not know: the memory was freed, or is host memory "
            "that is not pinned; keep the owner of the memory until the operation has ended"
        )
    return int(facts.device)


def _from_dlpack(array: Any) -> Any:
    package = cupy()
    try:
        return package.from_dlpack(array)
    except package.cuda.runtime.CUDARuntimeError:
        raise
    except (BufferError, NotImplementedError, RuntimeError, TypeError, ValueError) as error:
        raise TypeError(
            f"the memory of a {type(array).__name__} cannot be used as it is ({error}); pass a "
            "CuPy array"
        ) from error


@lru_cache(256)
def _bits_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return a dtype of the same size that CuPy knows."""
    if dtype.itemsize not in _WIDTHS:
        raise TypeError(f"an array of {dtype} on a GPU cannot be sent: CuPy has no such dtype")
    return np.dtype("c16") if dtype.itemsize == 16 else np.dtype(f"u{dtype.itemsize}")


class _Header:
    """The protocol by which NumPy makes an array of an address."""

    def __init__(self, array: DeviceArray) -> None:
        self.__array_interface__ = {
            "data": (array.pointer, not array.writeable),
            "shape": array.shape,
            "strides": array.strides,
            "typestr": _bits_dtype(array.dtype).str,
            "version": 3,
        }


def _parts(array: Any, address: int) -> Iterator[tuple[Any, int]]:
    """Yield parts of a strided array, in order, each with its address in the packed array.

    The parts are whole rows of at most 32 MiB. A larger row is divided likewise.
    """
    if array.nbytes <= _PART_BYTES:
        yield array, address
        return
    while len(array) == 1:
        array = array[0]
    row = array.nbytes // len(array)
    step = max(1, _PART_BYTES // row)
    for start in range(0, len(array), step):
        yield from _parts(array[start : start + step], address + start * row)
