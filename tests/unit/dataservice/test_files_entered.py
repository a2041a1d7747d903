"""The number of files of dataservice that a reader of one element's path has to open."""

import sys
import threading
from collections import Counter
from pathlib import Path

import dataservice
from dataservice import Dataset, DispatchServer, WorkerServer, distribute

ROOT = str(Path(dataservice.__file__).parent)
ELEMENTS = 200


class Entered:
    """Counter of calls by file, on this thread and on threads that begin later."""

    def __init__(self):
        self.calls = Counter()
        self.counts = False

    def __enter__(self):
        threading.setprofile(self._profile)
        sys.setprofile(self._profile)
        return self

    def __exit__(self, *exc_info):
        self.counts = False
        sys.setprofile(None)
        threading.setprofile(None)

    def _profile(self, frame, event, _):
        file = frame.f_code.co_filename
        if self.counts and event == "call" and file.startswith(ROOT):
            self.calls[file.removeprefix(ROOT)] += 1


def test_an_element_enters_few_files():
    with Entered() as entered, DispatchServer(port=0, protocol="inproc") as dispatcher:
        target = dispatcher.target
        with WorkerServer(port=0, dispatcher_address=target, protocol="inproc"):
            entered.counts = True
            apply = distribute("distributed_epoch", target, max_outstanding_requests=1)
            dataset = Dataset.range(20_000).map(lambda x: x + 1).batch(4).apply(apply)
            with iter(dataset) as elements:
                next(elements)
                entered.counts = False
                until_first = sorted(entered.calls)
                entered.calls.clear()
                for _ in range(20):  # until all are in step
                    next(elements)
                entered.counts = True
                for _ in range(ELEMENTS):
                    next(elements)
                entered.counts = False
    often = sorted(file for file, calls in entered.calls.items() if calls >= ELEMENTS / 2)
    assert "/work/task.py" in often
    assert len(often) <= 12, often
    assert len(until_first) <= 25, until_first
