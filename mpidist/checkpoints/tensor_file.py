"""Files in the format of safetensors, which programs can read by the library of that name.

The library keeps the interpreter's lock while it writes (16 ms for 64 MiB), and a ps task would
answer no worker meanwhile. Writes of a file release the lock. The library maps a file to read it,
and access to a mapped file that becomes shorter ends the process.

A file begins with the length of a JSON text, in 8 bytes, and the text. The text has the dtype and
shape of each array, and its place behind the text.
"""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import ml_dtypes  # noqa: F401 - NumPy then knows its dtypes by name
import numpy as np
from numpy.typing import NDArray

from mpidist.checkpoints.core_sharing import CHUNK_BYTES, CoreSharing

Array = NDArray[Any]

STORED_NAMES = {
    "bool": "BOOL",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "complex64": "C64",
} | {
    f"{kind}{bits}": f"{kind[0].upper()}{bits}"
    for kind in ("int", "uint", "float")
    for bits in (8, 16, 32, 64)
    if (kind, bits) != ("float", 8)
}
"""Names of dtypes in safetensors files, by their names in NumPy and ml_dtypes."""


_DTYPES = {stored: name for name, stored in STORED_NAMES.items()}
_LENGTH = struct.Struct("<Q")


@dataclass(frozen=True)
class StoredTensor:
    """An array in a file.

    Attributes:
        dtype: Name of the dtype: NumPy's or ml_dtypes', or the name in the file if both do not
            have the dtype.
        shape: The shape.
        start: Offset of the data in the file in bytes.
    """

    dtype: str
    shape: tuple[int, ...]
    start: int

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


def stored_name(dtype: np.dtype[Any]) -> str:
    """Return the name of a dtype in safetensors files.

    Raises:
        TypeError: The format does not have the dtype.
    """
    if dtype.name not in STORED_NAMES:
        raise TypeError(f"a checkpoint cannot hold an array of {dtype}; convert it first")
    return STORED_NAMES[dtype.name]


def write_tensors(path: str, tensors: Mapping[str, Array], metadata: Mapping[str, str]) -> None:
    """Write arrays to a file, and wait until it is on the disk.

    Args:
        path: Path of the file.
        tensors: The arrays by name. An array that is not contiguous is copied.
        metadata: Texts by name.

    Raises:
        OSError: The file cannot be written.
        TypeError: The format does not have a dtype.
    """
    # The largest items come first, so that all arrays are aligned in a mapped file.
    names = sorted(tensors, key=lambda name: (-tensors[name].dtype.itemsize, name))
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for name in names:
        array = tensors[name]
        start, end = end, end + array.nbytes
        facts = {"dtype": stored_name(array.dtype), "shape": list(array.shape)}
        header[name] = facts | {"data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    sharing = CoreSharing()
    with open(path, "wb", buffering=0) as file:
        for part in (_LENGTH.pack(len(text)), text):
            _write(file.fileno(), memoryview(part), sharing)
        for name in names:
            array = tensors[name]
            little = array.astype(array.dtype.newbyteorder("<"), copy=False)
            flat = np.ascontiguousarray(little).reshape(-1)
            _write(file.fileno(), flat.view(np.uint8).data, sharing)
        os.fsync(file.fileno())


def _write(file: int, data: memoryview, sharing: CoreSharing) -> None:
    while data:
        data = data[os.write(file, data[:CHUNK_BYTES]) :]
        sharing.yield_if_due()


def read_header(path: str) -> tuple[dict[str, StoredTensor], dict[str, str]]:
    """Return the arrays of a file by name, without their data, and its metadata.

    Raises:
        Exception: The file cannot be read, or is damaged.
    """
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        (length,) = _LENGTH.unpack(file.read(_LENGTH.size))
        described: dict[str, Any] = json.loads(file.read(min(length, size)))
    base = _LENGTH.size + length
    metadata: dict[str, str] = described.pop("__metadata__", {})
    tensors: dict[str, StoredTensor] = {}
    for name, one in described.items():
        start, stop = one["data_offsets"]
        dtype = _DTYPES.get(one["dtype"])
        tensor = StoredTensor(dtype or one["dtype"], tuple(one["shape"]), base + start)
        nbytes = tensor.size * np.dtype(dtype).itemsize if dtype else stop - start
        if start < 0 or stop - start != nbytes or base + stop > size:
            raise ValueError(f"the data of {name!r} are incomplete")
        tensors[name] = tensor
    return tensors, metadata


def read_into(path: str, start: int, out: Array) -> None:
    """Read data of a file into a contiguous array. The data are little-endian.

    Args:
        path: Path of the file.
        start: Offset in the file in bytes.
        out: The array.

    Raises:
        OSError: The file cannot be read, or is too short.
    """
    view = out.reshape(-1).view(np.uint8)  # NumPy's bfloat16 has no buffer
    with open(path, "rb") as file:
        file.seek(start)
        if file.readinto(view.data) < view.size:
            raise OSError("it has become shorter")


def read_tensor(path: str, tensor: StoredTensor) -> Array:
    """Return an array of a file.

    Raises:
        OSError: The file cannot be read, or is too short.
        TypeError: NumPy and ml_dtypes do not have the dtype.
    """
    out = np.empty(tensor.shape, np.dtype(tensor.dtype).newbyteorder("<"))
    read_into(path, tensor.start, out)
    return out.astype(out.dtype.newbyteorder("="), copy=False)
