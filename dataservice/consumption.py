"""The six modes of consumption: the ways in which the elements of a job reach its consumers.

Each mode is one object. The object checks the options that choose the mode, and defines how parts
are placed on workers and how consumers report consumed elements. The dispatcher, the workers and
the consumers ask the object, and never compare the number in the messages. The buffers of a mode
are chosen in one place on each side: ``work.buffers.buffer_for`` and ``read.buffers.buffer_for``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from dataservice.proto import dataservice_pb2 as pb
from mpidist.errors import FailedPreconditionError

if TYPE_CHECKING:
    from dataservice.options import JobOptions

# Parts of an iteration whose order is fixed: the largest number of workers that share the work.
NUM_SHARDS = 16


class Mode:
    """Base class of the modes of consumption, with the facts that most of them share.

    Attributes:
        number: The number of the mode in messages.
        has_fixed_parts: True if the terms give the number of parts. Otherwise the number of parts
            depends on the workers.
        has_consumer_index: True if each consumer has an index and reads elements of every part. A
            part then goes only to workers that all consumers can read from. Otherwise a consumer
            that cannot read a part would wait for ever.
        seeks: True if consumers request elements by index. A worker retains elements until all
            consumers have consumed them, so after its loss consumers repeat their requests to the
            part's next worker. Consumers have states, because each knows the position of the
            iteration in every part. False if the worker chooses the elements. The dispatcher then
            tells the worker when a consumer leaves.
        is_first_come: True if each element goes to the consumer that asks first. Consumers then
            report ranges of consumed elements. Otherwise they report a position in each part.
        is_default: True if the mode needs no option but the job's name. Messages may then omit the
            name of the mode.
        writes_snapshot: True if workers write the elements to disk, and there are no consumers.
        fixed_terms: Names of the terms that a state fixes.
    """

    number: ClassVar[pb.Consumption]
    has_fixed_parts: ClassVar[bool] = False
    has_consumer_index: ClassVar[bool] = False
    seeks: ClassVar[bool] = False
    is_first_come: ClassVar[bool] = False
    is_default: ClassVar[bool] = False
    writes_snapshot: ClassVar[bool] = False
    fixed_terms: ClassVar[tuple[str, ...]] = ("num_shards",)

    @property
    def name(self) -> str:
        """The name of the mode, for messages."""
        return pb.Consumption.Name(self.number)

    def check(self, options: JobOptions) -> None:
        """Raise ValueError if an option conflicts with the mode."""
        if options.num_shards is not None:
            raise ValueError("num_shards needs deterministic=True or num_consumers")

    def check_cardinality(self, summary: str, count: int) -> None:
        """Raise FailedPreconditionError if the mode needs an infinite dataset and this one ends.

        Args:
            summary: The dataset, for the message.
            count: The number of elements; negative if it is infinite or unknown.
        """

    def complete(self, terms: pb.Terms, options: JobOptions) -> None:
        """Set the terms of the job that depend on the mode."""

    def takes_splits(self, terms: pb.Terms | pb.Task) -> bool:
        """Return whether workers request splits of the source from the dispatcher."""
        return terms.policy == pb.DYNAMIC

    def takes_strides(self, lease: pb.Task) -> bool:
        """Return whether part p of n evaluates the source indices p, p + n, p + 2 n, ..."""
        return False

    def leases_elements(self, terms: pb.Terms) -> bool:
        """Return whether a fetched element is leased to the consumer that fetched it.

        After the loss of a worker, only elements that no consumer holds may be delivered again.
        Therefore all consumers first report the elements that they hold.
        """
        return False

    def describe(self, terms: pb.Terms) -> str:
        """Return the mode in words, with the numbers that determine the order."""
        return self.name

    def is_continued_by(self, terms: pb.Terms, other: pb.Terms) -> bool:
        """Return whether consumers may resume a job of this mode under other terms."""
        return False


class _Ordered(Mode):
    """Base class of the modes that read a fixed number of parts in turn, in a fixed order."""

    has_fixed_parts = True
    has_consumer_index = True
    seeks = True

    def check(self, options: JobOptions) -> None:
        if options.delivery == "at_most_once":
            raise ValueError(
                "delivery='at_most_once' does not go with num_consumers or deterministic=True: "
                "after the loss of a part, consumers would not agree on the order"
            )
        if options.target_workers.upper() == "LOCAL":
            raise ValueError(
                "target_workers='LOCAL' does not go with num_consumers or deterministic=True: all "
                "consumers read from all workers"
            )

    def complete(self, terms: pb.Terms, options: JobOptions) -> None:
        terms.num_consumers = options.num_consumers or 1
        terms.num_shards = NUM_SHARDS if options.num_shards is None else options.num_shards

    def describe(self, terms: pb.Terms) -> str:
        return f"{self.name} by {terms.num_consumers} consumers from {terms.num_shards} parts"


class _Exclusive(Mode):
    """One consumer reads the parts in any order."""

    number = pb.EXCLUSIVE
    is_default = True
    seeks = True

    def complete(self, terms: pb.Terms, options: JobOptions) -> None:
        terms.num_consumers = 1


class _FirstCome(Mode):
    """Consumers of one job share the elements. Each goes to the consumer that asks first."""

    number = pb.FIRST_COME
    is_default = True
    is_first_come = True

    def leases_elements(self, terms: pb.Terms) -> bool:
        return terms.delivery == pb.EXACTLY_ONCE


class _Deterministic(_Ordered):
    """Elements come from the parts in turn, and go to the consumers in turn.

    Each part has every n-th index of the source. So the order depends neither on the number of
    workers nor on the number of consumers.
    """

    number = pb.DETERMINISTIC

    def check(self, options: JobOptions) -> None:
        if options.job_name is not None and options.num_consumers is None:
            raise ValueError(
                "deterministic=True with a job_name needs num_consumers and consumer_index, which "
                "decide the elements of each consumer"
            )
        if options.job.policy != pb.DYNAMIC:
            raise ValueError(
                "deterministic=True needs processing_mode 'distributed_epoch': under the other "
                "modes the number of copies or parts depends on the number of workers"
            )
        super().check(options)

    def takes_splits(self, terms: pb.Terms | pb.Task) -> bool:
        return False

    def takes_strides(self, lease: pb.Task) -> bool:
        return True

    def is_continued_by(self, terms: pb.Terms, other: pb.Terms) -> bool:
        same = pb.Terms()
        same.CopyFrom(terms)
        same.num_consumers = other.num_consumers
        return same == other


class _Coordinated(_Ordered):
    """In every round each consumer gets one element, all from the same part."""

    number = pb.COORDINATED
    fixed_terms = ("num_shards", "num_consumers")

    def check_cardinality(self, summary: str, count: int) -> None:
        _check_endless("coordinated reads (num_consumers) need", summary, count)


class _CrossTrainer(Mode):
    """Every trainer reads all elements that are in the sliding window of the worker."""

    number = pb.CROSS_TRAINER

    def check(self, options: JobOptions) -> None:
        if options.job_name is None:
            raise ValueError("cross_trainer_cache needs a job_name that the trainers share")
        if options.num_consumers is not None or options.deterministic:
            raise ValueError(
                "cross_trainer_cache does not go with num_consumers or deterministic=True: "
                "trainers that are late do not get all elements"
            )
        super().check(options)

    def check_cardinality(self, summary: str, count: int) -> None:
        _check_endless("a cross_trainer_cache needs", summary, count)


class _Snapshot(Mode):
    """Workers write the elements to disk. No option of ``distribute`` chooses this mode."""

    number = pb.SNAPSHOT
    has_fixed_parts = True
    writes_snapshot = True

    def takes_strides(self, lease: pb.Task) -> bool:
        # A dataset that cannot be split is one part: one worker evaluates all of it.
        return lease.num_parts > 1


EXCLUSIVE = _Exclusive()
FIRST_COME = _FirstCome()
DETERMINISTIC = _Deterministic()
COORDINATED = _Coordinated()
CROSS_TRAINER = _CrossTrainer()
SNAPSHOT = _Snapshot()

_BY_NUMBER: dict[pb.Consumption, Mode] = {
    mode.number: mode
    for mode in (EXCLUSIVE, FIRST_COME, DETERMINISTIC, COORDINATED, CROSS_TRAINER, SNAPSHOT)
}


def mode_of(message: pb.Terms | pb.Task) -> Mode:
    """Return the mode of the number in a message."""
    return _BY_NUMBER[message.consumption]


def mode_for(options: JobOptions) -> Mode:
    """Return the mode that the options of a consumer choose."""
    if options.cross_trainer_cache is not None:
        return CROSS_TRAINER
    if options.deterministic:
        return DETERMINISTIC
    if options.num_consumers is not None:
        return COORDINATED
    return EXCLUSIVE if options.job_name is None else FIRST_COME


def _check_endless(needs: str, summary: str, count: int) -> None:
    if count >= 0:
        raise FailedPreconditionError(
            f"{needs} an infinite dataset, but {summary} has {count} elements: call "
            "repeat() before distribute()"
        )
