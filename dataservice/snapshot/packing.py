"""Compression of the records of a snapshot."""

from __future__ import annotations

import struct
from collections.abc import Callable

import numpy as np

from dataservice.compression import CODECS, Compressor
from mpidist.errors import DataLossError, UnimplementedError

# Before the data: their size when they are not compressed; 0 if they are not.
_HEAD = struct.Struct("<Q")

Transform = Callable[[bytes], bytes]


def packer(name: str | None) -> Transform | None:
    """Local. What makes records smaller; None for no compression.

    Raises:
        FailedPreconditionError: The package that has the codec is not installed.
        UnimplementedError: The codec is unknown.
    """
    if name is None:
        return None
    compressor = _compressor(name)

    def pack(data: bytes) -> bytes:
        small = compressor.compress(np.frombuffer(data, np.uint8))
        if small is None:
            return _HEAD.pack(0) + data
        return _HEAD.pack(len(data)) + small.tobytes()

    return pack


def unpacker(name: str | None) -> Transform | None:
    """Local. What undoes it; raises as :func:`packer`, and when used DataLossError for damage."""
    if name is None:
        return None
    compressor = _compressor(name)

    def unpack(data: bytes) -> bytes:
        if len(data) < _HEAD.size:
            raise DataLossError(f"a compressed record of {len(data)} bytes is too short")
        (size,) = _HEAD.unpack_from(data)
        body = data[_HEAD.size :]
        if not size:
            return body
        return compressor.decompress(np.frombuffer(body, np.uint8), size).tobytes()

    return unpack


def _compressor(name: str) -> Compressor:
    if name not in CODECS:
        raise UnimplementedError(f"records compressed with {name!r} cannot be read or written here")
    return Compressor(name)
