"""Parameter servers and workers of several hosts, over every transport."""

import json

import pytest

TRAIN = """
    import json, os, sys
    import numpy as np
    import mpidist
    from mpidist import errors
    from mpidist.cluster_resolver import MPIClusterResolver
    from mpidist.mpi import world
    from strategy import ParameterServerStrategy, get_variable, optimizers
    from strategy.partitioners import FlatPartitioner, fixed_size_partitioner

    ROUNDS = 15
    SIZES = (3, 300_001, 2_000_003)

    resolver = MPIClusterResolver(jobs={"ps": int(sys.argv[1]), "worker": -1})
    spec = resolver.cluster_spec()
    with mpidist.Server(
        spec, job_name=resolver.task_type, task_index=resolver.task_id
    ) as server:
        if resolver.task_type == "ps":
            server.join()
        else:
            near = [server.memory.is_near(n) for n in range(spec.num_tasks("ps"))]
            refused = ""
            try:
                if sys.argv[2] == "auto":
                    ParameterServerStrategy(resolver, transport="shared").close()
            except errors.FailedPreconditionError as error:
                refused = str(error)
            workers = server.job_group("worker")
            workers.barrier()
            strategy = ParameterServerStrategy(resolver, transport=sys.argv[2])
            with strategy.scope():
                variables = [get_variable(f"v{size}", size, initializer=0) for size in SIZES]
                parts = [
                    get_variable(f"p{n}", (601, 7, 5), "int64", 0, partitioner=way)
                    for n, way in enumerate((fixed_size_partitioner(3), FlatPartitioner(2)))
                ]
            ways = {variable.remotes[0].shared is not None for variable in variables}
            workers.barrier()
            sgd = optimizers.SGD(1.0)
            for _ in range(ROUNDS):
                sgd.apply_gradients([(np.ones(v.shape), v) for v in variables])
                for variable in variables:
                    value = variable.read_value()
                    # Each version took 1 from every element: nothing is a mix of two.
                    np.testing.assert_array_equal(value, 1.0 - variable.version)
                for part in parts:
                    part.assign_add(np.arange(601 * 35).reshape(601, 7, 5))
                    part.scatter_sub([600, 3, 600], np.ones((3, 7, 5), int))
            workers.barrier()
            for variable in variables:
                value = variable.read_value()
                np.testing.assert_array_equal(value, -float(ROUNDS * strategy.num_workers))
            total = np.arange(601 * 35).reshape(601, 7, 5)
            np.subtract.at(total, [600, 3, 600], np.ones((3, 7, 5), int))
            for part in parts:
                np.testing.assert_array_equal(
                    part.read_value(), ROUNDS * strategy.num_workers * total
                )
            facts = {"host": world().host, "near": near, "refused": refused, "ways": sorted(ways)}
            os.write(1, json.dumps(facts).encode() + b"\\n")
"""


def test_memory_is_shared_by_node_mates_alone(jobs):
    ended = jobs.ranks({"node1": 2, "node2": 1}, [*jobs.script(TRAIN), "1", "auto"])
    assert ended.status == 0, ended.err
    facts = {one["host"]: one for one in map(json.loads, ended.out.splitlines())}
    assert sorted(facts) == ["node1", "node2"]
    assert (facts["node1"]["near"], facts["node1"]["ways"]) == ([True], [True])
    assert facts["node1"]["refused"] == ""
    assert (facts["node2"]["near"], facts["node2"]["ways"]) == ([False], [False])
    assert "ps 0 is on another node than worker 1" in facts["node2"]["refused"]


def test_a_worker_with_one_server_near_and_one_far(jobs):
    script = [*jobs.script(TRAIN), "2", "auto"]
    ended = jobs.ranks(dict.fromkeys(["node1", "node2"], 1), script, count=4)
    assert ended.status == 0, ended.err
    facts = {one["host"]: one for one in map(json.loads, ended.out.splitlines())}
    assert facts["node1"]["near"] == [True, False]
    assert facts["node2"]["near"] == [False, True]
    assert facts["node1"]["ways"] == facts["node2"]["ways"] == [False, True]


@pytest.mark.parametrize("servers", ["1", "2"])
@pytest.mark.parametrize(("transport", "reached"), [("rma", True), ("p2p", False)])
def test_transports_without_shared_memory(jobs, servers, transport, reached):
    script = [*jobs.script(TRAIN), servers, transport]
    ended = jobs.ranks(dict.fromkeys(["node1", "node2"], 1), script, count=4)
    assert ended.status == 0, ended.err
    facts = [json.loads(line) for line in ended.out.splitlines()]
    assert {one["host"] for one in facts} >= {"node2"}
    assert [one["ways"] for one in facts] == [[reached]] * (4 - int(servers))
