"""A registry for tests that act as the dispatcher, the workers and the consumers."""

from dataservice.dispatch.messages import iteration_response
from dataservice.dispatch.records import Timeouts
from dataservice.dispatch.registry import Registry
from dataservice.proto import dataservice_pb2 as pb

TIMEOUTS = Timeouts(worker_s=10, client_s=20, iteration_s=30)
TRAINER = "trainer/1-a"


def address_of(number):
    return f"inproc://localhost:{number}"


def terms_of(policy=pb.DYNAMIC, consumption=None, **others):
    """Return terms as ``distribute`` creates them."""
    terms = pb.Terms(policy=policy, consumption=consumption or pb.EXCLUSIVE, **others)
    if terms.consumption == pb.EXCLUSIVE:
        terms.num_consumers = 1
    return terms


def ranges(**bounds):
    """Return ranges of parts: ``p0=[0, 3]`` means elements 0 to 2 of part 0."""
    return [pb.Ranges(part=int(name[1:]), bounds=each) for name, each in bounds.items()]


class Play:
    """A registry with short methods for its calls.

    Attributes:
        registry: The registry.
        dataset: A registered dataset.
        workers: The initial workers, in the order of their ports, from 1.
    """

    def __init__(self, workers=0, length=10, addresses=(), registry=None):
        self.registry = registry or Registry(TIMEOUTS, worker_addresses=addresses)
        self.dataset = self.add_dataset("range", length)
        self.workers = [self.add_worker(number) for number in range(1, workers + 1)]

    def add_dataset(self, summary, length=10, digest=None, **others):
        request = pb.RegisterDatasetRequest(
            digest=digest or summary.encode(),
            identity=summary.encode(),
            summary=summary,
            source_length=length,
            **others,
        )
        return self.registry.datasets.register(request)

    def add_worker(self, number, process="data/2-b", tags=(), now=0.0):
        return self.registry.register_worker(address_of(number), process, tags, now)

    def join(self, terms=None, name="", **others):
        """Register a client. Other arguments are fields of pb.IterationRequest."""
        now = others.pop("now", 0.0)
        request = pb.IterationRequest(
            dataset_id=others.pop("dataset", self.dataset).id,
            terms=terms or terms_of(),
            job_name=name,
            process=others.pop("process", TRAINER),
            **others,
        )
        return self.registry.join(request, 1, now)

    def join_shared(self, policy=pb.DYNAMIC, name="job", delivery=pb.EXACTLY_ONCE, **others):
        return self.join(terms_of(policy, pb.FIRST_COME, delivery=delivery), name, **others)

    def join_ordered(self, index=0, consumers=1, shards=2, **others):
        terms = terms_of(
            consumption=others.pop("consumption", pb.DETERMINISTIC),
            num_consumers=consumers,
            num_shards=shards,
        )
        return self.join(terms, "job", consumer_index=index, **others)

    def beat(self, client, now=0.0, **report):
        """Send a client's heartbeat and return the response."""
        request = pb.ClientRequest(client_id=client.id, **report)
        return iteration_response(self.registry.heartbeat_client(request, now))

    def leave(self, client, now=0.0, **report):
        self.registry.release_client(pb.ClientRequest(client_id=client.id, **report), now)
        return self.registry.take_outcome()

    def lose(self, worker):
        self.registry.unregister_worker(worker.id)

    def start(self, client):
        """Start all tasks of a client and return their ids."""
        told = self.beat(client).tasks
        for task in told:
            self.registry.start_task(task.task_id)
        return [task.task_id for task in told]

    def take_all(self, task_id, length=10):
        """Return the source indices that a task gets in its first pass over ``length`` indices."""
        self.registry.start_task(task_id)
        taken = []
        while (split := self.registry.next_split(task_id, len(taken))).start < length:
            taken += split
        return taken

    def progress(self, worker, task_id, index, now=0.0, **checkpoint):
        """Send a worker's heartbeat with a checkpoint and return the response."""
        progress = pb.TaskProgress(
            task_id=task_id, checkpoint=pb.Checkpoint(index=index, state=b"s", **checkpoint)
        )
        request = pb.WorkerRequest(worker_id=worker.id, task_ids=[task_id], progress=[progress])
        return self.registry.heartbeat_worker(request, now)

    def heartbeat(self, worker, now, tasks=()):
        request = pb.WorkerRequest(worker_id=worker.id, task_ids=tasks)
        return self.registry.heartbeat_worker(request, now)


def places(told):
    """Return the part and the port of the worker for each task of a response."""
    return [(task.part, int(task.worker.rpartition(":")[2])) for task in told.tasks]


def waiting(told):
    """Return the places, the tasks to settle, and the number of waiting parts of a response."""
    return places(told), list(told.settle), told.waiting


def begun(outcome):
    """Return the tasks that workers shall begin, each with the address of its worker."""
    return [(task, address) for address, each in outcome.updates.items() for task in each.begin]


def forgotten(outcome):
    """Return the tasks that workers shall forget, each with the address of its worker."""
    return [(task, address) for address, each in outcome.updates.items() for task in each.forget]


def departures(outcome):
    """Return the clients that workers shall forget."""
    return [one for each in outcome.updates.values() for one in each.departures]
