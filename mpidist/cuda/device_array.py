"""Arrays of any framework in the memory of a GPU."""

from __future__ import annotations

import math
import sys
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpidist.cuda.blocks import Block, copy
from mpidist.cuda.failures import place as place_of
from mpidist.cuda.library import cupy, explained, on_device
from mpidist.cuda.parts import in_parts
from mpidist.cuda.streams import current_stream, mark, stream_of, used, wait_for
from mpidist.tensors import check_tensor, dtype_of_tensor

_CUDA = (2, 13)  # DLPack's numbers: memory of a device, and managed memory
_WIDTHS = (1, 2, 4, 8, 16)


def lies_on_gpu(array: Any) -> bool:
    """Local. Whether an array of another framework lies in the memory of a CUDA device."""
    package: Any = sys.modules.get("cupy")
    torch: Any = sys.modules.get("torch")
    # They lack their names while another thread imports them.
    if hasattr(package, "ndarray") and isinstance(array, package.ndarray):
        return True
    if hasattr(torch, "Tensor") and isinstance(array, torch.Tensor):
        return bool(array.is_cuda)
    if not hasattr(array, "__dlpack_device__"):
        return hasattr(array, "__cuda_array_interface__")
    try:
        return array.__dlpack_device__()[0] in _CUDA
    except (BufferError, RuntimeError, ValueError):  # in none that DLPack has a number for
        return False


class DeviceArray:
    """An array on a device: where it lies, and the stream on which its owner works.

    Args:
        array: Of CuPy, torch or JAX, or any with the CUDA array interface.

    Attributes:
        dtype: Its dtype, also one that CuPy does not know.
        shape: Its shape.
        number: Of its device.
        header: A NumPy array with its address, shape and strides. Questions about memory can be
            put to it; it must never be read or written.
        writeable: Whether it may be written.

    Raises:
        FailedPreconditionError: There is no CuPy, or its stream has no name for other threads.
        DistBackendError: CUDA fails.
        TypeError: Its dtype has no NumPy array, or CuPy cannot take it.
        ValueError: It is a torch tensor that requires grad, or that is conjugated or negated only
            when it is read.
    """

    def __init__(self, array: Any) -> None:
        with explained("its GPU", f"looking at a {type(array).__name__}"):
            self._take(array)

    def _take(self, array: Any) -> None:
        torch = sys.modules.get("torch")
        self.writeable, stream = True, None  # CuPy's own, unless the owner names another
        if isinstance(array, cupy().ndarray):
            self._take_bits(array)
        elif torch is not None and isinstance(array, torch.Tensor):
            stream = self._take_tensor(array, torch)
        elif type(array).__module__.partition(".")[0] in ("jax", "jaxlib"):
            self._take_jax_array(array)
        elif hasattr(array, "__cuda_array_interface__"):
            stream = self._take_described(array)
        else:
            self._take_bits(_from_dlpack(array))
        self.number = int(self._bits.device.id)
        self._stream = current_stream(self.number) if stream is None else stream_of(stream)
        self.shape = tuple(self._bits.shape)
        self.header = _header(self._bits, self.writeable)

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)} on GPU {self.number}"

    @property
    def stream(self) -> Any:
        """Local. CuPy's object for the stream on which its owner works."""
        return self._stream

    @property
    def pointer(self) -> int:
        """Local. Address of its first element; of no meaning if it has none."""
        return int(self._bits.data.ptr)

    @property
    def nbytes(self) -> int:
        """Local. How many bytes its elements are."""
        return int(self._bits.nbytes)

    @property
    def is_contiguous(self) -> bool:
        """Local. Whether its elements lie one after the other, in C order."""
        return bool(self._bits.flags.c_contiguous)

    def packed(self, *, copy: bool = False) -> Any:
        """Return the elements in C order as a flat CuPy array of unsigned integers.

        It shares memory with a contiguous array. Of a strided array it is a copy, which the stream
        of the array makes.

        Args:
            copy: Copy a contiguous array, too.
        """
        if self.is_contiguous and not copy:
            return self._bits.reshape(-1)
        with used(self._stream):
            packed = cupy().empty(self.shape, self._bits.dtype)
            packed[...] = self._bits
        return packed.reshape(-1)

    def unpack(self, packed: Any) -> None:
        """Copy the result of :meth:`packed` back into a strided array, on its stream."""
        if not self.is_contiguous:
            with used(self._stream):
                self._bits[...] = packed.reshape(self.shape)

    def download(self, target: NDArray[Any], block: Block) -> None:
        """Local. Copy it to the host, behind what its stream has to do before; waits for that.

        Args:
            target: Contiguous, of its shape and dtype.
            block: What the target lies in.

        Raises:
            ResourceExhaustedError: It is strided, and there is no memory to pack it.
            DistBackendError: CUDA failed.
        """
        if not target.nbytes:
            return
        doing = f"copying {self} to the host"
        with on_device(self.number, doing):
            self.begin_download(target, block, self._stream)
            wait_for(block.event, doing)

    def begin_download(self, target: NDArray[Any], block: Block, stream: Any) -> None:
        """Local. Begin to copy it to the host, behind what its own stream has to do before.

        Args:
            target: See :meth:`download`; not empty.
            block: What the target lies in; its event then is one behind the copy, until which the
                array must be kept.
            stream: Of its device, which must be current: which copies it. One that is strided its
                own stream does, which packs it part by part.
        """
        if self.is_contiguous:
            if stream is not self._stream:
                stream.wait_event(mark(self._stream))
            self._fetch(self._bits, target.ctypes.data, stream, block)
            return

        def pack(part: Any, place: int) -> None:
            self._fetch(cupy().ascontiguousarray(part), place, self._stream, block)

        with used(self._stream):
            in_parts(self._bits, target.ctypes.data, pack)

    def upload(self, source: NDArray[Any], block: Block) -> None:
        """Local. Copy to it from the host, behind what its stream has to do before.

        Args:
            source: Contiguous, of its shape and dtype.
            block: What the source lies in; its event then is one behind the copy.

        Raises:
            ResourceExhaustedError: It is strided, and there is no memory to unpack to it.
            DistBackendError: CUDA failed.
        """
        if not source.nbytes:
            return
        with on_device(self.number, f"copying {self} from the host") as package:
            if self._bits.flags.c_contiguous:
                self._bring(self._bits, source.ctypes.data, block)
                return

            def unpack(part: Any, place: int) -> None:
                packed = package.empty(part.shape, part.dtype)
                self._bring(packed, place, block)
                part[...] = packed

            with used(self._stream):
                in_parts(self._bits, source.ctypes.data, unpack)

    def _fetch(self, packed: Any, place: int, stream: Any, block: Block) -> None:
        copy(place, packed.data.ptr, packed.nbytes, "memcpyDeviceToHost", stream, block)

    def _bring(self, packed: Any, place: int, block: Block) -> None:
        copy(packed.data.ptr, place, packed.nbytes, "memcpyHostToDevice", self._stream, block)

    def _take_bits(self, array: Any) -> None:
        self.dtype = np.dtype(array.dtype)
        self._bits = array.view(_bits_of(self.dtype))

    def _take_tensor(self, tensor: Any, torch: Any) -> int:
        check_tensor(tensor, torch)
        self.dtype = dtype_of_tensor(tensor)
        strides = tuple(self.dtype.itemsize * stride for stride in tensor.stride())
        place, device = tensor.data_ptr(), tensor.device
        self._bits = _at(place, tuple(tensor.shape), self.dtype, strides, tensor, device.index)
        return int(torch.cuda.current_stream(device).cuda_stream)

    def _take_jax_array(self, array: Any) -> None:
        """By DLPack, which alone says when the values are there; unsigned, for CuPy lacks some."""
        self.dtype = np.dtype(array.dtype)
        bits = _bits_of(self.dtype)
        self._bits = _from_dlpack(array.view(bits) if self.dtype.kind == "V" else array).view(bits)
        self.writeable = False

    def _take_described(self, array: Any) -> int | None:
        facts = array.__cuda_array_interface__
        dtype, shape = np.dtype(facts["typestr"]), tuple(facts["shape"])
        if facts.get("mask") is not None:
            raise TypeError(f"a {type(array).__name__} with a mask cannot be sent")
        pointer, read_only = facts["data"]
        strides = facts.get("strides")
        if strides is None:
            strides = [math.prod(shape[axis + 1 :]) * dtype.itemsize for axis in range(len(shape))]
        self.dtype = dtype
        self._bits = _at(int(pointer), shape, dtype, tuple(strides), array, -1)
        self.writeable = not read_only
        number: int | None = facts.get("stream")
        return number


def _at(
    pointer: int,
    shape: tuple[int, ...],
    dtype: np.dtype[Any],
    strides: tuple[int, ...],
    owner: Any,
    device: int,
) -> Any:
    """A CuPy array over somebody's memory; of a device that CUDA is asked for if it is -1."""
    cuda = cupy().cuda
    if device < 0:
        device = _device_at(pointer, owner)
    ends = [(count - 1) * stride for count, stride in zip(shape, strides, strict=True)]
    span = dtype.itemsize + sum(end for end in ends if end > 0) if all(shape) else 0
    memory = cuda.UnownedMemory(pointer, span, owner, device)
    place = cuda.MemoryPointer(memory, 0)
    return cupy().ndarray(shape, _bits_of(dtype), place, strides=strides)


def _device_at(pointer: int, owner: Any) -> int:
    """The device of an address, as CUDA knows it; of pinned host memory, where it was pinned."""
    runtime = cupy().cuda.runtime
    if not pointer:
        return int(runtime.getDevice())  # of an array without elements
    facts = runtime.pointerGetAttributes(pointer)
    if facts.type == runtime.memoryTypeUnregistered:
        raise ValueError(
            f"a {type(owner).__name__} has its memory at {pointer:#x}, where CUDA of "
            f"{place_of('this process')} knows none: it was freed, or is memory of the host that "
            "is not pinned; keep what owns the memory until the operation has ended"
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


def _bits_of(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """A dtype that CuPy knows, as long as another; copies look no further."""
    if dtype.itemsize not in _WIDTHS:
        raise TypeError(f"an array of {dtype} on a GPU cannot be sent: it is no dtype of CuPy's")
    return np.dtype("c16") if dtype.itemsize == 16 else np.dtype(f"u{dtype.itemsize}")


def _header(bits: Any, writeable: bool) -> NDArray[Any]:
    if bits.size:
        return np.asarray(_Described(bits, writeable))
    header = np.empty(bits.shape, bits.dtype)
    header.flags.writeable = writeable
    return header


class _Described:
    def __init__(self, bits: Any, writeable: bool) -> None:
        self.__array_interface__ = {
            "data": (int(bits.data.ptr), not writeable),
            "shape": tuple(bits.shape),
            "strides": tuple(bits.strides),
            "typestr": bits.dtype.str,
            "version": 3,
        }
