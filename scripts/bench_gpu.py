"""Time copies between GPUs and hosts against bare copies of CUDA, and groups against NumPy.

    mpidist run --ps 1 --worker 2 scripts/bench_gpu.py [--json results.json]

This needs CuPy and a GPU, which all ranks may share. Every figure is a median. Times are in
microseconds a call. The sides take turns in one run. The tables are:

copies: "of bus" is the time of one asynchronous copy between pinned memory and the device over
    ours. Both times include the wait for the copy.
all_reduce: Both workers reduce arrays of NumPy and of CuPy. Arrays of CuPy are staged through the
    host, or go through the backend of a group with GPUs, with and without async_op.
a variable: The first worker pulls and pushes a variable, with arrays on the host and on the GPU.
training step: A step pulls a matrix, multiplies it for about as long as the copies take, and
    pushes. The parts run one by one, or pulls and pushes overlap with the products. "hidden" is the
    time that the overlap saves, as a share of the time of the pull and the push.
optimizers: The update rules run alone. "of bound" is the time to move their bytes at the rate of a
    copy within the device, over the time of the rule.
pushes: Pushes to variables on a GPU of the ps and on its host.
"""

import argparse

import numpy as np
from _bench import alternate, report, size_text
from _gpu_step import AT_ONCE, Steps

import mpidist
from mpidist import host_view
from mpidist.cluster_resolver import MPIClusterResolver
from mpidist.gpu import Prefetcher, cupy, device_count
from strategy import ParameterServerStrategy, get_variable, optimizers
from strategy.rules import Update, on_arrays

SIZES = [8, 32 << 10, 1 << 20, 16 << 20, 64 << 20]
STEPS = [16 << 20, 64 << 20]  # the launch dominates products of smaller matrices
LARGE = [1 << 20, 4 << 20, 16 << 20, 64 << 20, 256 << 20, 1 << 30]
KERNEL_SIZES = [1 << 20, 16 << 20, 64 << 20, 256 << 20]
LAUNCHES = 20


def main():
    """Run the ps, or measure all tables one after the other."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", help="file to write the figures to")
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--largest", type=int, default=LARGE[-1], help="bytes")
    args = parser.parse_args()
    resolver = MPIClusterResolver(jobs={"ps": 1, "worker": -1})
    spec, job, index = resolver.cluster_spec(), resolver.task_type, resolver.task_id
    with mpidist.Server(spec, job, index) as server:
        if job == "ps":
            server.join()
            return
        device_count()
        workers = server.job_group("worker")
        if index == 0:
            staging(args)
        workers.barrier()
        if workers.size() > 1:
            reducing(args, workers)
        strategy = ParameterServerStrategy()
        if index == 0:
            training(args, strategy)
            stepping(args)
            there = ParameterServerStrategy(
                parameter_devices=["/job:ps/task:0/device:GPU:0"], name="on the GPU"
            )
            optimizing(args)
            pushing(args, {"host": strategy, "GPU": there})
        workers.barrier()


def path_of(args, part):
    """Return the path of the JSON file of a part, or None."""
    return args.json and args.json.replace(".json", f"-{part}.json")


def sizes(args, of=SIZES):
    """Return the sizes up to --largest."""
    return [size for size in of if size <= args.largest]


def staging(args):
    """Time copies to and from the device against copies of CUDA alone."""
    courier, rows = Prefetcher(0), []
    for nbytes in sizes(args):
        sides = copies(courier, nbytes)
        us = {k: 1e6 * s for k, s in alternate(sides, args.rounds, 0.02).items()}
        row = [size_text(nbytes), us["to host, bus"], us["to host"]]
        row += [us["to host, bus"] / us["to host"], us["to device, bus"], us["to device"]]
        row += [us["to device, bus"] / us["to device"], us["delivered"]]
        rows.append([*row, us["to device, bus"] / us["delivered"]])
    columns = ["size", "bus us", "to host us", "of bus", "bus us", "to device us", "of bus"]
    columns += ["delivered us", "of bus"]
    report("copies", columns, rows, facts(), path_of(args, "copies"))


def copies(courier, nbytes):
    """Return the sides of one size: copies of CUDA alone, and ours."""
    package = cupy()
    runtime, stream = package.cuda.runtime, package.cuda.Stream()
    data, array = np.ones(nbytes // 4, "f4"), package.zeros(nbytes // 4, "f4")
    pinned = np.frombuffer(package.cuda.alloc_pinned_memory(nbytes), np.uint8, nbytes)
    view = host_view(array, read=False)
    np.copyto(view, data)

    def copy(target, source, kind):
        runtime.memcpyAsync(target, source, nbytes, kind, stream.ptr)
        stream.synchronize()

    def upload():
        view.upload()
        package.cuda.get_current_stream().synchronize()

    def send():
        courier.send([data]).hand_over()
        package.cuda.get_current_stream().synchronize()

    here, there = pinned.ctypes.data, array.data.ptr
    return {
        "to host, bus": lambda: copy(here, there, runtime.memcpyDeviceToHost),
        "to host": lambda: host_view(array),
        "to device, bus": lambda: copy(there, here, runtime.memcpyHostToDevice),
        "to device": upload,
        "delivered": send,
    }


def reducing(args, workers):
    """Time all_reduce of arrays on the host and on the GPU, staged and by the GPU backend."""
    package, rows = cupy(), []
    device = package.cuda.runtime.getDevice()
    on_gpus = mpidist.ProcessGroup(workers.comm.Dup(), "GPUs", device=device)
    for nbytes in sizes(args, LARGE):
        on_host, on_gpu = np.ones(nbytes // 4, "f4"), package.ones(nbytes // 4, "f4")

        def reduce_there(group, async_op=False, array=on_gpu):
            work = group.all_reduce(array, async_op=async_op)
            if async_op:
                work.wait()
            package.cuda.get_current_stream().synchronize()

        # One call a turn, so that both workers make the same number of calls.
        times = alternate(
            {
                "host": lambda a=on_host: workers.all_reduce(a),
                "staged": lambda go=reduce_there: go(workers),
                "backend": lambda go=reduce_there: go(on_gpus),
                "async": lambda go=reduce_there: go(on_gpus, async_op=True),
            },
            args.rounds,
            0,
            before=workers.barrier,
        )
        us = {name: 1e6 * seconds for name, seconds in times.items()}
        row = [size_text(nbytes), us["host"], us["staged"], us["host"] / us["staged"]]
        row += [us["backend"], us["staged"] / us["backend"], us["async"]]
        rows.append([*row, us["staged"] / us["async"]])
    if workers.rank() == 0:
        columns = [
            "size", "NumPy us", "staged us", "of NumPy", "backend us", "of staged", "async us",
            "of staged",
        ]  # fmt: skip
        about = facts() | {"gpu_rule": str(on_gpus.gpu_rule)}
        report("all_reduce", columns, rows, about, path_of(args, "all_reduce"))
    on_gpus.free()


def training(args, strategy):
    """Time pulls and pushes of a variable, with arrays on the host and on the device."""
    package, rows, sgd = cupy(), [], optimizers.SGD(1e-3)
    for nbytes in sizes(args):
        with strategy.scope():
            variable = get_variable(f"v{nbytes}", nbytes // 4, initializer="zeros", dtype="f4")
        on_host, on_gpu = np.ones(nbytes // 4, "f4"), package.ones(nbytes // 4, "f4")

        def pull(variable=variable, out=on_gpu):
            variable.read_value(out)
            package.cuda.get_current_stream().synchronize()

        sides = {
            "pull": lambda v=variable, out=on_host: v.read_value(out),
            "pull there": pull,
            "push": lambda v=variable, g=on_host: sgd.apply_gradients([(g, v)]).wait(),
            "push there": lambda v=variable, g=on_gpu: sgd.apply_gradients([(g, v)]).wait(),
        }
        us = {k: 1e6 * s for k, s in alternate(sides, args.rounds, 0.02).items()}
        row = [size_text(nbytes)]
        for name in ("pull", "push"):
            row += [us[name], us[f"{name} there"], us[name] / us[f"{name} there"]]
        rows.append(row)
    columns = ["size", "pull us", "to GPU us", "of host", "push us", "from GPU us", "of host"]
    report("a variable", columns, rows, facts(), path_of(args, "variable"))


def stepping(args):
    """Time training steps whose copies wait for the computation or overlap with it."""
    rows = []
    with ParameterServerStrategy(num_gpus_per_worker=1, name="steps") as strategy:
        for nbytes in sizes(args, STEPS) or [args.largest]:
            steps = Steps(strategy, nbytes)
            times = alternate(steps.sides(), min(args.rounds, 5), 0.02)  # steps take long
            us = {side: 1e6 * seconds for side, seconds in times.items()}
            us["overlapped"] /= AT_ONCE
            hidden = (us["one by one"] - us["overlapped"]) / (us["pull"] + us["push"])
            rows.append([size_text(nbytes), steps.products, *us.values(), hidden])
    columns = ["size", "products", *(f"{side} us" for side in us), "hidden"]
    report("training step", columns, rows, facts(), path_of(args, "step"))


def optimizing(args):
    """Measure the update rules of optimizers against a copy within the device."""
    rows = []
    for nbytes in [size for size in KERNEL_SIZES if size <= 4 * args.largest]:
        source, target = (cupy().zeros(nbytes // 4, "f4") for _ in range(2))
        sides = {"copy": copy_within(target, source)}
        moved = {"copy": 2 * nbytes}
        for kind, optimizer in (("SGD", optimizers.SGD(1e-3)), ("Adam", optimizers.Adam(1e-3))):
            sides[kind], arrays = rule_side(optimizer, target, source)
            moved[kind] = (2 * arrays - 1) * nbytes  # reads all, writes all but the gradient
        rates = {}
        for _ in range(args.rounds):
            for name, launch in sides.items():
                rates.setdefault(name, []).append(moved[name] / device_seconds(launch) / 1e9)
        median = {name: float(np.median(found)) for name, found in rates.items()}
        row = [size_text(nbytes), median["copy"]]
        for kind in ("SGD", "Adam"):
            row += [median[kind], median[kind] / median["copy"]]
        rows.append(row)
    columns = ["size", "copy GB/s", "SGD GB/s", "of bound", "Adam GB/s", "of bound"]
    report("optimizers on a GPU", columns, rows, facts(), path_of(args, "optimizers"))


def copy_within(target, source):
    """Return a function that starts a copy of an array within the device."""
    runtime = cupy().cuda.runtime
    places = (target.data.ptr, source.data.ptr, source.nbytes, runtime.memcpyDeviceToDevice)
    return lambda: runtime.memcpyAsync(*places, _stream().ptr)


def rule_side(optimizer, param, grad):
    """Return a function that starts an update by an optimizer, and the number of arrays."""
    apply, numbers = on_arrays(optimizer.formula()), optimizer.numbers(1e-3, 1)
    slots = [cupy().zeros(param.size, "f4") for _ in optimizer.slots()]
    return lambda: apply(Update(param, grad, slots, numbers)), 2 + len(slots)


def device_seconds(launch):
    """Return the time of one launch on the device.

    The launches are queued while the device is busy, so the time to queue them does not count.
    """
    package = cupy()
    busy = package.zeros(64 << 20, "f4")
    begin, end = package.cuda.Event(), package.cuda.Event()
    for _ in range(16):  # longer than it takes to queue the launches
        busy.fill(1)
    begin.record(_stream())
    for _ in range(LAUNCHES):
        launch()
    end.record(_stream())
    end.synchronize()
    return package.cuda.get_elapsed_time(begin, end) / LAUNCHES / 1e3


def _stream():
    return cupy().cuda.get_current_stream()


def pushing(args, strategies):
    """Time pushes from the host to variables on the host and on a GPU of the ps."""
    rows = []
    kinds = {"SGD": optimizers.SGD(1e-3, momentum=0.9), "Adam": optimizers.Adam(1e-3)}
    for nbytes in sizes(args):
        grad, sides = np.ones(nbytes // 4, "f4"), {}
        for place, strategy in strategies.items():
            with strategy.scope():
                variable = get_variable(f"{place} {nbytes}", nbytes // 4, "f4", "zeros")
            for kind, optimizer in kinds.items():
                sides[kind, place] = lambda o=optimizer, v=variable, g=grad: o.apply_gradients(
                    [(g, v)]
                ).wait()
        us = {side: 1e6 * s for side, s in alternate(sides, args.rounds, 0.02).items()}
        row = [size_text(nbytes)]
        for kind in kinds:
            host, there = us[kind, "host"], us[kind, "GPU"]
            row += [host, there, host / there]
        rows.append(row)
    columns = ["size", "SGD us", "on GPU us", "of host", "Adam us", "on GPU us", "of host"]
    report("pushes to a ps", columns, rows, facts(), path_of(args, "pushes"))


def facts():
    """Return the name of the device and the version of CuPy."""
    package = cupy()
    properties = package.cuda.runtime.getDeviceProperties(0)
    return {"device": properties["name"].decode(), "cupy": package.__version__}


if __name__ == "__main__":
    main()
