"""The datasets and the jobs that a dispatcher knows. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from dataservice.consumption import mode_of
from dataservice.dispatch.records import Dataset, Iteration, Job, Outcome
from dataservice.proto import dataservice_pb2 as pb
from mpidist.errors import AlreadyExistsError, InvalidArgumentError, NotFoundError


class DatasetTable:
    """The registered datasets, found by id, by name, and without a name by digest.

    The digest is the hash of the pickle. Datasets of equal identity may differ in globals that
    their functions use and in objects, so a dataset is not recognized by its identity: it is sent
    and kept again if its pickle differs.

    Args:
        ids: Source of new ids.
        outcome: Takes the changes.

    Attributes:
        by_id: All datasets, by id.
    """

    def __init__(self, ids: Iterator[int], outcome: Outcome) -> None:
        self._ids = ids
        self._outcome = outcome
        self.by_id: dict[int, Dataset] = {}
        self._by_digest: dict[bytes, Dataset] = {}
        self._by_name: dict[str, Dataset] = {}

    def get(self, dataset_id: int) -> Dataset:
        """Return a dataset; NotFoundError if it is not known."""
        dataset = self.by_id.get(dataset_id)
        if dataset is None:
            raise NotFoundError(f"dataset {dataset_id} is not registered")
        return dataset

    def named(self, name: str) -> Dataset:
        """Return the dataset of a name; NotFoundError if it is not known."""
        dataset = self._by_name.get(name)
        if dataset is None:
            raise NotFoundError(f"no dataset {name!r} is registered at this dispatcher")
        return dataset

    def find(self, request: pb.RegisterDatasetRequest) -> Dataset | None:
        """Return the dataset of a request, if it is known.

        Raises:
            InvalidArgumentError: Its name belongs to a dataset with other elements.
        """
        if not request.name:
            known = self._by_digest.get(request.digest)
            if known is not None and request.spec and not known.request.spec:
                known.request.spec = request.spec
                self._outcome.touch(known)
            if known is not None:
                known.last_used = float("inf")  # until the next check of unused datasets
            return known
        dataset = self._by_name.get(request.name)
        if dataset is not None and dataset.request.spec != request.spec:
            raise InvalidArgumentError(
                f"the dataset {request.name!r} is registered with elements of another structure: "
                f"existing {dataset.request.summary}, new {request.summary}; datasets of the same "
                "ID must have the same structure"
            )
        return dataset

    def register(self, request: pb.RegisterDatasetRequest) -> Dataset:
        """Return the dataset of a request, new or known; raises as :meth:`find`."""
        dataset = self.find(request)
        if dataset is None:
            kept = pb.RegisterDatasetRequest()
            kept.CopyFrom(request)
            kept.ClearField("pickle")
            dataset = Dataset(next(self._ids), kept)
            self.restore(dataset)
            self._outcome.touch(dataset)
        return dataset

    def restore(self, dataset: Dataset) -> None:
        """Add a dataset that is in the journal."""
        self.by_id[dataset.id] = dataset
        self._by_name.setdefault(dataset.name, dataset)
        if not dataset.request.name:
            self._by_digest[dataset.request.digest] = dataset

    def expire(self, used: Collection[int], now: float, limit_s: float) -> None:
        """Forget datasets without a name that no job has used for some time.

        Args:
            used: Ids of the datasets that jobs use now.
            now: The time.
            limit_s: Seconds without use.
        """
        for dataset in list(self.by_id.values()):
            if dataset.id in used or dataset.last_used > now:
                dataset.last_used = now
            elif not dataset.request.name and now - dataset.last_used > limit_s:
                del self.by_id[dataset.id], self._by_digest[dataset.request.digest]
                del self._by_name[dataset.name]
                self._outcome.remove(dataset)


class JobTable:
    """The jobs, and their iterations that go on.

    Args:
        ids: Source of new ids.
        outcome: Takes the changes.

    Attributes:
        by_id: All jobs, by id.
        iterations: The iterations of all jobs, by id.
    """

    def __init__(self, ids: Iterator[int], outcome: Outcome) -> None:
        self._ids = ids
        self._outcome = outcome
        self.by_id: dict[int, Job] = {}
        self._by_name: dict[str, Job] = {}
        self.iterations: dict[int, Iteration] = {}

    def job_of(self, request: pb.IterationRequest, dataset: Dataset) -> Job:
        """Return the job of a request, new or known.

        Raises:
            InvalidArgumentError: The state is of another dataset or kind of job, or the job
                exists with other parameters.
        """
        summary, identity = dataset.request.summary, dataset.request.identity
        resumes = request.HasField("state")
        if resumes and _is_of_other_kind(request.state, identity, request.terms):
            raise InvalidArgumentError(
                f"the state belongs to an iterator over {request.state.summary}, read as "
                f"{mode_of(request.state.terms).describe(request.state.terms)}, not over "
                f"{summary}, read as {mode_of(request.terms).describe(request.terms)}: give "
                "distribute() the dataset and the arguments that it had when the state was saved "
                "(with the same code of functions, constants and arrays), or begin without the "
                "state"
            )
        job = self._by_name.get(request.job_name) if request.job_name else None
        if job is None:
            return self.add_job(request.job_name, dataset, request.terms)
        same = job.terms == request.terms or (
            # All consumers were restarted, and there are more or fewer of them now.
            resumes and job.mode.is_continued_by(job.terms, request.terms)
        )
        # Not by the digest: the pickle of one description may differ between processes.
        known = job.dataset.request
        if not same or known.identity != identity:
            raise InvalidArgumentError(
                f"there is a job {job.name!r} with different parameters: existing "
                f"{_described(job.terms)} over {known.summary}, new "
                f"{_described(request.terms)} over {summary}; make the arguments and the dataset "
                "the same in all consumers (operations, code of functions, constants and arrays), "
                "or give one of them another job_name"
            )
        return job

    def add_job(self, name: str, dataset: Dataset, terms: pb.Terms) -> Job:
        """Add a job; an empty name makes it one consumer's own."""
        job = Job(next(self._ids), name, dataset, terms)
        self.restore_job(job)
        self._outcome.touch(job)
        return job

    def restore_job(self, job: Job) -> None:
        """Add a job that is in the journal."""
        self.by_id[job.id] = job
        if job.name:
            self._by_name[job.name] = job

    def restore_iteration(self, iteration: Iteration) -> None:
        """Add an iteration that is in the journal."""
        iteration.job.iterations[iteration.repetition] = iteration
        self.iterations[iteration.id] = iteration

    def join(self, job: Job, request: pb.IterationRequest) -> Iteration | None:
        """Return the iteration of a request, if it goes on.

        Raises:
            InvalidArgumentError: Only some of its consumers resume from a state.
        """
        iteration = job.iterations.get(request.repetition)
        if iteration is not None and (iteration.begin is not None) != request.HasField("state"):
            raise InvalidArgumentError(
                f"some consumers of the job {job.name!r} resume from a state and others do not: "
                "set the same state in all of them before they read"
            )
        return iteration

    def begin(self, job: Job, request: pb.IterationRequest, seed: int) -> Iteration:
        """Add the iteration of a request.

        Args:
            job: Its job.
            request: The repetition, and the state from which it goes on, if there is one.
            seed: Randomness for an iteration without a state.
        """
        begin = request.state if request.HasField("state") else None
        if begin is not None:
            job.terms = request.terms
            job.finished.discard(request.repetition)
            self._outcome.touch(job)
        next_index = None
        if job.mode.takes_splits(job.terms):
            next_index = begin.next_index if begin is not None else 0
        seed = begin.seed if begin else seed
        iteration = Iteration(next(self._ids), job, request.repetition, seed, begin, next_index)
        self.restore_iteration(iteration)
        self._outcome.touch(iteration)
        return iteration

    def forget(self, iteration: Iteration) -> None:
        """Forget an iteration, and its job if that has no name."""
        job = iteration.job
        if iteration.finished:
            job.finished.add(iteration.repetition)
        del job.iterations[iteration.repetition], self.iterations[iteration.id]
        for part in iteration.parts.values():
            self._outcome.remove(part)
        self._outcome.remove(iteration)
        if job.name:
            self._outcome.touch(job)
        else:
            del self.by_id[job.id]
            self._outcome.remove(job)


def taken_back(job: Job, request: pb.IterationRequest) -> list[Iteration]:
    """List the iterations that end because consumers return with an earlier state."""
    if not request.HasField("state"):
        return []
    if job.terms != request.terms:  # for another number of consumers
        return list(job.iterations.values())
    iteration = job.iterations.get(request.repetition)
    if iteration is None:
        return []
    begin = iteration.begin
    is_other = begin is None or begin.position != request.state.position
    rejoins = job.mode.has_consumer_index and request.consumer_index in iteration.joined
    return [iteration] if is_other or rejoins else []


def check_index_is_free(iteration: Iteration, index: int) -> None:
    """Raise AlreadyExistsError if another consumer reads with this index."""
    for other in iteration.clients.values():
        if other.index == index:
            raise AlreadyExistsError(
                f"consumer {index} of the job {iteration.job.name!r} is already reading, in "
                f"{other.process}"
            )


def _described(terms: pb.Terms) -> str:
    """Describe in words the terms that are not the default."""
    words = [pb.ShardingPolicy.Name(terms.policy)]
    if not mode_of(terms).is_default:
        words.append(f"consumption {mode_of(terms).name}")
    for name, kind in (("delivery", pb.Delivery), ("target", pb.Target)):
        if getattr(terms, name):
            words.append(f"{name} {kind.Name(getattr(terms, name))}")
    numbers = ("num_shards", "num_consumers")
    words += [f"{name} {getattr(terms, name)}" for name in numbers if getattr(terms, name)]
    return ", ".join(words)


def _is_of_other_kind(begin: pb.State, identity: bytes, terms: pb.Terms) -> bool:
    """Return whether an iteration with these terms cannot begin from a state."""
    mode = mode_of(terms)
    if begin.identity != identity or mode_of(begin.terms) is not mode:
        return True
    return any(getattr(begin.terms, name) != getattr(terms, name) for name in mode.fixed_terms)
