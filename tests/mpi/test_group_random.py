"""Every collective against NumPy, over random dtypes, shapes, layouts, roots and groups."""

import pytest
from _cases.collectives import BY_PARTS, COLLECTIVES, check

SEEDS = 15


@pytest.mark.ranks(1, 2, 3, 4)
@pytest.mark.parametrize("collective", COLLECTIVES, ids=lambda c: c.__name__)
def test_collective(world, collective):
    check(collective, world, range(SEEDS))


@pytest.mark.ranks(1, 2, 3, 4)
@pytest.mark.parametrize("timeout", [None, 60])
@pytest.mark.parametrize("collective", BY_PARTS, ids=lambda c: c.__name__)
def test_parts_as_messages_in_pieces(world, monkeypatch, collective, timeout):
    monkeypatch.setattr("mpidist.group.moves.WORTH_A_MESSAGE", 1)
    for module in ("op", "executor", "group.exchanges"):
        monkeypatch.setattr(f"mpidist.{module}.LARGEST_COUNT", 7)
    monkeypatch.setattr("mpidist.op._PIECE_COUNT", 5)
    check(collective, world, range(SEEDS, SEEDS + 8), timeout)
