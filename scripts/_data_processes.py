"""The processes that bench_dataservice starts: dispatchers, workers, consumers, TensorFlow's.

Each says when it is ready, does what it is told in lines, and ends when nobody talks to it.
"""

import json
import os
import select
import subprocess
import sys
import time

ENDS_WITHIN_S = 20.0


class Child:
    """A process of this file: not a rank, even where this process is one.

    Args:
        role: What it is to be: a key of ``ROLES``.
        arguments: For the role.

    Attributes:
        ready: What it said when it was ready.
        pid: Its process id.
    """

    def __init__(self, role, *arguments):
        # Without the launcher's variables it does not look for MPI.
        environ = {k: v for k, v in os.environ.items() if not k.startswith(("PMI", "OMPI"))}
        command = [sys.executable, __file__, role, *map(str, arguments)]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self._process = subprocess.Popen(command, env=environ, **pipes)
        self.pid = self._process.pid
        self.ready = self.hear()

    def say(self, line):
        """Tell it something."""
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()

    def hear(self):
        """Its next line."""
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"a process of the benchmark ended: {' '.join(self._process.args)}")
        return line.strip()

    def is_busy(self, seconds):
        """Whether it says nothing for so long."""
        return not select.select([self._process.stdout], [], [], seconds)[0]

    def stop(self):
        """Let it end."""
        self._process.stdin.close()
        try:
            self._process.wait(ENDS_WITHIN_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


class Service:
    """Our dispatcher and workers over tcp, each a plain process of this host.

    Args:
        workers: How many to start with.
        sockets: Whether they share no memory with others, as between hosts.

    Attributes:
        target: For ``distribute``.
        workers: The processes.
    """

    def __init__(self, workers=1, sockets=False):
        self._sockets = int(sockets)
        self._dispatcher = Child("dispatcher")
        self.target = self._dispatcher.ready
        self.workers = []
        self.grow(workers)

    def grow(self, count):
        """Start workers until there are so many."""
        while len(self.workers) < count:
            self.workers.append(Child("worker", self.target, self._sockets))

    def stop(self):
        """End all."""
        for child in (*self.workers, self._dispatcher):
            child.stop()


def memory_of(pid):
    """MiB of a process in RAM: its own memory, and what it sees of shared memory."""
    with open(f"/proc/{pid}/status") as lines:
        fields = dict(line.split(":", 1) for line in lines)
    return [int(fields[name].split()[0]) / 1024 for name in ("RssAnon", "RssShmem")]


def tell(line):
    """Say a line to who started this process."""
    print(line, flush=True)


def be_dispatcher():
    """Serve until nobody talks to us."""
    from dataservice import DispatchServer

    with DispatchServer(port=0, protocol="tcp") as server:
        tell(server.target)
        sys.stdin.read()


def be_worker(dispatcher, sockets):
    """Serve until nobody talks to us."""
    from dataservice import WorkerServer
    from mpidist.rpc import tcp_connection

    if int(sockets):
        tcp_connection._open_offered = lambda reference: None
    with WorkerServer(port=0, dispatcher_address=dispatcher, protocol="tcp"):
        tell("up")
        sys.stdin.read()


def be_consumer(dispatcher, content, job):
    """Read an epoch of a shared job at each line, or slowly as many elements as it says."""
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
    """When the first and the last element came, and how many."""
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
    """TensorFlow's dispatcher, and a worker beside it."""
    os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    from tensorflow.data.experimental import service

    dispatcher = service.DispatchServer()
    address = dispatcher.target.split("://")[1]
    worker = service.WorkerServer(service.WorkerConfig(dispatcher_address=address))
    tell(dispatcher.target)
    sys.stdin.read()
    del worker
    os._exit(0)  # its servers take long to end


ROLES = {
    "dispatcher": be_dispatcher,
    "worker": be_worker,
    "consumer": be_consumer,
    "tensorflow": be_tensorflow,
}

if __name__ == "__main__":
    ROLES[sys.argv[1]](*sys.argv[2:])
