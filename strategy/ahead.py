"""Gradients on their way from GPUs to the host, ahead of their push."""

from __future__ import annotations

from typing import Any

from strategy.gpus import leaving
from strategy.reductions import mapped


def to_host_ahead(values: Any) -> Any:
    """Local. Begin to copy arrays from their GPU to the host; waits for nothing.

    ``apply_gradients`` does so by itself, behind all that is queued on the arrays' stream by then.
    Called as soon as gradients have been computed, this lets other work be queued before the push,
    such as the next step::

        values = read_values(weights)
        leaving = None
        for batch in batches:
            gradients = gradients_of(values, batch)  # queued
            if leaving is not None:  # the GPU computes meanwhile
                optimizer.apply_gradients(zip(leaving, weights))
            leaving = to_host_ahead(gradients)
            values = read_values(weights)
        optimizer.apply_gradients(zip(leaving, weights))

    There each gradient is of values that lack the push of the step before, as if that had been
    another worker's.

    Args:
        values: Arrays on GPUs, :class:`IndexedSlices` of those, or tuples, lists and dicts of them.

    Returns:
        The same with :class:`mpidist.gpu.Download` in their places, which ``apply_gradients`` and
        variables take as arrays; what does not lie on a GPU as it is. Until those have taken it,
        an array must not be changed.

    Raises:
        ResourceExhaustedError: A GPU has no memory to pack a strided array.
        DistBackendError: CUDA failed.
        TypeError: An array is of a dtype that has no NumPy array.
    """
    return mapped(leaving, values)
