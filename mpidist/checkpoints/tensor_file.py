"""Files in the format of safetensors.

Its own ``save_file`` keeps the interpreter's lock while it writes (16 ms for 64 MiB), and a ps task
would answer no worker meanwhile. Writes of a file release the lock.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

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
    with open(path, "wb", buffering=0) as file:
        for part in (struct.pack("<Q", len(text)), text):
            _write(file.fileno(), memoryview(part))
        for name in names:
            array = tensors[name]
            little = array.astype(array.dtype.newbyteorder("<"), copy=False)
            flat = np.ascontiguousarray(little).reshape(-1)
            _write(file.fileno(), flat.view(np.uint8).data)
        os.fsync(file.fileno())


def _write(file: int, data: memoryview) -> None:
    while data:  # the kernel writes at most 2 GiB in one call
        data = data[os.write(file, data) :]
