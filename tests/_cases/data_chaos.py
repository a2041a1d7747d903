"""What befalls a data service, drawn from a seed, and consumers that read meanwhile."""

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
    """Something that is done to a :class:`DataCluster`.

    Attributes:
        wait_s: Since the step before it.
        action: A method of the cluster.
        arguments: Of it.
        options: Of it, by name.
    """

    wait_s: float
    action: str
    arguments: tuple[object, ...] = ()
    options: tuple[tuple[str, object], ...] = ()

    def __str__(self):
        words = [*map(str, self.arguments), *(f"{name}={value}" for name, value in self.options)]
        return f"{self.action}({', '.join(words)})"

    def apply(self, cluster):
        """Do it."""
        getattr(cluster, self.action)(*self.arguments, **dict(self.options))


def schedule_of(rng, workers, count, *, dispatcher):
    """So many steps, and then what makes all be there again.

    Args:
        rng: Draws them.
        workers: How many there are.
        count: Of the steps.
        dispatcher: Whether the dispatcher may be killed, and not only stand still.
    """
    states = dict.fromkeys([*range(workers), _DISPATCHER], UP)
    everybody = [*range(workers), *range(workers), _DISPATCHER]  # workers twice as often
    steps = [_step(rng, states, rng.choice(everybody), dispatcher) for _ in range(count)]
    missing = [who for who, state in states.items() if state is not UP]
    rng.shuffle(missing)
    return steps + [_step(rng, states, who, dispatcher, heal=True) for who in missing]


def _step(rng, states, who, dispatcher, heal=False):
    """What comes next for one of them; changes its state."""
    may_die = dispatcher or who != _DISPATCHER
    if states[who] is UP:
        # One that is stopped, or starts, speaks to the dispatcher.
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
    """Consumers on threads, each reading one iteration of a dataset of its own.

    Args:
        datasets: What they read.

    Attributes:
        log: When something was done or noticed, in s since the beginning, and what.
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
        """Add to the log."""
        self.log.append((time.monotonic() - self._began, text))

    def finish(self, limit_s):
        """Wait until all have read everything; the first error of theirs is raised."""
        deadline = time.monotonic() + limit_s
        for thread in self._threads:
            thread.join(max(deadline - time.monotonic(), 0.0))
        late = [thread.name for thread in self._threads if thread.is_alive()]
        self.close()
        if self._errors:
            raise self._errors[0]
        assert not late, f"not over after {limit_s:g} s: {', '.join(late)}"

    def close(self):
        """Close the iterators; their threads end."""
        for iterator in self._iterators:
            iterator.close()
        for thread in self._threads:
            thread.join()

    @property
    def counts(self):
        """How often each element came, to anybody."""
        return Counter(element for elements in self._elements for _, element in elements)

    @property
    def order(self):
        """The elements of the first consumer."""
        return [element for _, element in self._elements[0]]

    def gaps(self):
        """The longest times without any element, in s, and when they began; the longest first."""
        times = sorted([0.0, *(when for elements in self._elements for when, _ in elements)])
        lengths = [(later - sooner, sooner) for sooner, later in pairwise(times)]
        return sorted(lengths, reverse=True)[:3]

    def report(self):
        """What was done when, and what came."""
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
