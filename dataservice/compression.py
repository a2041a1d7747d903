"""Compression of elements on the wire and on disk: the codecs, and when to use one."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from dataservice.proto import dataservice_pb2 as pb
from dataservice.wire import Array, Parcel
from mpidist import Endpoint, Work
from mpidist.errors import DataLossError, FailedPreconditionError

LARGEST_BYTES = 0x7E000000
"""Largest input of a codec: LZ4's limit."""

PROBE_BYTES = 4 << 20
"""Size of the buffer that travels once to measure the connection to a worker."""

# "AUTO" uses the fastest codec. Where LZ4 is slower than the connection, no codec pays.
_AUTO = "LZ4"
# A faster connection outruns the worker that feeds it.
_FAST_BYTES_PER_S = 0.5e9
_PROBE_RATIO = 1.3
_PROBE_BYTES = 1 << 20
_PROBE_LIMIT_S = 10.0
# The receiver has to decompress for the bytes that are saved.
_PAYS_RATIO = 1.1

_Functions = tuple[
    Callable[[Array], int], Callable[[Array, Array], int], Callable[[Array, Array], int]
]
"""Largest size of the result, compress, decompress. The latter two write to their second argument
and return the number of bytes."""


def _snappy(library: Any) -> _Functions:
    snappy = library.snappy
    return snappy.compress_raw_max_len, snappy.compress_raw_into, snappy.decompress_raw_into


def _lz4(library: Any) -> _Functions:
    lz4 = library.lz4
    return (
        lz4.compress_block_bound,
        lambda data, room: lz4.compress_block_into(data, room, store_size=False),
        lambda data, room: lz4.decompress_block_into(data, room, output_len=room.nbytes),
    )


def _zstd(library: Any) -> _Functions:
    zstd = library.zstd
    return (
        lambda data: data.nbytes + (data.nbytes >> 8) + 1024,  # zstd.h: ZSTD_COMPRESSBOUND
        lambda data, room: zstd.compress_into(data, room, level=1),
        zstd.decompress_into,
    )


_REGISTRY: dict[str, Callable[[Any], _Functions]] = {
    "SNAPPY": _snappy,
    "LZ4": _lz4,
    "ZSTD": _zstd,
}

CODECS = tuple(_REGISTRY)
"""The names of the codecs."""


class Compressor:
    """Compresses and decompresses buffers with one codec. Any thread may use it.

    Args:
        codec: One of :data:`CODECS`.
        limit: Largest size of a decompressed buffer, in bytes.

    Raises:
        FailedPreconditionError: The package cramjam is not installed.
        ValueError: The codec is unknown.
    """

    def __init__(self, codec: str, limit: int = LARGEST_BYTES) -> None:
        if codec not in CODECS:
            raise ValueError(f"unknown codec {codec!r}: expected one of {', '.join(CODECS)}")
        library = _cramjam(codec)
        self._codec = codec
        self._limit = limit
        self._error: type[Exception] = library.DecompressionError
        self._bound, self._compress, self._decompress = _REGISTRY[codec](library)

    def compress(self, buffer: Array) -> Array | None:
        """Compress a buffer.

        Args:
            buffer: A contiguous array of any dtype.

        Returns:
            Flat uint8. None if compression does not save a tenth, or if the buffer is larger than
            :data:`LARGEST_BYTES`: then send the buffer itself.
        """
        flat = buffer.reshape(-1).view(np.uint8)
        if not 0 < flat.nbytes <= LARGEST_BYTES:
            return None
        room = np.empty(self._bound(flat), np.uint8)
        nbytes = self._compress(flat, room)
        if nbytes * _PAYS_RATIO > flat.nbytes:
            return None
        room.resize(nbytes, refcheck=False)  # returns the rest of the memory
        return room

    def decompress(self, data: Array, nbytes: int) -> Array:
        """Decompress a buffer.

        Args:
            data: The result of :meth:`compress`.
            nbytes: Size of the original buffer, as told by the sender. No more memory is used.

        Returns:
            Flat uint8, writable.

        Raises:
            DataLossError: The data is damaged, or has another size, or exceeds the limit.
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


def compress(parcel: Parcel, codec: str) -> tuple[Parcel, list[int]]:
    """Compress the pickle and each buffer of a parcel that gets smaller.

    Returns:
        The parcel, and the original sizes of the pickle and of each buffer in bytes, for
        :func:`expand`. The size of an unchanged buffer is 0.
    """
    compressor = Compressor(codec)
    parts = [np.frombuffer(parcel.pickle, np.uint8), *parcel.buffers]
    small = [compressor.compress(part) for part in parts]
    sizes = [0 if s is None else part.nbytes for part, s in zip(parts, small, strict=True)]
    pickled = parcel.pickle if small[0] is None else small[0].tobytes()
    pairs = zip(parts[1:], small[1:], strict=True)
    return Parcel(pickled, [part if s is None else s for part, s in pairs]), sizes


def expand(parcel: Parcel, codec: str, sizes: Sequence[int]) -> Parcel:
    """Return the parcel that :func:`compress` was given.

    Raises:
        DataLossError: The data is damaged.
    """
    if not any(sizes):
        return parcel
    compressor = Compressor(codec)
    parts = [np.frombuffer(parcel.pickle, np.uint8), *parcel.buffers]
    whole = [
        compressor.decompress(part, size) if size else part
        for part, size in zip(parts, sizes, strict=True)
    ]
    return Parcel(whole[0].tobytes(), whole[1:])


def check_compression(name: str | None) -> None:
    """Check the compression that a user names.

    Args:
        name: ``"AUTO"``, which needs no package, None, or one of :data:`CODECS`.

    Raises:
        FailedPreconditionError: The package cramjam is not installed.
        ValueError: The name is unknown.
    """
    if name in CODECS:
        _cramjam(name)
    elif name not in ("AUTO", None):
        known = ", ".join(repr(codec) for codec in CODECS)
        raise ValueError(f"compression must be 'AUTO', None, {known}, not {name!r}")


class CodecChoice:
    """The codec of a consumer for each worker.

    A codec that the user names is used for every worker. ``"AUTO"`` uses LZ4 over tcp between
    hosts if the connection to the worker is measured to be slower than 0.5 GB/s, if the first
    elements shrink to less than 1 / 1.3 of their size, and if cramjam is installed. Shared memory
    and MPI are faster than any codec.

    Args:
        name: The compression that the user names; see :func:`check_compression`.
        endpoint: The consumer's endpoint.
    """

    def __init__(self, name: str | None, endpoint: Endpoint) -> None:
        self._auto = name == "AUTO"
        self._name = "" if self._auto or name is None else name
        self._endpoint = endpoint
        self._chosen: dict[str, str] = {}
        self._probes: dict[str, tuple[Work, list[float], list[Array]]] = {}

    def of(self, worker: str) -> str:
        """Return the codec for requests to a worker. It is empty for no compression."""
        return self._chosen.get(worker, self._name)

    def learn(self, worker: str, buffers: Sequence[Array]) -> None:
        """Use the first elements of a worker to choose its codec.

        The first call that has any measures the connection. A later call evaluates the measurement.
        """
        if not self._auto or worker in self._chosen:
            return
        if worker in self._probes:
            self._evaluate(worker)
        elif buffers:
            own = self._endpoint.address
            if own.protocol != "tcp" or f"://{own.host}:" in worker:
                self._chosen[worker] = ""
                return
            body = pb.ProbeRequest(nbytes=PROBE_BYTES).SerializeToString()
            work = self._endpoint.call(worker, "data_worker/Probe", body, timeout=_PROBE_LIMIT_S)
            times = [time.monotonic()]
            # The time of evaluation depends on when the next element comes.
            work.add_done_callback(lambda _: times.append(time.monotonic()))
            self._probes[worker] = (work, times, list(buffers))

    def _evaluate(self, worker: str) -> None:
        work, times, first = self._probes[worker]
        if len(times) < 2:
            return
        del self._probes[worker]
        rate = PROBE_BYTES / max(times[1] - times[0], 1e-9)
        use = work.exception() is None and compression_pays(rate, first)
        self._chosen[worker] = _AUTO if use else ""


def compression_pays(bytes_per_s: float, first: Sequence[Array]) -> bool:
    """Return whether ``"AUTO"`` compresses the elements of a connection.

    Args:
        bytes_per_s: The measured rate of the connection.
        first: Buffers of the first elements. Up to 1 MiB of them is tried.
    """
    if bytes_per_s >= _FAST_BYTES_PER_S:
        return False
    try:
        compressor = Compressor(_AUTO)
    except FailedPreconditionError:  # "AUTO" does not ask for the package
        return False
    before = after = 0
    for buffer in first:
        probe = buffer.reshape(-1).view(np.uint8)[: _PROBE_BYTES - before]
        small = compressor.compress(probe)
        before += probe.nbytes
        after += probe.nbytes if small is None else small.nbytes
    return before > _PROBE_RATIO * after


def _cramjam(codec: str | None) -> Any:
    try:
        import cramjam
    except ImportError as error:
        raise FailedPreconditionError(
            f"compression {codec!r} needs the package cramjam here and on the data workers: "
            'pip install "mpidist[compress]"; or give compression=None'
        ) from error
    return cramjam
