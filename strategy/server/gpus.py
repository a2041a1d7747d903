"""The GPUs on which a server has variables."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from mpidist import errors
from strategy.proto import parameter_server_pb2 as pb
from strategy.protocol.layout import Layout
from strategy.server.memory import Place, on_whole_pages, paged_bytes

if TYPE_CHECKING:
    from strategy.server.gpu import Gpu
    from strategy.server.gpu_shard import GpuShard
    from strategy.server.variable_store import ServedConnection


# Host copies of at least this size are pinned in place.
_PINNED_BYTES = 1 << 16


class Gpus:
    """The GPUs on which a server has variables. CUDA is loaded when a worker first asks for one.

    Args:
        server: Name of the server, for error messages.
    """

    def __init__(self, server: str) -> None:
        self._server = server
        self._found: dict[int, Gpu] = {}

    def close(self) -> None:
        """Wait until the GPUs are idle, and free the memory that variables share."""
        for gpu in self._found.values():
            gpu.close()
        self._found.clear()

    def wanted(self, asked: pb.AttachRequest, others: Iterable[ServedConnection]) -> int | None:
        """Return the index of the GPU for the variables of a worker, or None for the host.

        Args:
            asked: The request of the worker.
            others: The existing connections.

        Raises:
            FailedPreconditionError: CuPy cannot be imported, or cannot use a GPU.
            InvalidArgumentError: The GPU does not exist, or another worker of the strategy has
                another GPU.
            InternalError: CUDA failed.
        """
        number = asked.gpu if asked.HasField("gpu") else None
        for other in others:
            if other.strategy == asked.strategy and other.gpu != number:
                raise errors.InvalidArgumentError(
                    f"worker {asked.worker} has variables of {self._server} on "
                    f"{gpu_in_words(number)}, and worker {other.worker} on "
                    f"{gpu_in_words(other.gpu)}: all workers must have the same parameter_devices"
                )
        if number is not None and number not in self._found:
            from strategy.server.gpu import Gpu  # imports all modules for CUDA

            self._found[number] = Gpu(number, self._server)
        return number

    def values_for(self, number: int | None, name: str, layout: Layout) -> Any:
        """Allocate an array on a GPU for the values of a variable.

        Args:
            number: Index of the GPU, or None for the host.
            name: Name of the variable.
            layout: Layout of the variable.

        Returns:
            The array; None for a variable on the host.

        Raises:
            ResourceExhaustedError: The GPU has no memory.
            InternalError: CUDA failed.
        """
        if number is None:
            return None
        gpu = self._found[number]
        with gpu.told():
            return gpu.array(layout.size, layout.dtype, f"variable {name!r}")

    def data_bytes(self, layout: Layout) -> int:
        """Return the size in bytes of the block for the host copy of a variable."""
        return paged_bytes(layout.data_bytes) if _is_pinned(layout) else layout.data_bytes

    def aligned(self, place: Place, layout: Layout) -> Place:
        """Return the place with the host copy on whole pages, if the host copy is to be pinned."""
        return on_whole_pages(place, 1) if _is_pinned(layout) else place

    def shard(self, number: int | None, given: Any, values: Any) -> GpuShard:
        """Return a shard on a GPU. A large host copy is pinned.

        Args:
            number: Index of the GPU.
            given: The arguments of :class:`Shard`.
            values: See :meth:`values_for`.
        """
        from mpidist.gpu import pin
        from strategy.server.gpu_shard import GpuShard

        assert number is not None
        _, memory, layout, _, data, *_ = given
        pinned = None
        if _is_pinned(layout):
            nbytes = paged_bytes(layout.data_bytes) - paged_bytes(0)
            pinned = pin(memory[data : data + nbytes], number)
        return GpuShard(*given, gpu=self._found[number], values=values, pinned=pinned)


def _is_pinned(layout: Layout) -> bool:
    return layout.is_floating and layout.data_bytes >= _PINNED_BYTES


def gpu_in_words(gpu: int | None) -> str:
    """Return the text for a GPU, or for the host, for messages."""
    return "the host" if gpu is None else f"GPU {gpu}"
