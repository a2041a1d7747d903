"""The number of files that a push enters."""

import contextlib
import sys
from pathlib import Path

import numpy as np
from _cases.servers import Cluster, variable

import strategy
from strategy import optimizers

ROOT = Path(strategy.__file__).parent


@contextlib.contextmanager
def files_entered(found):
    """Add the files of strategy whose functions this thread calls in the block."""

    def profile(frame, event, _):
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(ROOT):
            found.add(str(path.relative_to(ROOT)))

    sys.setprofile(profile)
    try:
        yield
    finally:
        sys.setprofile(None)


def test_a_push_enters_few_files():
    worker, server = set(), set()
    with contextlib.ExitStack() as stack:
        cluster = Cluster(stack)
        v = variable(cluster.worker(0), "v", 3)
        handlers = cluster.servers[0].endpoint._handlers
        push, sgd, gradient = handlers["ps/Push"], optimizers.SGD(1.0), np.ones(3)

        def handle(request):
            with files_entered(server):
                return push(request)

        sgd.apply_gradients([(gradient, v)]).wait()  # the first one registers the optimizer
        handlers["ps/Push"] = handle
        with files_entered(worker):
            sgd.apply_gradients([(gradient, v)]).wait()
    assert len(worker) <= 6, sorted(worker)
    # In one process, the reply runs the callbacks of the worker on the thread of the server.
    server -= {"client/connection.py", "gradients.py", "variable.py"}
    assert "server/pushes.py" in server
    assert len(server) <= 6, sorted(server)
