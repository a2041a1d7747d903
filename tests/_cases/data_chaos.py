"""Random failures of a data service, drawn from a seed, and concurrent consumers."""

from __future__ import annotations

import threading
import time
from collections import Counter
from dataclasses import dataclass
from itertools import pairwise

UP, PAUSED, DOWN = "up", "paused", "down"
_DISPATCHER = -1
_LONGEST_S = 0.7


@dataclass(frozen=True)
class Step:
    """An action on a :class:`DataCluster`.

    Attributes:
        wait_s: Delay after the previous step.
        action: Name of a method of the cluster.
        arguments: Positional arguments of the method.
        options: Keyword arguments of the method.
    """

    wait_s: float
    action: str
    arguments: tuple[object, ...] = ()
    options: tuple[tuple[str, object], ...] = ()

    def __str__(self):
        words = [*map(str, self.arguments), *(f"{name}={value}" for name, value in self.options)]
        return f"{self.action}({', '.join(words)})"

    def apply(self, cluster):
        """Run the action on a cluster."""
        getattr(cluster, self.action)(*self.arguments, **dict(self.options))


def schedule_of(rng, workers, count, *, dispatcher):
    """Draw random steps, and append steps that restore the dispatcher and all workers.

    Args:
        rng: Random generator.
        workers: Number of workers.
        count: Number of random steps.
        dispatcher: Whether the dispatcher may be killed. Otherwise it is only paused.
    """
    states = dict.fromkeys([*range(workers), _DISPATCHER], UP)
    everybody = [*range(workers), *range(workers), _DISPATCHER]  # workers twice as often
    steps = [_step(rng, states, rng.choice(everybody), dispatcher) for _ in range(count)]
    missing = [who for who, state in states.items() if state is not UP]
    rng.shuffle(missing)
    return steps + [_step(rng, states, who, dispatcher, heal=True) for who in missing]


def _step(rng, states, who, dispatcher, heal=False):
    """Draw the next step for a process and update its state."""
    may_die = dispatcher or who != _DISPATCHER
    if states[who] is UP:
        # A worker calls the dispatcher when it stops, so the dispatcher must run.
        orderly = ["stop"] if who != _DISPATCHER and states[_DISPATCHER] is UP else []
        verb = rng.choice(["kill", "kill", *orderly, "pause"]) if may_die else "pause"
    elif states[who] is PAUSED:
        verb = "kill" if may_die and not heal and rng.random() < 0.3 else "resume"
    else:
        verb = "restart"
    states[who] = {"kill": DOWN, "stop": DOWN, "pause": PAUSED}.get(verb, UP)
    wait_s = round(rng.uniform(0.02, _LONGEST_S), 3)
    options = [("wait", False)] if verb == "restart" else []
    if who == _DISPATCHER:
        return Step(wait_s, f"{verb}_dispatcher", (), tuple(options))
    if verb == "restart":
        options.append(("same_port", rng.random() < 0.7))
    return Step(wait_s, f"{verb}_worker", (who,), tuple(options))


class Readings:
    """Consumers on threads. Each consumer reads one iteration of its own dataset.

    Args:
        datasets: One dataset for each consumer.

    Attributes:
        log: Pairs of time and text, with the time in seconds since the start.
    """

    def __init__(self, datasets):
        self.log = []
        self._began = time.monotonic()
        self._elements = [[] for _ in datasets]
        self._errors = []
        self._iterators = [iter(dataset) for dataset in datasets]
        self._threads = [
            threading.Thread(target=self._read, args=(number,), name=f"reader {number}")
            for number in range(len(datasets))
        ]
        for thread in self._threads:
            thread.start()

    def note(self, text):
        """Add a text to the log."""
        self.log.append((time.monotonic() - self._began, text))

    def finish(self, limit_s):
        """Wait until all consumers are at their end. Raise the first error of a consumer."""
        deadline = time.monotonic() + limit_s
        for thread in self._threads:
            thread.join(max(deadline - time.monotonic(), 0.0))
        late = [thread.name for thread in self._threads if thread.is_alive()]
        self.close()
        if self._errors:
            raise self._errors[0]
        assert not late, f"not over after {limit_s:g} s: {', '.join(late)}"

    def close(self):
        """Close the iterators and wait for the threads."""
        for iterator in self._iterators:
            iterator.close()
        for thread in self._threads:
            thread.join()

    @property
    def counts(self):
        """The number of times that each element was read, over all consumers."""
        return Counter(element for elements in self._elements for _, element in elements)

    @property
    def order(self):
        """The elements of the first consumer, in the order of arrival."""
        return [element for _, element in self._elements[0]]

    def gaps(self):
        """Return the three longest times without any element, longest first.

        Each entry has the length and the start, in seconds.
        """
        times = sorted([0.0, *(when for elements in self._elements for when, _ in elements)])
        lengths = [(later - sooner, sooner) for sooner, later in pairwise(times)]
        return sorted(lengths, reverse=True)[:3]

    def report(self):
        """Return the log, the numbers of elements and the longest gaps as text."""
        lines = [f"  {when:7.3f} s  {text}" for when, text in self.log]
        came = ", ".join(str(len(elements)) for elements in self._elements)
        gaps = ", ".join(f"{length:.3f} s at {when:.3f} s" for length, when in self.gaps())
        return "\n".join([*lines, f"elements: {came}; longest without any: {gaps}"])

    def _read(self, number):
        try:
            for element in self._iterators[number]:
                self._elements[number].append((time.monotonic() - self._began, int(element)))
        except Exception as error:
            self.note(f"reader {number}: {error!r}")
            self._errors.append(error)
        else:
            self.note(f"reader {number}: the end")
