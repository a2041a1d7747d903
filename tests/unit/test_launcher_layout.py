"""Ranks that a command line makes."""

import argparse

import pytest

from mpidist.launcher.layout import Layout, layout_of


def counts(ps=None, worker=None, data=None):
    return {"ps": ps, "worker": worker, "data": data}


def make_layout(jobs, others, ranks, rule=None):
    words = [f"{name}={number}" for name, number in others]
    return layout_of(argparse.Namespace(**jobs, job=words, ranks=ranks, rule=rule))


def test_order_is_ps_worker_data_then_as_given():
    layout = make_layout(counts(data=1, worker=2, ps=1), [("zeta", 1), ("chief", 1)], None)
    assert str(layout) == "ps=1,worker=2,data=1,zeta=1,chief=1"
    assert layout.ranks == 6
    tasks = [layout.task(rank) for rank in range(6)]
    assert tasks == [
        ("ps", 0),
        ("worker", 0),
        ("worker", 1),
        ("data", 0),
        ("zeta", 0),
        ("chief", 0),
    ]


def test_ranks_alone_name_no_job():
    layout = make_layout(counts(), [], 3)
    assert layout == Layout(3)
    assert layout.task(1) is None


def test_worker_takes_what_is_left():
    assert str(make_layout(counts(ps=1), [], 4)) == "ps=1,worker=3"


def test_a_job_of_zero_tasks_is_left_out():
    assert str(make_layout(counts(ps=0, worker=1), [("chief", 0)], None)) == "worker=1"


@pytest.mark.parametrize(
    ("jobs", "others", "ranks", "remedy"),
    [
        ({}, [], None, "give --worker N, or -n N"),
        ({"ps": 0}, [], None, "give --worker N, or -n N"),
        ({"ps": 2}, [], None, "add --worker N"),
        ({"worker": -1}, [], None, "give 0 or more"),
        ({}, [], -2, "give 0 or more"),
        ({"worker": 2}, [], 3, "leave out -n"),
        ({"ps": 3}, [], 2, "leave out -n"),
        ({"worker": 1}, [("worker", 2)], None, "give its number once"),
        ({"worker": 1}, [("a", 1), ("a", 1)], None, "give its number once"),
    ],
)
def test_numbers_that_make_no_job(jobs, others, ranks, remedy):
    with pytest.raises(ValueError, match=remedy):
        make_layout(counts(**jobs), others, ranks)


def test_ps_tasks_that_follow_the_nodes():
    layout = make_layout(counts(data=1), [("chief", 1)], 6, "per_node")
    assert str(layout) == "ps=per_node,worker=-1,data=1,chief=1"
    assert (layout.ranks, layout.task(1)) == (6, None)  # only the ranks know their nodes
    layout = make_layout(counts(worker=2, data=1), [], None, "colocated")
    assert str(layout) == "ps=colocated,worker=2,data=1"
    assert [layout.task(rank) for rank in range(3)] == [("worker", 0), ("worker", 1), ("data", 0)]
    assert str(make_layout(counts(), [], 3, "colocated")) == "ps=colocated,worker=3"


@pytest.mark.parametrize(
    ("jobs", "ranks", "rule", "remedy"),
    [
        ({"ps": 1, "worker": 1}, None, "colocated", "leave out their number"),
        ({"ps": 1}, 3, "per_node", "leave out their number"),
        ({"worker": 2}, None, "per_node", "with -n and leave out"),
        ({"worker": 2}, 4, "per_node", "leave out --worker"),
        ({"data": 2}, 3, "per_node", "give -n 4 or more"),
        ({"data": 2}, None, "colocated", "add --worker N"),
        ({}, None, "colocated", "give --worker N, or -n N"),
    ],
)
def test_numbers_that_do_not_go_with_a_rule(jobs, ranks, rule, remedy):
    with pytest.raises(ValueError, match=remedy):
        make_layout(counts(**jobs), [], ranks, rule)


@pytest.mark.parametrize("text", ["chief", "chief=", "=1", "chief=-1", "chief=x", "a b=1", "1a=1"])
def test_bad_job(text):
    with pytest.raises(ValueError, match="NAME=N"):
        layout_of(argparse.Namespace(**counts(), job=[text], ranks=None, rule=None))


def test_job():
    assert make_layout(counts(), [("evaluator", 1)], None).jobs == (("evaluator", 1),)
