"""Parameter servers and workers of several hosts: shared memory on the node, messages elsewhere."""

import json

TRAIN = """
    import json, os, sys
    import numpy as np
    import mpidist
    from mpidist import errors
    from mpidist.cluster_resolver import MPIClusterResolver
    from mpidist.runtime import world
    from strategy import ParameterServerStrategy, get_variable, optimizers

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
            memories = [server.memory.part(n) for n in range(spec.num_tasks("ps"))]
            near = [memory is not None for memory in memories]
            try:
                ParameterServerStrategy(resolver, transport="shared")
                refused = ""
            except errors.FailedPreconditionError as error:
                refused = str(error)
            workers = server.job_group("worker")
            workers.barrier()
            strategy = ParameterServerStrategy(resolver)
            with strategy.scope():
                variables = [get_variable(f"v{size}", size, initializer=0) for size in SIZES]
            ways = {variable.remotes[0].shared is not None for variable in variables}
            workers.barrier()
            sgd = optimizers.SGD(1.0)
            for _ in range(ROUNDS):
                sgd.apply_gradients([(np.ones(v.shape), v) for v in variables])
                for variable in variables:
                    value = variable.read_value()
                    # Each version took 1 from every element: nothing is a mix of two.
                    np.testing.assert_array_equal(value, 1.0 - variable.version)
            workers.barrier()
            for variable in variables:
                value = variable.read_value()
                np.testing.assert_array_equal(value, -float(ROUNDS * strategy.num_workers))
            facts = {"host": world().host, "near": near, "refused": refused, "ways": sorted(ways)}
            os.write(1, json.dumps(facts).encode() + b"\\n")
"""


def test_memory_is_shared_by_node_mates_alone(jobs):
    ended = jobs.ranks({"node1": 2, "node2": 1}, [*jobs.script(TRAIN), "1"])
    assert ended.status == 0, ended.err
    facts = {one["host"]: one for one in map(json.loads, ended.out.splitlines())}
    assert sorted(facts) == ["node1", "node2"]
    assert (facts["node1"]["near"], facts["node1"]["ways"]) == ([True], [True])
    assert facts["node1"]["refused"] == ""
    assert (facts["node2"]["near"], facts["node2"]["ways"]) == ([False], [False])
    assert "ps 0 is on another node than worker 1" in facts["node2"]["refused"]


def test_a_worker_with_one_server_near_and_one_far(jobs):
    ended = jobs.ranks(dict.fromkeys(["node1", "node2"], 1), [*jobs.script(TRAIN), "2"], count=4)
    assert ended.status == 0, ended.err
    facts = {one["host"]: one for one in map(json.loads, ended.out.splitlines())}
    assert facts["node1"]["near"] == [True, False]
    assert facts["node2"]["near"] == [False, True]
    assert facts["node1"]["ways"] == facts["node2"]["ways"] == [False, True]
