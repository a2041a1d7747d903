"""The GPUs of a server, as far as workers want variables there."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from mpidist import errors
from strategy.proto import parameter_server_pb2 as pb
from strategy.server.memory import Place, on_whole_pages, paged_bytes
from strategy.server.served import ServedConnection, gpu_in_words
from strategy.shared.shard import Layout

if TYPE_CHECKING:
    from strategy.server.gpu import Gpu
    from strategy.server.gpu_shard import GpuShard

# From here on a copy that workers see is pinned where it lies.
_PINNED_BYTES = 1 << 16


class Gpus:
    """Local. The GPUs of a server. Nothing of CUDA is loaded before a worker wants one.

    Args:
        who: The server, for messages.
    """

    def __init__(self, who: str) -> None:
        self._who = who
        self._found: dict[int, Gpu] = {}

    def close(self) -> None:
        """Local. Wait until nothing is under way there, and give back what variables share."""
        for gpu in self._found.values():
            gpu.close()
        self._found.clear()

    def wanted(self, asked: pb.AttachRequest, others: Iterable[ServedConnection]) -> int | None:
        """Local. The number of the GPU that a worker wants its variables on; None for the host.

        Args:
            asked: What it says.
            others: The connections that there are.

        Raises:
            FailedPreconditionError: CuPy cannot be imported, or can use no GPU.
            InvalidArgumentError: There is no such GPU, or another worker wants another one.
        """
        number = asked.gpu if asked.HasField("gpu") else None
        for other in others:
            if other.strategy == asked.strategy and other.gpu != number:
                raise errors.InvalidArgumentError(
                    f"worker {asked.worker} has variables of {self._who} on "
                    f"{gpu_in_words(number)}, and worker {other.worker} on "
                    f"{gpu_in_words(other.gpu)}: all workers must have the same parameter_devices"
                )
        if number is not None and number not in self._found:
            from strategy.server.gpu import Gpu  # and with it all that knows CUDA

            self._found[number] = Gpu(number, self._who)
        return number

    def values_for(self, number: int | None, name: str, layout: Layout) -> Any:
        """Local. An array on a GPU for the values of a variable.

        Args:
            number: Of the GPU, if its worker wants one.
            name: Of the variable.
            layout: Its layout.

        Returns:
            It; None where the variable lies on the host: integers and bools always do, since no
            optimizer changes them.

        Raises:
            ResourceExhaustedError: The GPU has no memory.
            InternalError: CUDA failed.
        """
        if number is None or not layout.is_floating:
            return None
        gpu = self._found[number]
        with gpu.told():
            return gpu.array(layout.size, layout.dtype, f"variable {name!r}")

    def data_bytes(self, layout: Layout) -> int:
        """Local. What the copy of a variable takes that a worker sees."""
        return paged_bytes(layout.data_bytes) if _is_pinned(layout) else layout.data_bytes

    def aligned(self, place: Place, layout: Layout) -> Place:
        """Local. The place of a variable, where its copy can be pinned if it is to be."""
        return on_whole_pages(place, 1) if _is_pinned(layout) else place

    def shard(self, number: int | None, given: Any, values: Any) -> GpuShard:
        """Local. A variable on a GPU.

        Args:
            number: Of the GPU.
            given: What :class:`OwnedShard` takes.
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
