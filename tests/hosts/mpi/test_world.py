"""Ranks on several hosts: their view of each other, and process groups between them."""

import json

import pytest

FACTS = """
    import json, os, socket
    from mpidist.mpi import world
    here = world()
    facts = {"host": socket.gethostname(), "hosts": here.hosts, "nodes": here.nodes,
             "mates": here.node.size, "rank": here.rank}
    os.write(1, json.dumps(facts).encode() + b"\\n")  # in one piece
"""


@pytest.mark.parametrize("per_node", [1, 2])
@pytest.mark.parametrize("count", [2, 3])
def test_world(jobs, count, per_node):
    names = ["node1", "node2", "node3"][:count]
    ended = jobs.ranks(dict.fromkeys(names, per_node), jobs.script(FACTS))
    assert ended.status == 0, ended.err
    facts = sorted(map(json.loads, ended.out.splitlines()), key=lambda one: one["rank"])
    hosts = [name for name in names for _ in range(per_node)]
    nodes = [number for number in range(count) for _ in range(per_node)]
    assert [one["host"] for one in facts] == hosts
    for one in facts:
        assert (one["hosts"], one["nodes"], one["mates"]) == (hosts, nodes, per_node)
