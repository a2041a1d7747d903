"""Endpoints over mpi between hosts."""

import pytest

HEAD = """
    import os, signal, threading
    import numpy as np
    from _cases.endpoints import CASES, Service, as_bytes, ask, pattern
    from mpidist import LATER, open_endpoint
    from mpidist.mpi import world

    here = world()
    endpoint = open_endpoint()
    addresses = here.comm.allgather(str(endpoint.address))
    Service(endpoint)
"""


@pytest.mark.parametrize("places", [{"node1": 1, "node2": 1}, {"node1": 2, "node2": 1}], ids=str)
def test_cases(jobs, places):
    """Requests and replies, notices, errors, deadlines: what every transport can do."""
    source = """
    assert addresses[0].startswith("mpi://node1:"), addresses
    if here.rank == 0:
        endpoint.serve_in_thread()
    else:
        for case in CASES:
            case(endpoint, addresses[0], b"key %d" % here.rank)
        print("all", len(CASES))
    here.comm.Barrier()
    endpoint.close()
    """
    ended = jobs.ranks(places, jobs.script(HEAD + source))
    assert ended.status == 0, ended.err
    assert ended.out.count("all") == sum(places.values()) - 1


def test_all_call_all_with_big_buffers(jobs):
    source = """
    endpoint.serve_in_thread()
    size = 16 << 20
    works = [endpoint.call(a, "test/Echo", b"%d" % n, [pattern(size, n)])
             for n, a in enumerate(addresses)]
    for n, work in enumerate(works):
        reply = work.result(30)
        assert reply.body == b"%d" % n
        np.testing.assert_array_equal(as_bytes(reply.buffers[0]), pattern(size, n))
    here.comm.Barrier()
    endpoint.close()
    print("right")
    """
    places = dict.fromkeys(["node1", "node2", "node3"], 1)
    ended = jobs.ranks(places, jobs.script(HEAD + source))
    assert ended.status == 0, ended.err
    assert ended.out.count("right") == 3


@pytest.mark.parametrize(
    ("end", "shown"),
    [
        ("os.kill(os.getpid(), signal.SIGKILL)", None),
        ("raise ValueError('no luck')", "rank 1 on node2 ends the job: ValueError: no luck"),
    ],
    ids=["killed", "raised"],
)
def test_a_rank_that_is_lost_while_it_serves_ends_the_job(jobs, end, shown):
    source = f"""
    def fail():
        {end}

    kept = []

    def end(request):
        kept.append(request)
        threading.Thread(target=fail).start()
        return LATER

    endpoint.register("end", {{"End": end}})
    if here.rank == 0:
        endpoint.call(addresses[1], "end/End").wait()
    else:
        endpoint.serve_in_thread()
        here.comm.Barrier()
    """
    ended = jobs.ranks({"node1": 1, "node2": 1}, jobs.script(HEAD + source), timeout_s=30)
    assert ended.status != 0, ended.err
    # Under Open MPI's own launcher a rank that notices may be faster than the news of the death.
    reasons = ["signal 9 (Killed)", "Socket closed"] if jobs.open_mpi else ["EXIT CODE: 9"]
    said = " ".join((ended.out + ended.err).split())
    assert any(reason in said for reason in ([shown] if shown else reasons)), said
