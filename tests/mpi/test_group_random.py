"""Every collective against NumPy, over random dtypes, shapes, layouts, roots and groups."""

import pytest
from _cases.collectives import COLLECTIVES, check

SEEDS = 15


@pytest.mark.ranks(1, 2, 3, 4)
@pytest.mark.parametrize("collective", COLLECTIVES, ids=lambda c: c.__name__)
def test_collective(world, collective):
    check(collective, world, range(SEEDS))
