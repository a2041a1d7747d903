"""Which ps task a variable lives on."""

from hypothesis import given
from hypothesis import strategies as st

from strategy.placement import ByBytes

sizes = st.lists(st.integers(0, 1 << 30), max_size=60)


@given(sizes, st.integers(1, 8))
def test_no_server_is_ahead_by_more_than_one_variable(variables, servers):
    placement = ByBytes(servers)
    loads = [0] * servers
    for nbytes in variables:
        server = placement.place(nbytes)
        assert loads[server] == min(loads)
        loads[server] += nbytes + 64
    assert max(loads) - min(loads) <= max(variables, default=0) + 64


@given(sizes, st.integers(1, 8))
def test_all_workers_come_to_the_same_result(variables, servers):
    first, second = ByBytes(servers), ByBytes(servers)
    assert [first.place(n) for n in variables] == [second.place(n) for n in variables]


def test_empty_variables_go_round():
    placement = ByBytes(3)
    assert [placement.place(0) for _ in range(6)] == [0, 1, 2, 0, 1, 2]
