"""Time pulls and pushes against memcpy, and against TensorFlow's ps if it is installed.

    mpidist run --ps 1 --worker 1 scripts/bench_ps.py [--json results.json]

A pull reads a float32 variable into an array. A push sends a gradient and waits for the update.
Every time is a median, in microseconds a call. The sides take turns in one run, and each turn
starts with an untimed call.

"of memcpy" is the time of memcpy over ours. "ratio" is the time of TensorFlow over ours. Adam moves
28 bytes an element and memcpy moves 8, so "of bound" is 3.5 times the time of memcpy over ours.
"two under way" is the time of a push if each push is sent before the wait for the previous push.
"round trips" is the time of a push over the time of an empty call to the ps. A step of a model of
many small variables pulls all variables, or pushes a gradient of each variable. Rows of a table are
compared with NumPy's take and subtract.at in this process.
"""

import argparse
import os
import socket
import subprocess
import sys

import numpy as np
from _bench import alternate, report, size_text

import mpidist
from mpidist.cluster_resolver import MPIClusterResolver
from strategy import IndexedSlices, ParameterServerStrategy, get_variable, optimizers, read_values

MANY, EACH = 200, 1024  # small variables of a model, and bytes of each variable
SIZES = [8, 512, 32 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20]


def main():
    """Run the ps, or measure on the first worker."""
    if "--tensorflow-ps" in sys.argv:
        serve_tensorflow([int(port) for port in sys.argv[-2:]])
        return
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", help="file to write the figures to")
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--largest", type=int, default=SIZES[-1], help="bytes")
    parser.add_argument("--transport", default="auto", choices=("auto", "shared", "rma", "p2p"))
    parser.add_argument("--nan", default="error", choices=("error", "pass"), help="look for NaN")
    parser.add_argument("--no-tensorflow", action="store_true")
    args = parser.parse_args()
    resolver = MPIClusterResolver(jobs={"ps": 1, "worker": -1})
    with mpidist.Server(
        resolver.cluster_spec(), job_name=resolver.task_type, task_index=resolver.task_id
    ) as server:
        if resolver.task_type == "ps":
            server.endpoint.register("bench", {"Nothing": lambda request: None})
            server.join()
        elif resolver.task_id == 0:
            compare(args, server)


def compare(args, server):
    """Measure all tables and report them."""
    strategy = ParameterServerStrategy(transport=args.transport, nan=args.nan)
    sgd, adam = optimizers.SGD(1e-3), optimizers.Adam(1e-3)
    peer = None if args.no_tensorflow else TensorFlow.start()
    pulls, pushes, adams, several = [], [], [], []
    address = server.task_address("ps", 0)

    def call():
        server.endpoint.call(address, "bench/Nothing").wait()

    for nbytes in [size for size in SIZES if size <= args.largest]:
        with strategy.scope():
            variable = get_variable(f"v{nbytes}", nbytes // 4, initializer="zeros")
        pull, push = our_sides(variable, sgd)
        _, push_adam = our_sides(variable, adam)
        copy = copy_of(nbytes)
        pull_sides, push_sides = {"ours": pull, "memcpy": copy}, {"ours": push, "memcpy": copy}
        if peer is not None:
            pull_sides["tensorflow"], push_sides["tensorflow"] = peer.sides(nbytes)
        pulls.append(row(nbytes, alternate(pull_sides, args.rounds, 0.02, warm=pull_sides)))
        pushes.append(row(nbytes, alternate(push_sides, args.rounds, 0.02, warm=push_sides)))
        sides = {"alone": push, "two": two_under_way(variable, sgd), "memcpy": copy, "call": call}
        several.append(row_of_several(nbytes, alternate(sides, args.rounds, 0.02, warm=sides)))
        adam_sides = {"ours": push_adam, "memcpy": copy}
        times = alternate(adam_sides, args.rounds, 0.02, warm=adam_sides)
        adams.append([*row(nbytes, times)[:3], 3.5 * times["memcpy"] / times["ours"]])
    many = many_variables(strategy, {"SGD": sgd, "Adam": adam}, peer, args.rounds)
    if peer is not None:
        peer.stop()
    columns = ["size", "mpidist us", "memcpy us", "of memcpy", "tensorflow us", "ratio"]
    for title, rows in (("pull", pulls), ("push with SGD", pushes)):
        path = args.json and args.json.replace(".json", f"-{title.split()[0]}.json")
        report(title, columns, rows, {"transport": args.transport}, path)
    path = args.json and args.json.replace(".json", "-adam.json")
    facts = {"transport": args.transport}
    report("push with Adam", [*columns[:3], "of bound"], adams, facts, path)
    columns = ["size", "alone us", "two under way us", "of memcpy", "call us", "round trips alone"]
    report("several pushes with SGD", columns, several, facts, None)
    path = args.json and args.json.replace(".json", "-many.json")
    columns = ["operation", "mpidist us", "tensorflow us", "ratio"]
    report(f"{MANY} variables of {size_text(EACH)}", columns, many, facts, path)
    path = args.json and args.json.replace(".json", "-rows.json")
    columns = ["operation", "mpidist us", "NumPy us", "of NumPy"]
    report(
        "20,000 of 200,000 rows of 64",
        columns,
        rows_of_a_table(strategy, sgd, args.rounds),
        facts,
        path,
    )


def many_variables(strategy, by_name, peer, rounds):
    """Time pulls of many small variables, and pushes of a gradient of each variable."""
    with strategy.scope():
        made = [get_variable(f"many{i}", EACH // 4, initializer="zeros") for i in range(MANY)]
    gradients = [np.ones(v.shape, v.dtype) for v in made]
    pairs = list(zip(gradients, made, strict=True))

    def push_by(optimizer):
        return lambda: optimizer.apply_gradients(pairs).wait()

    sides = {"pull": lambda: read_values(made)}
    sides |= {f"push with {name}": push_by(optimizer) for name, optimizer in by_name.items()}
    others = {} if peer is None else peer.many_sides(MANY, EACH)
    rows = []
    for name, ours in sides.items():
        both = {"ours": ours} | ({"peer": others[name]} if name in others else {})
        times = alternate(both, rounds, 0.02, warm=both)
        them = times.get("peer")
        us = None if them is None else 1e6 * them
        rows.append([name, 1e6 * times["ours"], us, None if them is None else them / times["ours"]])
    return rows


def rows_of_a_table(strategy, optimizer, rounds):
    """Time sparse pulls and pushes.

    The peers are np.take, and the update by SGD of the same rows in NumPy.
    """
    random = np.random.default_rng(0)
    with strategy.scope():
        table = get_variable("table", (200_000, 64), initializer="zeros")
    ids, local = random.integers(0, len(table), 20_000), np.zeros(table.shape, np.float32)
    out, grad = np.empty((len(ids), 64), np.float32), np.ones((len(ids), 64), np.float32)
    slices = IndexedSlices(grad, ids)

    def add():
        np.subtract.at(local, ids, np.float32(1e-3) * grad)

    sides = {
        "gather": (
            lambda: table.gather(ids, out),
            lambda: np.take(local, ids, axis=0, out=out, mode="clip"),
        ),
        "push": (lambda: optimizer.apply_gradients([(slices, table)]).wait(), add),
    }
    rows = []
    for name, (ours, numpy) in sides.items():
        both = {"ours": ours, "numpy": numpy}
        times = alternate(both, rounds, 0.02, warm=both)
        ratio = times["numpy"] / times["ours"]
        rows.append([name, 1e6 * times["ours"], 1e6 * times["numpy"], ratio])
    return rows


def our_sides(variable, optimizer):
    """Return functions for a pull and a push.

    The pull writes to an existing array. The push waits for the update.
    """
    out = np.empty(variable.shape, variable.dtype)
    gradient = np.ones(variable.shape, variable.dtype)
    return (
        lambda: variable.read_value(out),
        lambda: optimizer.apply_gradients([(gradient, variable)]).wait(),
    )


def two_under_way(variable, optimizer):
    """Return a function that pushes a gradient and waits for the previous push."""
    gradient, under_way = np.ones(variable.shape, variable.dtype), []

    def push():
        under_way.append(optimizer.apply_gradients([(gradient, variable)]))
        if len(under_way) > 1:
            under_way.pop(0).wait()

    return push


def row_of_several(nbytes, times):
    """Return a row of the table of pushes that overlap."""
    us = {name: 1e6 * seconds for name, seconds in times.items()}
    ratio = us["memcpy"] / us["two"]
    return [size_text(nbytes), us["alone"], us["two"], ratio, us["call"], us["alone"] / us["call"]]


def copy_of(nbytes):
    """Return a function that copies ``nbytes`` bytes inside the process."""
    source, target = np.ones(nbytes // 4, np.float32), np.empty(nbytes // 4, np.float32)
    return lambda: np.copyto(target, source)


def row(nbytes, times):
    """Return a row of a table of pulls or pushes."""
    ours, copy, peer = times["ours"], times["memcpy"], times.get("tensorflow")
    us = None if peer is None else 1e6 * peer
    ratio = None if peer is None else peer / ours
    return [size_text(nbytes), 1e6 * ours, 1e6 * copy, copy / ours, us, ratio]


class TensorFlow:
    """TensorFlow's ps in a process of its own, and a session that uses it."""

    def __init__(self, tf, process, session):
        self._tf = tf
        self._process = process
        self._session = session

    @classmethod
    def start(cls):
        """Start the ps and the session. Return None if TensorFlow is not installed."""
        os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
        try:
            import tensorflow.compat.v1 as tf
        except ImportError:
            return None
        tf.disable_eager_execution()
        ports = free_ports(2)
        command = [sys.executable, __file__, "--tensorflow-ps", *map(str, ports)]
        # Without the launcher's variables, mpidist does not initialize MPI in the process.
        environ = {k: v for k, v in os.environ.items() if not k.startswith(("PMI", "OMPI"))}
        process = subprocess.Popen(command, env=environ)
        server = tf.distribute.Server(tensorflow_cluster(ports), "worker", 0)
        return cls(tf, process, tf.Session(server.target))

    def sides(self, nbytes):
        """Return functions for a pull and a push of a variable, with NumPy arrays."""
        (pull, push) = self.many_sides(1, nbytes).values()
        return pull, push

    def many_sides(self, count, nbytes):
        """Return functions for a pull and a push of several variables in one step."""
        tf, session = self._tf, self._session
        with tf.device("/job:ps/task:0"):
            made = [tf.Variable(np.zeros(nbytes // 4, np.float32)) for _ in range(count)]
        with tf.device("/job:worker/task:0"):
            gradients = [tf.placeholder(tf.float32, [nbytes // 4]) for _ in made]
            values = [tf.identity(variable) for variable in made]
        with tf.device("/job:ps/task:0"):
            sgd = tf.train.GradientDescentOptimizer(1e-3)
            update = sgd.apply_gradients(list(zip(gradients, made, strict=True)))
        session.run([variable.initializer for variable in made])
        run_pull = session.make_callable(values)
        run_push = session.make_callable(update, gradients)
        arrays = [np.ones(nbytes // 4, np.float32)] * count
        return {"pull": run_pull, "push with SGD": lambda: run_push(*arrays)}

    def stop(self):
        """Stop the session and the ps."""
        self._session.close()
        self._process.kill()
        self._process.wait()


def serve_tensorflow(ports):
    """Run TensorFlow's ps until the process is killed."""
    import tensorflow.compat.v1 as tf

    tf.distribute.Server(tensorflow_cluster(ports), "ps", 0).join()


def tensorflow_cluster(ports):
    """Return a cluster of one ps and one worker on this host."""
    return {"ps": [f"localhost:{ports[0]}"], "worker": [f"localhost:{ports[1]}"]}


def free_ports(count):
    """Return ports that are free now."""
    sockets = [socket.socket() for _ in range(count)]
    for each in sockets:
        each.bind(("localhost", 0))
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


if __name__ == "__main__":
    main()
