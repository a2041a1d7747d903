"""A GPU of a server: memory, kernels and copies."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpidist import errors
from mpidist.gpu import (
    HALVES_TEXT,
    Kernel,
    StagingStream,
    allocate_persistent,
    device_count,
    kernel,
    make_current,
)
from strategy.protocol.layout import BLOCK_BYTES, HALVES

DType = np.dtype[Any]

NAME = "work"
"""Name of the function in every source."""


@cache
def rows_text(itemsize: int, put: bool) -> str:
    """Return the kernel that gathers rows of a table in an array, or scatters the array back.

    The arguments of the kernel are the number of elements, the number of elements of a row, the row
    numbers, the table, and the array of rows.

    Args:
        itemsize: Size of an element in bytes: 2, 4 or 8.
        put: Scatter the rows into the table.
    """
    kind = {2: "unsigned short", 4: "unsigned", 8: "unsigned long long"}[itemsize]
    given = ["Index size", "Index width", "const Index* ids", "T* table", "T* rows"]
    places = ("table[here]", "rows[at]") if put else ("rows[at]", "table[here]")
    lines = [_function(kind, given), f"    {_PLACE}", f"    {places[0]} = {places[1]};", "}"]
    return HALVES_TEXT + "\n".join(lines) + "\n"


@cache
def convert_text(source: DType, target: DType) -> str:
    """Return the kernel that converts half precision to float32, or back.

    The arguments of the kernel are the number of elements, the source, and the target.
    """
    given = ["Index size", f"const {_type(source)}* source", f"{_type(target)}* target"]
    value = _written(target, _read(source, "source[at]"))
    return (
        HALVES_TEXT
        + "\n".join([_function("float", given), f"    target[at] = {value};", "}"])
        + "\n"
    )


_PLACE = """const Index row = at / width, column = at - row * width;
    const Index here = ids[row] * width + column;"""


def _function(wide: DType | str, given: Sequence[str]) -> str:
    kind = wide if isinstance(wide, str) else _type(wide)
    return f"""
typedef {kind} T;

extern "C" __global__ void {NAME}({", ".join(given)}) {{
    const Index at = (Index)blockIdx.x * blockDim.x + threadIdx.x;
    if (at >= size) return;"""


def _type(dtype: DType) -> str:
    return {"float32": "float", "float64": "double"}.get(dtype.name, "Bits")


def _read(dtype: DType, value: str) -> str:
    return f"of_{dtype.name}({value})" if dtype in HALVES else value


def _written(dtype: DType, value: str) -> str:
    return f"to_{dtype.name}({value})" if dtype in HALVES else value


logger = logging.getLogger(__name__)

Array = NDArray[Any]

# One lane uploads a block while another one runs kernels and a third one downloads.
LANES = 3


class Gpu:
    """A GPU for variables of a server. Only the thread of the server's handlers uses it.

    Copies and kernels run on lanes, which are staging streams that take turns.

    Args:
        number: Index of the GPU in CuPy.
        server: Name of the server, for error messages.

    Attributes:
        number: Index of the GPU in CuPy.

    Raises:
        FailedPreconditionError: CuPy is not installed, or cannot use a GPU.
        InvalidArgumentError: The GPU does not exist.
        InternalError: CUDA failed.
    """

    def __init__(self, number: int, server: str) -> None:
        try:
            count = device_count()
        except errors.FailedPreconditionError as error:
            raise errors.FailedPreconditionError(
                f"{server} cannot have variables on its GPU {number}: {error.message}"
            ) from error
        if number >= count:
            raise errors.InvalidArgumentError(
                f"{server} sees {count} GPUs, and parameter_devices names its GPU {number}: their "
                f"numbers are 0 to {count - 1}; look at CUDA_VISIBLE_DEVICES of {server}"
            )
        self.number = number
        self._server = server
        with self.told():
            make_current(number)
            self._lanes = [StagingStream(number) for _ in range(LANES)]
        self._next = 0

    def __str__(self) -> str:
        return f"GPU {self.number}"

    @contextlib.contextmanager
    def told(self) -> Iterator[None]:
        """Convert errors of CUDA in the block to InternalError, which workers receive."""
        try:
            yield
        except errors.DistBackendError as error:
            logger.exception("%s: its %s has failed", self._server, self)
            raise errors.InternalError(f"{self._server}: {error}") from error

    def lane(self) -> StagingStream:
        """Make the device current and return the next lane."""
        make_current(self.number)
        self._next = (self._next + 1) % LANES
        return self._lanes[self._next]

    def reserve(self, *arrays: Array) -> None:
        """Allocate the memory that each lane needs to place arrays of these sizes.

        Raises:
            ResourceExhaustedError: The device has no memory.
        """
        for _ in range(LANES):
            self.lane().reserve(*arrays)

    def array(self, size: int, dtype: np.dtype[Any], what: str) -> Any:
        """Allocate a flat CuPy array, not initialized. An array of halves holds their bits, uint16.

        Args:
            size: Number of elements.
            dtype: Dtype of the elements.
            what: Name of the array, for messages.

        Raises:
            ResourceExhaustedError: The device has no memory.
        """
        make_current(self.number)
        bits = np.dtype(np.uint16) if dtype in HALVES else dtype
        return allocate_persistent(self.number, size, bits, what)

    def kernel(self, text: str) -> Kernel:
        """Return the compiled kernel of a source text."""
        make_current(self.number)
        found = kernel(text, NAME)
        found.compile(self.number)
        return found

    def fill(self, array: Any, value: float) -> None:
        """Set all elements of an array to a value."""
        lane = self.lane()
        with lane.working("filling a slot"), lane.current():
            array.fill(value)
        lane.finish()

    def pieces_of(self, array: Any) -> Iterator[Array]:
        """Download an array of the device, block by block.

        Yields:
            Flat host arrays. Each is overwritten by a later one.
        """
        step = BLOCK_BYTES // array.itemsize
        before: StagingStream | None = None
        for start in range(0, array.size, step):
            lane, count = self.lane(), min(step, array.size - start)
            with lane.working("downloading a slot"):
                lane.fetch(array.data.ptr + start * array.itemsize, count * array.itemsize)
            if before is not None:
                yield before.finish().view(array.dtype)
            before = lane
        if before is not None:
            yield before.finish().view(array.dtype)

    def put_pieces(self, array: Any, pieces: Iterator[Array]) -> None:
        """Fill an array of the device with the elements of host arrays, in order."""
        address = array.data.ptr
        for piece in pieces:
            lane = self.lane()
            with lane.working("uploading a slot"):
                lane.upload(address, piece.view(np.uint8), pinned=False)
            address += piece.nbytes
        self.settle()

    def settle(self) -> None:
        """Wait until all lanes are idle."""
        make_current(self.number)
        for lane in self._lanes:
            lane.finish()

    def close(self) -> None:
        """Wait until all lanes are idle, unless the device is lost, and free their memory."""
        with contextlib.suppress(errors.Error):  # no worker waits for the error
            self.settle()
        self._lanes = []
