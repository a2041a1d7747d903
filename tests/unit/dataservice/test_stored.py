"""A registry that is restored from its records behaves like the original, at any time."""

import itertools

from _cases.data_registry import TIMEOUTS, Play, address_of, places, ranges, terms_of
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from dataservice.dispatch.messages import iteration_response, part_state, record_of, restore
from dataservice.dispatch.registry import Registry
from dataservice.payload import Parcel
from dataservice.proto import dataservice_pb2 as pb
from mpidist.errors import Error

LENGTH = 60
ADDRESSES = [address_of(number) for number in (1, 2, 3)]
JOBS = (
    ("", terms_of()),
    ("", terms_of(pb.OFF)),
    ("shared", terms_of(consumption=pb.FIRST_COME)),
    ("often", terms_of(consumption=pb.FIRST_COME, delivery=pb.AT_LEAST_ONCE)),
    ("seldom", terms_of(consumption=pb.FIRST_COME, delivery=pb.AT_MOST_ONCE)),
    ("static", terms_of(pb.DATA, pb.FIRST_COME)),
    ("local", terms_of(consumption=pb.FIRST_COME, target=pb.LOCAL)),
    ("ordered", terms_of(consumption=pb.DETERMINISTIC, num_consumers=2, num_shards=3)),
    ("rounds", terms_of(pb.OFF, pb.COORDINATED, num_consumers=2, num_shards=2)),
)
PROCESSES = ("a/1", "b/2")
numbers = st.integers(0, 30)


class Journal:
    """Tables as a journal keeps them."""

    def __init__(self):
        self.tables = {}
        self.parcels = {}

    def write(self, outcome):
        """Apply the changes of an outcome, like Answers.write."""
        for (kind, key), value in outcome.changed.items():
            table = self.tables.setdefault(kind, {})
            if value is None:
                table.pop(key, None)
            else:
                table[key] = record_of(value, self.parcels)

    def restored(self, now, ids):
        registry = Registry(TIMEOUTS, ids, ADDRESSES)
        restore(registry, self.tables, now)
        return registry


def picture(registry):
    """Return the observable state of a registry, without versions (they only count changes)."""
    told = {key: iteration_response(client) for key, client in registry.clients.items()}
    for state in told.values():
        state.version = 0
    parts = {
        (iteration.id, number): (
            part.id,
            part_state(part),
            part.used.bounds,
            dict(part.watermarks),
            {client: held.bounds for client, held in part.held.items()},
            part.finished,
            part.slot,
            (
                part.task.id,
                part.task.worker.id,
                part.task.worker.address,
                part.task.running,
                part.task.lost,
                part.task.pending_acks,
            )
            if part.task
            else None,
        )
        for iteration in registry.jobs.iterations.values()
        for number, part in iteration.parts.items()
    }
    iterations = {
        key: (
            iteration.job.id,
            iteration.seed,
            iteration.begin,
            iteration.dropped,
            sorted(iteration.joined),
            sorted(iteration.clients),
            set(iteration.served),
            iteration.next_index,
        )
        for key, iteration in registry.jobs.iterations.items()
    }
    workers = {
        key: (
            worker.address,
            worker.process,
            worker.tags,
            registry.scheduler.slots.of(worker.address),
        )
        for key, worker in registry.workers.items()
    }
    jobs = {
        key: (job.name, job.dataset.id, job.terms, sorted(job.finished))
        for key, job in registry.jobs.by_id.items()
    }
    clients = {key: (client.process, client.index) for key, client in registry.clients.items()}
    return told, parts, iterations, workers, jobs, clients, sorted(registry.scheduler.tasks)


class Ids:
    """Consecutive numbers, like itertools.count, which cannot be copied from Python 3.14 on."""

    def __init__(self, start):
        self.following = start

    def __iter__(self):
        return self

    def __next__(self):
        self.following += 1
        return self.following - 1


class Restarts(RuleBasedStateMachine):
    """A state machine on two registries. Some steps restore the second from the journal.

    The first registry writes the journal. Both registries must give the same answers.
    """

    def __init__(self):
        super().__init__()
        self.ids = [Ids(1), Ids(1)]
        first = Registry(TIMEOUTS, self.ids[0], ADDRESSES)
        self.registries = [first, Registry(TIMEOUTS, self.ids[1], ADDRESSES)]
        self.journal = Journal()
        self.now = 0.0
        self.datasets = [
            self.both(lambda play, name=name: play.add_dataset("range", LENGTH, name=name).id)
            for name in ("", "named")
        ]
        self.journal.parcels = {key: Parcel(b"pickled", ()) for key in self.datasets}
        self.write()

    def both(self, do):
        """Return the common answer of both registries to a request."""
        answers = []
        for registry in self.registries:
            play = Play.__new__(Play)
            play.registry = registry
            try:
                answers.append(do(play))
            except Error as error:
                answers.append((type(error), str(error)))
        assert answers[0] == answers[1]
        return answers[0]

    def write(self):
        outcomes = [registry.take_outcome() for registry in self.registries]
        assert outcomes[0].updates == outcomes[1].updates
        self.journal.write(outcomes[0])

    def one_of(self, data, things):
        return data.draw(st.sampled_from(sorted(things)))

    @rule()
    def restart(self):
        self.ids[1] = Ids(self.ids[0].following)
        self.registries[1] = self.journal.restored(self.now, self.ids[1])
        # The journal does not record the idle times of datasets.
        for dataset in self.registries[0].datasets.by_id.values():
            dataset.last_used = float("inf")
        # Mark the workers as live before any part is placed. Otherwise new workers get parts first.
        for worker in self.registries[1].workers.values():
            worker.is_known_to_live = True

    @rule(number=st.integers(1, 3), process=st.sampled_from(PROCESSES), colocated=st.booleans())
    def add_worker(self, number, process, colocated):
        tags = ["COLOCATED"] if colocated else []
        self.both(lambda play: play.add_worker(number, process, tags, self.now).id)

    @rule(
        job=st.sampled_from(JOBS),
        process=st.sampled_from(PROCESSES),
        index=st.integers(0, 1),
        repetition=st.integers(0, 1),
        position=st.none() | st.integers(0, 1),
        token=st.integers(0, 3),
    )
    def join(self, job, process, index, repetition, position, token):
        name, terms = job
        request = pb.IterationRequest(
            dataset_id=self.datasets[0],
            terms=terms,
            job_name=name,
            process=process,
            consumer_index=index,
            repetition=repetition,
            token=token,
        )
        if position is not None and terms.consumption not in (pb.FIRST_COME, pb.EXCLUSIVE):
            parts = [pb.PartState(part=part, start=position, total=-1) for part in range(2)]
            request.state.MergeFrom(
                pb.State(identity=b"range", terms=terms, seed=5, position=position, parts=parts)
            )
        self.both(lambda play: play.registry.join(request, 1, self.now).id)

    @precondition(lambda self: self.registries[0].clients)
    @rule(data=st.data(), numbers=st.lists(numbers, min_size=2, max_size=2), leaves=st.booleans())
    def report(self, data, numbers, leaves):
        client = self.registries[0].clients[self.one_of(data, self.registries[0].clients)]
        part = data.draw(st.sampled_from(sorted(client.iteration.parts) or [None]))
        report = {"settled": list(iteration_response(client).settle)}
        if part is not None:
            start, stop = sorted(numbers)
            used = pb.Ranges(part=part, bounds=[start, stop])
            report["used"] = [used] if start < stop else []
            report["held"] = ranges(**{f"p{part}": [stop, stop + 2]}) if report["settled"] else []
        request = pb.ClientRequest(client_id=client.id, **report)
        if leaves:
            self.both(lambda play: play.registry.release_client(request, self.now))
        else:
            self.both(lambda play: bool(play.registry.heartbeat_client(request, self.now)))

    @precondition(lambda self: self.registries[0].scheduler.tasks)
    @rule(data=st.data())
    def evaluate(self, data):
        task_id = self.one_of(data, self.registries[0].scheduler.tasks)
        part = self.registries[0].scheduler.tasks[task_id].part
        position = part.granted.stop
        self.both(lambda play: play.registry.start_task(task_id).part.number)
        self.both(lambda play: play.registry.next_split(task_id, position))
        self.both(lambda play: play.registry.next_split(task_id, max(position - 1, 0)))

    @precondition(lambda self: self.registries[0].scheduler.tasks)
    @rule(data=st.data(), index=numbers, total=st.none() | numbers)
    def progress(self, data, index, total):
        task_id = self.one_of(data, self.registries[0].scheduler.tasks)
        task = self.registries[0].scheduler.tasks[task_id]
        position = max(task.part.granted.stop - 1, 0)
        if not task.lost:
            self.both(
                lambda play: play.progress(task.worker, task_id, index, self.now, position=position)
            )
        if total is not None:
            self.both(lambda play: play.registry.finish_task(task_id, total))

    @precondition(lambda self: self.registries[0].workers)
    @rule(data=st.data(), unregisters=st.booleans())
    def lose_worker(self, data, unregisters):
        lost = self.one_of(data, self.registries[0].workers)
        if unregisters:
            self.both(lambda play: play.registry.unregister_worker(lost))
        else:
            self.fall_silent(lost)

    @precondition(lambda self: self.registries[0].clients)
    @rule(data=st.data())
    def lose_client(self, data):
        self.fall_silent(self.one_of(data, self.registries[0].clients))

    @rule()
    def wait(self):
        self.fall_silent(0)

    def fall_silent(self, silent):
        """Let a long time pass. Only the worker or client ``silent`` sends no heartbeat."""
        self.now += 100.0
        for worker in self.registries[0].workers.values():
            if worker.id != silent:
                self.both(lambda play, worker=worker: play.heartbeat(worker, self.now))
        for client_id in [key for key in self.registries[0].clients if key != silent]:
            request = pb.ClientRequest(client_id=client_id)
            self.both(lambda play, r=request: bool(play.registry.heartbeat_client(r, self.now)))
        self.both(lambda play: play.registry.expire(self.now))

    @invariant()
    def both_are_the_same(self):
        self.write()
        expected = picture(self.registries[0])
        for other in (self.registries[1], self.journal.restored(self.now, itertools.count(1))):
            for first, second in zip(expected, picture(other), strict=True):
                assert first == second


Restarts.TestCase.settings = settings(deadline=None, stateful_step_count=30)
TestRestarts = Restarts.TestCase


def restarted(play):
    """Return a play with a registry restored from the journal of another play."""
    journal = Journal()
    journal.parcels = {play.dataset.id: Parcel(b"pickled", ())}
    journal.write(play.registry.take_outcome())
    registry = Registry(TIMEOUTS, itertools.count(1000))
    restore(registry, journal.tables, 0.0)
    return Play(registry=registry)


def test_parts_of_the_lost_go_to_workers_that_are_known_to_live():
    """Give parts of a lost worker to live workers, not to other workers that may be lost too."""
    before = Play(workers=3)
    before.join_ordered(shards=9)
    play = restarted(before)
    client = next(iter(play.registry.clients.values()))
    play.add_worker(9, now=1.0)
    lost = next(iter(play.registry.workers.values()))
    parts = {part for part, port in places(play.beat(client, 1.0)) if port == 1}
    play.lose(lost)
    assert len(parts) > 1
    assert parts <= {part for part, port in places(play.beat(client, 1.0)) if port == 9}


def test_workers_that_are_heard_of_after_a_restart_share_the_parts_of_the_lost():
    before = Play(workers=3)
    before.join_ordered(shards=6)
    play = restarted(before)
    client = next(iter(play.registry.clients.values()))
    lost, *others = play.registry.workers.values()
    for worker in others:
        play.heartbeat(worker, 1.0)
    play.lose(lost)
    assert sorted(port for _, port in places(play.beat(client, 1.0))) == [2, 2, 2, 3, 3, 3]
