"""Pickle elements and datasets, with the memory of large arrays beside the pickle."""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import cloudpickle
import numpy as np

from dataservice.proto import dataservice_pb2 as pb

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


@dataclass(frozen=True)
class Parcel:
    """A pickled value.

    Attributes:
        pickle: The pickle, of protocol 5.
        buffers: The memory of large arrays as flat uint8. It is not copied.
    """

    pickle: bytes
    buffers: Sequence[Array]

    def digest(self) -> bytes:
        """Return the SHA-256 of the pickle and the buffers."""
        result = hashlib.sha256(self.pickle)
        for buffer in self.buffers:
            result.update(buffer.data)
        return result.digest()


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
