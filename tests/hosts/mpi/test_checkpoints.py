"""Checkpoints in a folder that only one of the hosts has: each has a /tmp of its own."""

import json

SCRIPT = """
    import json, os, shutil, sys, time
    import numpy as np
    import mpidist
    from mpidist import errors
    from mpidist.cluster_resolver import MPIClusterResolver
    from mpidist.mpi import world
    from strategy import ParameterServerStrategy, get_variable, optimizers
    from strategy.partitioners import FlatPartitioner, fixed_size_partitioner

    servers, step = int(sys.argv[1]), sys.argv[2]
    FOLDER = "/tmp/checkpoints"
    SHAPES = {"scalar": (), "matrix": (40, 30), "large": (3, 700, 2011), "last": (5,)}
    WAYS = {"save": (fixed_size_partitioner(3), None), "restore": (FlatPartitioner(2), 2)}

    def train(steps):
        for number in steps:
            random = np.random.default_rng(number)
            adam.apply_gradients([(random.standard_normal(v.shape), v) for v in variables.values()])

    def refused(call):
        begin = time.monotonic()
        try:
            call()
        except errors.Error as error:
            assert time.monotonic() - begin < 10
            return f"{type(error).__name__}: {error}"

    resolver = MPIClusterResolver(jobs={"ps": servers, "worker": -1})
    with mpidist.Server(
        resolver.cluster_spec(), job_name=resolver.task_type, task_index=resolver.task_id
    ) as server:
        facts = {"host": world().host, "job": resolver.task_type}
        if resolver.task_type == "ps":
            server.join()
        else:
            workers = server.job_group("worker")
            strategy = ParameterServerStrategy(resolver)
            adam = optimizers.Adam(0.01)
            with strategy.scope():
                variables = {n: get_variable(n, s, initializer=0.5) for n, s in SHAPES.items()}
                variables["parts"] = get_variable(
                    "parts", (601, 70), initializer=0.25, partitioner=WAYS[step][0]
                )
            if step == "save" and strategy.is_chief:
                train(range(3))
                facts["path"] = strategy.save(FOLDER, extra={"reader": b"state"})
                train(range(3, 5))
                np.savez("/tmp/checkpoints/expected.npz", **{
                    name: v.numpy() for name, v in variables.items()
                })
                facts["files"] = sorted(os.listdir(facts["path"]))
            elif step == "restore":
                path = FOLDER + "/step-3"
                facts["seen"] = os.path.exists(path)
                facts["nowhere"] = refused(lambda: strategy.restore("/tmp/nowhere"))
                if strategy.is_chief:
                    damaged = shutil.copytree(path, FOLDER + "/damaged")
                    os.truncate(damaged + "/ps-1-of-2.safetensors", 9000)
                    facts["damaged"] = refused(lambda: strategy.restore(damaged))
                facts["step"] = strategy.restore(path)
                workers.barrier()
                if strategy.is_chief:
                    train(range(3, 5))
                    with np.load(FOLDER + "/expected.npz") as expected:
                        for name, v in variables.items():
                            np.testing.assert_array_equal(v.numpy(), expected[name])
                    shutil.rmtree(FOLDER)
            workers.barrier()
        os.write(1, json.dumps(facts).encode() + b"\\n")
"""


def told(ended):
    assert ended.status == 0, ended.err
    facts = [json.loads(line) for line in ended.out.splitlines()]
    return {(one["host"], one["job"]): one for one in facts}


def test_servers_and_workers_that_do_not_see_the_folder(jobs):
    script = jobs.script(SCRIPT)
    nodes = dict.fromkeys(["node1", "node2"], 1)
    found = told(jobs.ranks(nodes, [*script, "2", "save"], count=4))
    # The second ps is on node2, which has no such folder.
    assert sorted(found) == [(n, job) for n in ("node1", "node2") for job in ("ps", "worker")]
    assert found["node1", "worker"]["path"] == "/tmp/checkpoints/step-3"
    assert found["node1", "worker"]["files"] == [
        "index.json",
        "ps-0-of-2.safetensors",
        "ps-1-of-2.safetensors",
        "reader",
    ]
    for servers, count in ((2, 4), (1, 2)):
        if servers == 1:
            found = told(jobs.ranks(nodes, [*script, "2", "save"], count=4))
        # Of one ps and one worker, the worker that sees it is on node1, and so is not the ps.
        places = nodes if servers == 2 else {"node2": 1, "node1": 1}
        found = told(jobs.ranks(places, [*script, str(servers), "restore"], count=count))
        chief = found["node1", "worker"]
        assert (chief["seen"], chief["step"]) == (True, 3)
        assert "NotFoundError: '/tmp/nowhere' is not a checkpoint" in chief["nowhere"]
        assert chief["damaged"].startswith("DataLossError: cannot read '/tmp/checkpoints/damaged/")
        assert "ps-1-of-2.safetensors" in chief["damaged"]
        if servers == 2:
            other = found["node2", "worker"]
            assert (other["seen"], other["step"]) == (False, 3)
            # The chief has failed, or has restored another checkpoint meanwhile.
            assert other["nowhere"].startswith(("AbortedError", "InvalidArgumentError"))
