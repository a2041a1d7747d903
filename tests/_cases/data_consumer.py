"""A consumer with a dispatcher and workers that the test controls by hand."""

import queue
import threading
from concurrent.futures import ThreadPoolExecutor

from dataservice import Dataset
from dataservice.options import JobOptions
from dataservice.payload import pack_elements
from dataservice.proto import dataservice_pb2 as pb
from dataservice.read.distributed import Registration
from dataservice.read.fetcher import Fetcher
from mpidist import LATER, Reply, open_endpoint

LIMIT_S = 10


class Script:
    """A dispatcher and a worker that hold a consumer's calls until the test answers.

    Args:
        consumption: Consumption mode of the job.
        tasks: The initial tasks: task id to part.
        consumers: Number of consumers. The consumer under test is the first.
        begin: Number of used elements, by part.
        others: Other options of the consumer.
    """

    def __init__(self, consumption=pb.FIRST_COME, tasks=None, consumers=1, begin=None, **others):
        self.lease_s = 1000.0
        self.server = open_endpoint("inproc")
        self._calls = {}
        self._kept = []
        for service, methods in {
            "dispatcher": ("ClientHeartbeat", "ReleaseClient"),
            "data_worker": ("GetElement",),
        }.items():
            handlers = dict.fromkeys(methods, self._take)
            if service == "dispatcher":
                handlers["GetOrRegisterDataset"] = self._register
                handlers["GetOrCreateIteration"] = self._join
            self.server.register(service, handlers)
            self._calls |= {f"{service}/{method}": queue.Queue() for method in methods}
        self.server.serve_in_thread()
        self.address = str(self.server.address)
        self._tasks = {1: 0} if tasks is None else tasks
        if consumption == pb.DETERMINISTIC:
            others |= {"num_consumers": consumers, "consumer_index": 0, "deterministic": True}
            others |= {"num_shards": 2}
        options = JobOptions(
            "distributed_epoch",
            self.address,
            None if consumption == pb.EXCLUSIVE else "job",
            **{"start_timeout_s": 30} | others,
        )
        assert options.job.consumption == consumption
        request = pb.IterationRequest(terms=options.job)
        for part, start in (begin or {}).items():
            request.state.parts.add(part=part, start=start)
        self.fetcher = Fetcher(
            open_endpoint("inproc"),
            "a job",
            Registration(Dataset.range(1).node).dataset_id,
            options,
            request,
            indexed=True,
        )
        self.buffer = self.fetcher.buffer
        self.thread = self.fetcher.thread
        self._user = ThreadPoolExecutor(1)

    def _take(self, request):
        self._kept.append(request)  # a dropped request is answered with an error
        self._calls[request.method].put(request)
        return Reply() if request.method == "dispatcher/ReleaseClient" else LATER

    def _register(self, request):
        return Reply(pb.RegisterDatasetReply(dataset_id=1).SerializeToString())

    def _join(self, request):
        state = self.state(self._tasks)
        reply = pb.IterationReply(client_id=1, state=state, lease_s=self.lease_s)
        return Reply(reply.SerializeToString())

    def state(self, tasks, **others):
        addresses = [
            pb.TaskAddress(task_id=task, worker=self.address, part=part)
            for task, part in dict(tasks).items()
        ]
        return pb.IterationState(tasks=addresses, version=1, **others)

    # The dispatcher

    def heartbeat(self, limit_s=LIMIT_S):
        """Return the consumer's next heartbeat: the request and its message."""
        request = self._calls["dispatcher/ClientHeartbeat"].get(timeout=limit_s)
        return request, pb.ClientRequest.FromString(request.body)

    def tell(self, heartbeat, tasks, **others):
        heartbeat.reply(self.state(tasks, **others).SerializeToString())

    def beat(self, tasks, **others):
        """Answer the next heartbeat and return its message."""
        request, body = self.heartbeat()
        self.tell(request, tasks, **others)
        return body

    def beat_at_end(self, tasks, **others):
        """Answer heartbeats up to the first heartbeat with ``at_end`` set.

        The options go into the answer to that heartbeat only.
        """
        while not (heartbeat := self.heartbeat())[1].at_end:
            self.tell(heartbeat[0], tasks)
        self.tell(heartbeat[0], tasks, **others)

    def left(self):
        """Return the message with which the consumer leaves."""
        request = self._calls["dispatcher/ReleaseClient"].get(timeout=LIMIT_S)
        return pb.ClientRequest.FromString(request.body)

    # The workers

    def asked(self, task=None):
        """Return the consumer's next request for elements, of one task or of any task."""
        while True:
            request = self._calls["data_worker/GetElement"].get(timeout=LIMIT_S)
            body = pb.GetElementRequest.FromString(request.body)
            if task in (None, body.task_id):
                return request, body

    def give(self, request, elements, first=0, stop=None, end=False, **others):
        parcel = pack_elements(elements)
        stop = first + len(elements) if stop is None else stop
        body = pb.GetElementReply(
            count=len(elements),
            pickle=parcel.pickle if elements else b"",
            first=first,
            stop=stop,
            end=end,
            **others,
        )
        request.reply(body.SerializeToString(), parcel.buffers)

    def nothing_asked(self):
        return self._calls["data_worker/GetElement"].empty()

    # The user

    def next(self):
        limit = threading.Timer(LIMIT_S, self.buffer.finish, [TimeoutError("nothing comes")])
        limit.start()
        try:
            return self.buffer.next()
        finally:
            limit.cancel()

    def next_later(self):
        """Request the next element on another thread and return a future."""
        return self._user.submit(self.next)

    def read(self, count):
        return [self.next() for _ in range(count)]

    def close(self):
        self.buffer.close()
        self._user.shutdown()
        self.thread.join(LIMIT_S)
        assert not self.thread.is_alive()
        self.server.close()


def bounds(ranges):
    """Return the bounds of ranges by part."""
    return {each.part: list(each.bounds) for each in ranges}
