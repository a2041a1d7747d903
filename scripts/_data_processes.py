"""Processes of bench_dataservice: dispatchers, workers, consumers, and TensorFlow's service.

Each process prints a line when it is ready, carries out the orders on its standard input, and ends
when the parent closes that input.
"""

import json
import os
import select
import subprocess
import sys
import time

ENDS_WITHIN_S = 20.0


class Child:
    """A process that runs a role of this file.

    The process is not an MPI rank, even if its parent is one.

    Args:
        role: Role of the process, a key of ``ROLES``.
        arguments: Arguments of the role.

    Attributes:
        ready: First line of the process, printed when the process is ready.
        pid: Process id.
    """

    def __init__(self, role, *arguments):
        # Without the launcher's variables, mpidist does not initialize MPI in the child.
        environ = {k: v for k, v in os.environ.items() if not k.startswith(("PMI", "OMPI"))}
        command = [sys.executable, __file__, role, *map(str, arguments)]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self._process = subprocess.Popen(command, env=environ, **pipes)
        self.pid = self._process.pid
        self.ready = self.hear()

    def say(self, line):
        """Send a line to the process."""
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()

    def hear(self):
        """Return the next line of the process."""
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"a process of the benchmark ended: {' '.join(self._process.args)}")
        return line.strip()

    def is_busy(self, seconds):
        """Return whether the process prints nothing for some seconds."""
        return not select.select([self._process.stdout], [], [], seconds)[0]

    def stop(self):
        """Close the input of the process and wait for its end."""
        self._process.stdin.close()
        try:
            self._process.wait(ENDS_WITHIN_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


class Service:
    """Our dispatcher and workers over tcp, each in a plain process of this host.

    Args:
        workers: Number of workers at the start.
        sockets: Whether data travels over sockets, as between hosts, and not in shared memory.

    Attributes:
        target: Address for ``distribute``.
        workers: Processes of the workers.
    """

    def __init__(self, workers=1, sockets=False):
        self._sockets = int(sockets)
        self._dispatcher = Child("dispatcher")
        self.target = self._dispatcher.ready
        self.workers = []
        self.grow(workers)

    def grow(self, count):
        """Start workers until there are ``count`` workers."""
        while len(self.workers) < count:
            self.workers.append(Child("worker", self.target, self._sockets))

    def stop(self):
        """Stop the workers and the dispatcher."""
        for child in (*self.workers, self._dispatcher):
            child.stop()


def memory_of(pid):
    """Return the resident memory of a process in MiB: private memory and shared memory."""
    with open(f"/proc/{pid}/status") as lines:
        fields = dict(line.split(":", 1) for line in lines)
    return [int(fields[name].split()[0]) / 1024 for name in ("RssAnon", "RssShmem")]


def tell(line):
    """Print a line for the parent process."""
    print(line, flush=True)


def be_dispatcher():
    """Run a dispatcher until the parent closes the standard input."""
    from dataservice import DispatchServer

    with DispatchServer(port=0, protocol="tcp") as server:
        tell(server.target)
        sys.stdin.read()


def be_worker(dispatcher, sockets):
    """Run a worker until the parent closes the standard input."""
    from dataservice import WorkerServer
    from mpidist.rpc import tcp_connection

    if int(sockets):
        tcp_connection._open_offered = lambda reference: None
    with WorkerServer(port=0, dispatcher_address=dispatcher, protocol="tcp"):
        tell("up")
        sys.stdin.read()


def be_consumer(dispatcher, content, job):
    """Read an epoch of a shared job for each line of the standard input.

    A line holds the keyword arguments of ``read`` as JSON.
    """
    from _data_contents import EPOCHS

    from dataservice import distribute

    apply = distribute("distributed_epoch", dispatcher, job_name=job)
    name, _, count = content.partition(":")
    dataset = EPOCHS[name](int(count)).apply(apply)
    tell("up")
    for line in sys.stdin:
        order = json.loads(line)
        tell(json.dumps(read(dataset, **order)))


def read(dataset, most=None, pause_s=0.0, first_pause_s=0.0):
    """Read a dataset. Return the times of the first and the last element, and their number.

    Args:
        dataset: Dataset to read.
        most: Number of elements after which to stop. By default, read the whole epoch.
        pause_s: Pause after each element.
        first_pause_s: Additional pause after the first element.
    """
    first, last, count = None, None, 0
    with iter(dataset) as elements:
        for _ in elements:
            last = time.monotonic()
            count += 1
            if first is None:
                first = last
                time.sleep(first_pause_s)
            if pause_s:
                time.sleep(pause_s)
            if count == most:
                break
    return {"first": first, "last": last, "count": count}


def be_tensorflow():
    """Run TensorFlow's dispatcher and a worker until the parent closes the input."""
    os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    from tensorflow.data.experimental import service

    dispatcher = service.DispatchServer()
    address = dispatcher.target.split("://")[1]
    worker = service.WorkerServer(service.WorkerConfig(dispatcher_address=address))
    tell(dispatcher.target)
    sys.stdin.read()
    del worker
    os._exit(0)  # TensorFlow's servers take long to end


ROLES = {
    "dispatcher": be_dispatcher,
    "worker": be_worker,
    "consumer": be_consumer,
    "tensorflow": be_tensorflow,
}

if __name__ == "__main__":
    ROLES[sys.argv[1]](*sys.argv[2:])
