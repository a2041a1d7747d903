"""Codecs for memory that goes over a network, and when to use one. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from mpidist.errors import DataLossError, FailedPreconditionError

Array = np.ndarray[Any, Any]

CODECS = ("SNAPPY", "LZ4", "ZSTD")

LARGEST_BYTES = 0x7E000000
"""What all codecs can take in one piece: LZ4's limit."""

# Which is the fastest of them; where it does not keep up with the link, none would pay.
_AUTO = "LZ4"
# From this rate on, a link is faster than what would feed it.
_FAST_BYTES_PER_S = 0.5e9
_PROBE_RATIO = 1.3
_PROBE_BYTES = 1 << 20
# The other side has to decompress for what is saved.
_PAYS_RATIO = 1.1


class Compressor:
    """Local. Compresses and decompresses with one codec; from any thread.

    Args:
        codec: One of :data:`CODECS`.
        limit: Bytes that anything decompressed may have.

    Raises:
        FailedPreconditionError: The package that has the codecs is not installed.
        ValueError: There is no such codec.
    """

    def __init__(self, codec: str, limit: int = LARGEST_BYTES) -> None:
        if codec not in CODECS:
            raise ValueError(f"unknown codec {codec!r}: expected one of {', '.join(CODECS)}")
        library = _cramjam(codec)
        self._codec = codec
        self._limit = limit
        self._error: type[Exception] = library.DecompressionError
        self._bound, self._compress, self._decompress = _functions(library, codec)

    def compress(self, buffer: Array) -> Array | None:
        """Local. A buffer in fewer bytes.

        Args:
            buffer: Of any dtype, contiguous.

        Returns:
            Flat uint8; None if it would not be smaller by a tenth, or is more than
            :data:`LARGEST_BYTES`: send the buffer itself.
        """
        flat = buffer.reshape(-1).view(np.uint8)
        if not 0 < flat.nbytes <= LARGEST_BYTES:
            return None
        room = np.empty(self._bound(flat), np.uint8)
        nbytes = self._compress(flat, room)
        if nbytes * _PAYS_RATIO > flat.nbytes:
            return None
        room.resize(nbytes, refcheck=False)  # gives back the rest of the memory
        return room

    def decompress(self, data: Array, nbytes: int) -> Array:
        """Local. The inverse.

        Args:
            data: What :meth:`compress` gave.
            nbytes: What the buffer had, as whoever sent the data says; its result takes no more.

        Returns:
            Flat uint8, writable.

        Raises:
            DataLossError: The data is damaged, or has another length than that, or the limit.
        """
        what = f"{data.nbytes} bytes of {self._codec}"
        if not 0 < nbytes <= self._limit:
            raise DataLossError(
                f"{what} are to decompress to {nbytes} bytes, which is not between 1 and the "
                f"limit {self._limit}: the message is damaged, or not from a data worker"
            )
        result = np.empty(nbytes, np.uint8)
        try:
            there = self._decompress(data, result)
        except self._error as error:
            raise DataLossError(
                f"cannot decompress {what} to {nbytes} bytes: {error}; the message is damaged, or "
                "not from a data worker"
            ) from error
        if there != nbytes:
            raise DataLossError(
                f"{what} decompressed to {there} bytes, not to the {nbytes} that the sender "
                "gave: the message is damaged, or not from a data worker"
            )
        return result


def check_compression(name: str | None) -> None:
    """Local. Whether ``distribute`` can take a name for its compression.

    Args:
        name: ``"AUTO"``, which needs no package, None, or one of :data:`CODECS`.

    Raises:
        FailedPreconditionError: The package that has the codecs is not installed.
        ValueError: The name is unknown.
    """
    if name in CODECS:
        _cramjam(name)
    elif name not in ("AUTO", None):
        known = ", ".join(repr(codec) for codec in CODECS)
        raise ValueError(f"compression must be 'AUTO', None, {known}, not {name!r}")


def choose_codec(
    name: str | None, transport: str, bytes_per_s: float, first: Sequence[Array]
) -> str | None:
    """Local. The codec for a stream of buffers.

    ``"AUTO"`` compresses with LZ4 what goes over tcp at less than 0.5 GB/s, if a probe shrinks to
    less than 1 / 1.3 of its size and the package that has the codecs is installed. Memory that is
    shared, and MPI, are faster than any codec.

    Args:
        name: As given to ``distribute``; a codec is used as told.
        transport: ``"tcp"``, ``"mpi"``, ``"inproc"``, or another name for memory that is shared.
        bytes_per_s: What the link has been measured to do.
        first: Buffers of the first elements; up to 1 MiB of them is tried.

    Returns:
        One of :data:`CODECS`, or None for none.
    """
    if name != "AUTO":
        return name
    if transport != "tcp" or bytes_per_s >= _FAST_BYTES_PER_S:
        return None
    try:
        compressor = Compressor(_AUTO)
    except FailedPreconditionError:  # nobody has asked for a codec
        return None
    before = after = 0
    for buffer in first:
        probe = buffer.reshape(-1).view(np.uint8)[: _PROBE_BYTES - before]
        small = compressor.compress(probe)
        before += probe.nbytes
        after += probe.nbytes if small is None else small.nbytes
    return _AUTO if before > _PROBE_RATIO * after else None


def _cramjam(codec: str | None) -> Any:
    try:
        import cramjam
    except ImportError as error:
        raise FailedPreconditionError(
            f"compression {codec!r} needs the package cramjam here and on the data workers: "
            'pip install "mpidist[compress]"; or give compression=None'
        ) from error
    return cramjam


def _functions(
    library: Any, codec: str
) -> tuple[Callable[[Array], int], Callable[[Array, Array], int], Callable[[Array, Array], int]]:
    """Largest size, compress and decompress; both write into their second argument."""
    if codec == "SNAPPY":
        snappy = library.snappy
        return snappy.compress_raw_max_len, snappy.compress_raw_into, snappy.decompress_raw_into
    if codec == "LZ4":
        return (
            library.lz4.compress_block_bound,
            lambda data, room: library.lz4.compress_block_into(data, room, store_size=False),
            lambda data, room: library.lz4.decompress_block_into(
                data, room, output_len=room.nbytes
            ),
        )
    return (
        lambda data: data.nbytes + (data.nbytes >> 8) + 1024,  # zstd.h: ZSTD_COMPRESSBOUND
        lambda data, room: library.zstd.compress_into(data, room, level=1),
        library.zstd.decompress_into,
    )
