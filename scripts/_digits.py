"""Handwritten digits: the 1,797 images of 8 x 8 pixels that come with scikit-learn.

This module reads the data file without an import of scikit-learn, which takes two seconds on every
rank.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


def load_digits() -> tuple[tuple[Array, Array], tuple[Array, Array]]:
    """Return the images for training and the held-out images, a fifth of each digit.

    The split is the same in every run.

    Returns:
        Two pairs: images of shape (n, 64), float32 in 0 to 1, and digits of shape (n,), int64.

    Raises:
        ModuleNotFoundError: scikit-learn is not installed.
    """
    package = find_spec("sklearn")
    if package is None or package.origin is None:
        raise ModuleNotFoundError("the digits come with scikit-learn: pip install 'mpidist[demo]'")
    path = Path(package.origin).parent / "datasets" / "data" / "digits.csv.gz"
    table = np.loadtxt(path, dtype=np.float32, delimiter=",")
    images, digits = table[:, :64] / 16, table[:, 64].astype(np.int64)
    order = np.random.default_rng(0).permutation(len(digits))
    order = order[np.argsort(digits[order], kind="stable")]
    held_out = np.zeros(len(digits), bool)
    held_out[order[::5]] = True
    return (images[~held_out], digits[~held_out]), (images[held_out], digits[held_out])
