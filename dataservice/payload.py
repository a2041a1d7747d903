"""Values as bytes of messages and files: pickles, large arrays beside them, and compression."""

from __future__ import annotations

import hashlib
import pickle
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import cloudpickle
import numpy as np

from dataservice.proto import dataservice_pb2 as pb
from mpidist import Endpoint, Work
from mpidist.errors import DataLossError, FailedPreconditionError

if TYPE_CHECKING:
    from dataservice.dataset.base import Node

Array = np.ndarray[Any, Any]

# Smaller arrays are copied into the pickle: a message of its own would cost more than the copy.
_BESIDE_BYTES = 32 << 10
_NOT_HERE = (
    "the dataset needs it, and it cannot be imported where the dataset is evaluated. A function or "
    "class of a module that can be imported where the dataset is made travels by reference. Put "
    "the module on the PYTHONPATH of the data workers, define the function in the script itself "
    "(__main__), or call cloudpickle.register_pickle_by_value(module) before distribute"
)

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


@dataclass(frozen=True)
class Parcel:
    """A pickled value.

    Attributes:
        pickle: The pickle, of protocol 5.
        buffers: The memory of large arrays as flat uint8. It is not copied.
        sizes: The original sizes of the pickle and of each buffer in bytes; 0 for an uncompressed
            one. Empty if nothing is compressed.
    """

    pickle: bytes
    buffers: Sequence[Array] = ()
    sizes: Sequence[int] = ()

    def digest(self) -> bytes:
        """Return the SHA-256 of the pickle and the buffers."""
        result = hashlib.sha256(self.pickle)
        for buffer in self.buffers:
            result.update(buffer.data)
        return result.digest()

    def compress(self, codec: str) -> Parcel:
        """Return a parcel in which each part is compressed that gets smaller."""
        compressor = Compressor(codec)
        parts = self._parts
        small = [compressor.compress(part) for part in parts]
        sizes = [0 if s is None else part.nbytes for part, s in zip(parts, small, strict=True)]
        pickled = self.pickle if small[0] is None else small[0].tobytes()
        pairs = zip(parts[1:], small[1:], strict=True)
        return Parcel(pickled, [part if s is None else s for part, s in pairs], sizes)

    def expand(self, codec: str) -> Parcel:
        """Return the parcel before :meth:`compress`.

        Raises:
            DataLossError: The data is damaged.
        """
        if not any(self.sizes):
            return self
        compressor = Compressor(codec)
        whole = [
            compressor.decompress(part, size) if size else part
            for part, size in zip(self._parts, self.sizes, strict=True)
        ]
        return Parcel(whole[0].tobytes(), whole[1:])

    @property
    def _parts(self) -> list[Array]:
        return [np.frombuffer(self.pickle, np.uint8), *self.buffers]


def pack_elements(elements: list[Any]) -> Parcel:
    """Pickle elements. Classes that pickle cannot name, such as a script's own, go by value.

    Raises:
        Exception: An element cannot be pickled.
    """
    try:
        return _pack(elements, pickle.dumps)
    except (pickle.PicklingError, AttributeError, TypeError):
        return _pack(elements, cloudpickle.dumps)


def dumps(value: Any) -> bytes:
    """Pickle a value in one piece, with the classes that :func:`pack_elements` can pickle.

    Raises:
        Exception: The value cannot be pickled.
    """
    try:
        return pickle.dumps(value, protocol=5)
    except (pickle.PicklingError, AttributeError, TypeError):
        data: bytes = cloudpickle.dumps(value, protocol=5)
        return data


def indexed_checkpoint(index: int) -> pb.Checkpoint:
    """Return the checkpoint of a part of an indexed dataset before an element.

    Each source index of the part is an element, and the state of the iterator is their number.
    """
    return pb.Checkpoint(index=index, state=dumps(index), position=index)


def pack_dataset(node: Node) -> Parcel:
    """Pickle a description of a dataset. Its functions go by value.

    Raises:
        Exception: A function or object of the description cannot be pickled.
    """
    return _pack(node, cloudpickle.dumps)


def unpack(data: bytes | memoryview, buffers: Sequence[Array]) -> Any:
    """Unpickle a value. Its large arrays are views of the buffers."""
    return pickle.loads(data, buffers=buffers)


def unpack_dataset(data: bytes, buffers: Sequence[Array]) -> Node:
    """Return the description that :func:`pack_dataset` was given.

    Raises:
        AttributeError: A module lacks a name here that the dataset refers to.
        ImportError: A module that the dataset refers to cannot be imported here.
    """
    try:
        node: Node = unpack(data, buffers)
    except ImportError as error:
        missing = isinstance(error, ModuleNotFoundError)
        kind = ModuleNotFoundError if missing else ImportError
        raise kind(f"{error}: {_NOT_HERE}", name=error.name, path=error.path) from error
    except AttributeError as error:
        raise AttributeError(f"{error}: {_NOT_HERE}") from error
    return node


def _pack(value: Any, dumps: Callable[..., bytes]) -> Parcel:
    buffers: list[Array] = []

    def stays_inside(buffer: pickle.PickleBuffer) -> bool:
        memory = buffer.raw()
        if memory.nbytes < _BESIDE_BYTES:
            return True
        buffers.append(np.frombuffer(memory, np.uint8))
        return False

    data = dumps(value, protocol=5, buffer_callback=stays_inside)
    return Parcel(data, buffers)


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

    Raises:
        FailedPreconditionError: The package cramjam is not installed.
        ValueError: The codec is unknown.
    """

    def __init__(self, codec: str) -> None:
        if codec not in CODECS:
            raise ValueError(f"unknown codec {codec!r}: expected one of {', '.join(CODECS)}")
        library = _cramjam(codec)
        self._codec = codec
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
        if not 0 < nbytes <= LARGEST_BYTES:
            raise DataLossError(
                f"{what} are to decompress to {nbytes} bytes, which is not between 1 and the "
                f"limit {LARGEST_BYTES}: the message is damaged, or not from a data worker"
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
