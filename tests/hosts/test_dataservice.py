"""The data service over tcp between processes of different hosts."""

SECRET = {"MPIDIST_SECRET": "a secret"}
LIMIT_S = 60

DISPATCHER = """
    import sys
    from dataservice import DispatchServer

    with DispatchServer(port=0, protocol="tcp") as dispatcher:
        print(dispatcher.target, flush=True)
        sys.stdin.readline()
"""
WORKER = """
    import sys
    from dataservice import WorkerServer

    with WorkerServer(port=0, dispatcher_address=sys.argv[1], protocol="tcp"):
        print("up", flush=True)
        sys.stdin.readline()
"""
CONSUMER = """
    import sys
    import numpy as np
    from dataservice import Dataset, distribute

    def square(x):
        return np.full(20_000, x * x)

    dataset = Dataset.range(200).map(square).batch(5)
    dataset = dataset.apply(distribute("distributed_epoch", sys.argv[1], job_name="job"))
    for _ in range(2):
        seen = []
        for batch in dataset:
            np.testing.assert_array_equal(batch, np.repeat(batch[:, :1], 20_000, axis=1))
            seen += batch[:, 0].tolist()
        print(*map(int, seen), flush=True)
"""


def end(process):
    out, _ = process.communicate("end\n", timeout=LIMIT_S)
    assert process.returncode == 0
    return out.splitlines()


def test_every_element_once(start):
    dispatcher = start("node1", DISPATCHER, env=SECRET)
    target = dispatcher.stdout.readline().strip()
    assert target.startswith("tcp://node1:")
    workers = [start(node, WORKER, target, env=SECRET) for node in ("node2", "node3")]
    assert [worker.stdout.readline() for worker in workers] == ["up\n"] * 2
    consumers = [start(node, CONSUMER, target, env=SECRET) for node in ("node3", "node1")]
    for epoch in zip(*map(end, consumers), strict=True):
        seen = [int(word) for line in epoch for word in line.split()]
        assert sorted(seen) == [x * x for x in range(200)]
    for process in (*workers, dispatcher):
        assert end(process) == []
