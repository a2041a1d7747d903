"""Copies of gradients from GPUs to the host, ahead of their push."""

from __future__ import annotations

from typing import Any

from strategy.gpus import leaving
from strategy.reductions import mapped


def to_host_ahead(values: Any) -> Any:
    """Start to copy arrays from their GPU to the host, without waiting.

    ``apply_gradients`` also starts these copies, after all work that the stream of the arrays has
    queued by then. Call this function right after queueing the computation of gradients. Then you
    can queue other work before the push, such as the next step::

        values = read_values(weights)
        leaving = None
        for batch in batches:
            gradients = gradients_of(values, batch)  # queued
            if leaving is not None:  # the GPU computes meanwhile
                optimizer.apply_gradients(zip(leaving, weights))
            leaving = to_host_ahead(gradients)
            values = read_values(weights)
        optimizer.apply_gradients(zip(leaving, weights))

    In this example the values lack the push of the step before, as if another worker had made that
    push.

    Args:
        values: Arrays on GPUs, :class:`IndexedSlices` of them, or tuples, lists and dicts of both.

    Returns:
        The same structure with a :class:`mpidist.gpu.Download` in place of each array on a GPU.
        ``apply_gradients`` and variables accept a Download as an array. Do not change an array
        before they have used its Download. Other values are returned unchanged.

    Raises:
        ResourceExhaustedError: A GPU has no memory to pack a strided array.
        DistBackendError: CUDA failed.
        TypeError: NumPy has no dtype for an array.
    """
    return mapped(leaving, values)
