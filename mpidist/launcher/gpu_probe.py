"""Check every GPU of this host; ``mpidist doctor`` runs it in a process of its own."""

from __future__ import annotations

import sys

import numpy as np

from mpidist import host_view
from mpidist.errors import FailedPreconditionError
from mpidist.gpu import Prefetcher, cupy, device_count


def main() -> None:
    """Copy numbers to each GPU and back, and print the result in one line."""
    try:
        count = device_count()
    except FailedPreconditionError as error:
        sys.exit(f"no GPU can be used: {error.__cause__ or error}")
    numbers = np.arange(1 << 16)
    for number in range(count):
        (array,) = Prefetcher(number).send([numbers]).hand_over()
        if not np.array_equal(host_view(array), numbers):
            sys.exit(f"GPU {number} gives other numbers than it was given")
    print(f"CuPy {cupy().__version__}: copies to and from {count} GPUs arrive")


if __name__ == "__main__":
    main()
