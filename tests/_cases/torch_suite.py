"""Run torch's own tests of process groups on the ranks of an MPI job, with our backend.

    mpidist run -n 3 tests/_cases/torch_suite.py RESULTS.json [REGULAR_EXPRESSION]

The tests are ``DistributedTest`` of torch.testing, which torch runs for its backends gloo and nccl.
Here they see a backend that is equal to "mpidist", "gloo" and "mpi", so the tests that torch opens
for one of these by name run, too. Rank 0 writes the result and the reason of each test.
"""

import json
import os
import re
import shutil
import sys
import tempfile
import types
import unittest
import warnings
from datetime import timedelta
from pathlib import Path

LIMIT_S = 20  # time limit of each operation
NEEDS_GPU = "needs a GPU"
# Tests that cannot pass here, and the reasons.
IMPOSSIBLE = {
    "test_SyncBatchNorm_process_group": "needs torchvision",
    "test_all_to_all_cuda": NEEDS_GPU,
    "test_all_to_all_cuda_complex": NEEDS_GPU,
    "test_all_to_all_full_group_cuda": NEEDS_GPU,
    "test_all_to_all_group_cuda": NEEDS_GPU,
    "test_batch_isend_irecv_mixed_backend_err": "needs NCCL",
    "test_batch_isend_irecv_op_err": NEEDS_GPU,
    "test_new_subgroups_with_group_param": "needs 4 ranks",
}
# Before 2.14, monitored_barrier of torch.distributed refuses every backend but gloo.
IMPOSSIBLE_BEFORE_2_14 = {
    f"test_monitored_barrier_{name}": "torch calls gloo only"
    for name in ("failure_order", "gloo", "gloo_subgroup", "wait_all_ranks")
}


class AnyName(str):
    """The name of our backend, equal to "gloo" and "mpi" as well."""

    __slots__ = ()

    def __eq__(self, other):
        return str(other) in ("mpidist", "gloo", "mpi")

    def __ne__(self, other):
        return not self == other

    def __hash__(self):
        return hash("gloo")  # finds "gloo" in torch's sets of backends


def load_suite():
    """Import torch's module of tests with another name of the backend. Return it."""
    import torch.testing._internal.distributed as package
    from torch.testing._internal.common_distributed import DistTestCases

    path = Path(package.__path__[0], "distributed_test.py")
    source = path.read_text()
    line = 'BACKEND = os.environ["BACKEND"]'
    assert line in source
    module = types.ModuleType("torch.testing._internal.distributed.distributed_test")
    module.__file__ = str(path)
    vars(module)["any_name"] = AnyName("mpidist")
    sys.modules[module.__name__] = module
    DistTestCases.backend_feature["plugin"].add("mpidist")  # read while the module is executed
    exec(compile(source.replace(line, "BACKEND = any_name", 1), path, "exec"), vars(module))
    os.environ["BACKEND"] = "mpi"  # torch runs tests of groups of 2 on 3 ranks for "mpi" only
    return module


def make_case(module, comm, folder):
    """Return the class of tests for this rank."""
    import torch.distributed as dist
    from torch.testing._internal.common_distributed import TEST_SKIPS
    from torch.testing._internal.common_utils import TestCase

    reasons = {skip.exit_code: skip.message for skip in TEST_SKIPS.values()}

    class Case(TestCase, module.DistributedTest._DistTestBase):
        rank = comm.rank
        world_size = str(comm.size)
        init_method = "env://"

        def setUp(self):
            super().setUp()
            own = comm.bcast(tempfile.mkdtemp(dir=folder) if comm.rank == 0 else None)
            os.environ["TEMP_DIR"] = own
            if comm.rank == 0:
                for name in ("barrier", "test_dir", "init_dir"):
                    Path(own, name).mkdir()
            module.Barrier.barrier_id = 0
            self.file_name = str(Path(own, "file"))
            comm.Barrier()
            limit = min(module.CUSTOM_PG_TIMEOUT.get(self._testMethodName, LIMIT_S), LIMIT_S)
            dist.init_process_group("mpidist", timeout=timedelta(seconds=limit))

        def tearDown(self):
            if dist.is_initialized():
                dist.destroy_process_group()
            super().tearDown()

        def _callTestMethod(self, method):
            try:
                super()._callTestMethod(method)
            except SystemExit as end:
                if end.code not in reasons:
                    raise
                self.skipTest(reasons[end.code])

    return Case


def run(case, comm, name):
    """Collective. Run a test on all ranks. Return its result and the reason."""
    result = unittest.TestResult()
    case(name).run(result)
    problems = result.errors + result.failures
    own = "failed" if problems else "skipped" if result.skipped else "passed"
    reason = problems[0][1] if problems else result.skipped[0][1] if result.skipped else ""
    everyones = comm.allgather((own, reason))
    for outcome in ("failed", "passed", "skipped"):
        found = [reason for each, reason in everyones if each == outcome]
        if found:
            return outcome, found[0]
    raise AssertionError(everyones)


def main(path, pattern=""):
    """Run the tests and write the results."""
    from mpi4py import MPI

    import mpidist

    warnings.simplefilter("ignore")
    mpidist.init_process_group()
    comm = MPI.COMM_WORLD.Dup()
    folder = comm.bcast(tempfile.mkdtemp() if comm.rank == 0 else None)
    os.environ.update(
        BACKEND="mpidist", WORLD_SIZE=str(comm.size), RANK=str(comm.rank), TEMP_DIR=folder
    )
    import torch

    import mpidist.torch

    version = tuple(map(int, torch.__version__.split(".")[:2]))
    impossible = IMPOSSIBLE | (IMPOSSIBLE_BEFORE_2_14 if version < (2, 14) else {})
    case = make_case(load_suite(), comm, folder)
    results = {}
    for name in sorted(name for name in dir(case) if name.startswith("test")):
        if re.search(pattern, name):
            reason = impossible.get(name)
            results[name] = ("skipped", reason) if reason else run(case, comm, name)
    if comm.rank == 0:
        Path(path).write_text(json.dumps(results, indent=1))
        shutil.rmtree(folder)


if __name__ == "__main__":
    main(*sys.argv[1:])
