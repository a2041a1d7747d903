"""Arguments as programs for tf.data give them."""

import numpy as np
import pytest

from dataservice import Dataset


class Shape:
    """A shape of another library."""

    def __init__(self, lengths):
        self._lengths = lengths

    def as_list(self):
        if self._lengths is None:
            raise ValueError("the number of dimensions is unknown")
        return self._lengths


@pytest.mark.parametrize(
    ("shapes", "width"),
    [(5, 5), (-1, 2), (np.int64(5), 5), (Shape([5]), 5), (Shape([None]), 2), (Shape(None), 2)],
)
def test_shapes_of_padded_batch(shapes, width):
    elements = [np.array([1]), np.array([2, 3])]
    (batch,) = Dataset.from_source(elements).padded_batch(2, padded_shapes=shapes)
    assert batch.tolist() == [[1, *[0] * (width - 1)], [2, 3, *[0] * (width - 2)]]
    pairs = Dataset.from_source([(one, {"n": one}) for one in elements])
    (batch,) = pairs.padded_batch(2, padded_shapes=(shapes, {"n": shapes}))
    assert batch[0].shape == batch[1]["n"].shape == (2, width)
