"""The cause of a hang: the graph of waits between ranks, and the activity at its ends.

Every blocked rank has edges to the ranks without which its wait cannot end. The ranks that are
reached and are not blocked themselves are the cause. If there are none, ranks wait for each other.
This is the wait-for graph of distributed deadlock detection (Chandy, Misra and Haas, 1983).
"""

from __future__ import annotations

import re
import signal
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from mpidist.launcher.hang.activity import activity_of, is_busy
from mpidist.launcher.hang.facts import Facts, Frame, Rank, Wait
from mpidist.launcher.report import describe_signal
from mpidist.recorder import SLOTS, Entry
from mpidist.runner import INTERRUPTED, INTERRUPTED_STATUS

Verdict = Literal["stuck", "slow", "moving", "ended", "unknown"]
# Activities that stop a rank, and activities that may only be slow.
_HELD = ("stopped", "debugger", "file", "thread", "lock", "child", "socket", "accept")
_FIRM = ("ended", *_HELD)
_SOFT = ("swapped", "sleeping", "event_loop", "computing")
_RECEIVES = re.compile(r"is in [\w.]+\.[Rr]ecv\b")
_SENDS = re.compile(r"is in [\w.]+\.[Ss]?[Ss]end\b")
_WINDOWS = re.compile(r"is in [\w.]+\.(?:Lock|Unlock|Flush)")
# Reasons of ranks that got SIGINT. The user interrupts the job, so none of them is at fault.
_CTRL_C = (INTERRUPTED, f"killed by {describe_signal(signal.SIGINT)}")
_LIMIT_OF_WAITS = "MPIDIST_STALL_ABORT_S"
# Waits that mpidist.mpi.waiting_for describes.
_REPLY = "the reply to"
_FUNCTION = "the function"
_SERVES = "requests"  # the wait of a task that serves others
OF_STRATEGY = " of strategy "
"""Part of the waits of workers for the steps of other workers."""


@dataclass(frozen=True)
class Blocked:
    """A wait of one rank.

    Attributes:
        wait: The wait.
        entry: The operation in the flight recorder; None for other waits.
        ranks: The ranks without which it cannot end.
    """

    wait: Wait
    entry: Entry | None
    ranks: frozenset[int]


@dataclass(frozen=True)
class Cause:
    """The cause of a hang.

    Attributes:
        verdict: ``"stuck"``, ``"slow"``, ``"moving"``, ``"ended"`` or ``"unknown"``.
        kind: The kind of the cause; ``"none"`` if nothing is stuck.
        ranks: The ranks at fault.
        waiting: The ranks that wait for them.
        detail: Facts about the kind, in words.
    """

    verdict: Verdict
    kind: str
    ranks: tuple[int, ...] = ()
    waiting: tuple[int, ...] = ()
    detail: tuple[str, ...] = ()


class Situation:
    """The ranks of a job, with their activities and waits.

    Args:
        facts: The facts.

    Attributes:
        facts: The facts.
        activities: The activity of each rank.
        moving: The ranks that have made progress since the report began.
        blocked: The waits of each blocked rank.
    """

    def __init__(self, facts: Facts) -> None:
        self.facts = facts
        self.activities = {rank.rank: activity_of(rank) for rank in facts.ranks}
        self.moving = {rank.rank for rank in facts.ranks if rank.has_moved}
        # These calls leave no records, but a script that goes on is at changing lines.
        foreign = [rank for rank in facts.ranks if self.activities[rank.rank].kind == "foreign"]
        if any(len(set(rank.stacks)) > 1 for rank in foreign):
            self.moving |= {rank.rank for rank in foreign}
        self._done = {rank.rank: _progress(rank) for rank in facts.ranks}
        self.blocked: dict[int, list[Blocked]] = {}
        for rank in facts.ranks:
            activity, kind = self.activities[rank.rank], self.activities[rank.rank].kind
            if kind == "foreign" and rank.rank in self.moving:
                continue
            waits = self._waits_of(rank) if kind in ("waits", "lock", "thread", "unknown") else []
            if activity.is_of_helper:  # the helper may be in a call, which computes while it waits
                waits = [each for each in self._waits_of(rank) if each.wait.is_call]
            if waits or kind in ("foreign", "start"):
                self.blocked[rank.rank] = waits

    def edges(self, rank: int) -> set[int]:
        """Return the ranks without which the waits of a rank cannot end."""
        kind = self.activities[rank].kind
        if kind in ("foreign", "start"):
            # The partners of a call of mpi4py or torch are not known; MPI_Init needs all ranks.
            ranks = {
                other.rank
                for other in self.facts.ranks
                if self.activities[other.rank].kind != kind
                and not (kind == "start" and other.has_started_mpi)
            }
        else:
            ranks = set[int]().union(*(wait.ranks for wait in self.blocked.get(rank, []))) - {rank}
        busy = {other for other in ranks if not self.serves(other)}
        return busy or ranks

    def wait_starts(self) -> list[float]:
        """Return the starts of all waits of blocked ranks, in seconds since the epoch."""
        return [each.wait.since for waits in self.blocked.values() for each in waits]

    def serves(self, rank: int) -> bool:
        """Return whether a rank answers the requests of others, and waits for nothing itself."""
        whats = {wait.what for wait in self.facts.ranks[rank].waits}
        return _SERVES in whats and rank not in self.blocked

    def is_end(self, rank: int) -> bool:
        """Return whether a rank waits for no other rank, as far as it is known."""
        waits = self.blocked.get(rank)
        if waits is None:
            return True
        return bool(waits) and not any(each.wait.is_call or each.wait.ranks for each in waits)

    def last_operation(self, rank: int) -> Entry | None:
        """Return the last operation of a rank, also if it has ended."""
        recording = self.facts.ranks[rank].recording
        return recording.entries[-1] if recording is not None and recording.entries else None

    def _waits_of(self, rank: Rank) -> list[Blocked]:
        entries = {} if rank.recording is None else {e.slot: e for e in rank.recording.entries}
        waits = [wait for wait in rank.waits if wait.what != _SERVES]
        # Servers have calls under way that are answered when there is news.
        precise = [wait for wait in waits if not wait.what.startswith(_REPLY)]
        if precise or len(waits) < len(rank.waits):
            waits = precise
        last = self.last_operation(rank.rank)
        is_in_call = self.activities[rank.rank].kind == "waits"
        if last is not None and last.end is None and not rank.waits and is_in_call:
            # A watchdog that cannot run writes no waits.
            waits = [Wait(last.call, (), last.start, last.slot, True)]
        found = []
        for wait in waits:
            entry = entries.get(wait.slot) if wait.slot else None
            if entry is not None and (entry.end is not None or entry.name not in wait.what):
                entry = None  # a later operation has the slot
            found.append(Blocked(wait, entry, frozenset(self._needed(rank, wait, entry))))
        return found

    def _needed(self, rank: Rank, wait: Wait, entry: Entry | None) -> Iterable[int]:
        """Return the ranks without which a wait cannot end."""
        if entry is None:
            # Of ranks that wait in the same call, none holds up the others.
            return [
                other
                for other in wait.ranks
                if wait.what not in {each.what for each in self.facts.ranks[other].waits}
            ]
        assert rank.recording is not None
        members = rank.recording.groups[entry.group][1]
        if entry.sequence:
            return [
                member
                for member in members
                if self._done[member].get(entry.group, 0) < entry.sequence
            ]
        return [entry.peer] if entry.peer >= 0 else [m for m in members if m != rank.rank]

    def call_of(self, rank: int, group: int, sequence: int) -> Entry | None:
        """Return a collective of a rank."""
        recording = self.facts.ranks[rank].recording
        for entry in () if recording is None else recording.entries:
            if entry.group == group and entry.sequence == sequence:
                return entry
        return None

    def calls_made(self, rank: int, group: int) -> int:
        """Return the number of collectives of a group that a rank has begun."""
        return self._done[rank].get(group, 0)


def _collectives(number: int) -> str:
    return f"{number} collective{'s' * (number != 1)}"


def _progress(rank: Rank) -> dict[int, int]:
    """Return the number of the last collective that a rank has begun, by group."""
    done = dict(rank.counts)
    for entry in () if rank.recording is None else rank.recording.entries:
        if not entry.failed:
            done[entry.group] = max(done.get(entry.group, 0), entry.sequence)
    return done


def find_cause(situation: Situation) -> Cause:
    """Return the cause of a hang."""
    facts = situation.facts
    if facts.is_ending:
        reason = "" if facts.failed is None else facts.failed[1]
        if reason in _CTRL_C or (not reason and facts.status == INTERRUPTED_STATUS):
            return Cause("ended", "none", detail=("it was interrupted by Ctrl-C",))
        if facts.failed is None:
            return Cause("ended", "none")
        rank = facts.failed[0]
        name = facts.ranks[rank].name
        if _LIMIT_OF_WAITS in reason:
            detail = f"It hung. The wait of {name} was the longest, but the cause may be elsewhere"
            return Cause("ended", "failed", (), (rank,), (f"{detail}: {reason}",))
        return Cause("ended", "failed", (rank,), (), (f"{name} has failed first: {reason}",))
    if all(activity.kind == "ended" for activity in situation.activities.values()):
        return Cause("ended", "none")
    blocked = {rank for rank in situation.blocked if not situation.is_end(rank)}
    ends: set[int] = set()
    chain = set[int]()  # the blocked ranks from which an end is reached
    loops = set[int]()
    for rank in sorted(blocked):
        reached, found = _follow(situation, rank)
        ends |= found
        (chain if found else loops).update({rank} | (reached & blocked))
    moving = situation.moving
    loops -= chain
    if loops - moving:
        return _without_end(situation, loops - moving)
    if ends:
        return _of_ends(situation, ends, chain, moving)
    if moving:
        return Cause("moving", "none")
    return _of_idle(situation)


def _follow(situation: Situation, start: int) -> tuple[set[int], set[int]]:
    """Return the ranks that are reached from a rank, and those of them that are not blocked."""
    reached: set[int] = set()
    queue = [start]
    while queue:
        for other in situation.edges(queue.pop()) - reached:
            reached.add(other)
            if not situation.is_end(other):
                queue.append(other)
    return reached, {rank for rank in reached if situation.is_end(rank)}


def _of_ends(situation: Situation, ends: set[int], waiting: set[int], moving: set[int]) -> Cause:
    """Return the cause if ranks wait for ranks that are not blocked."""
    kinds = {rank: situation.activities[rank].kind for rank in ends}
    others = tuple(sorted(waiting))
    for kind in _FIRM:
        ranks = tuple(sorted(rank for rank in ends if kinds[rank] == kind))
        if ranks:
            return Cause("stuck", kind, ranks, others, tuple(_missing(situation, waiting, ranks)))
    if ends & moving:
        return Cause("moving", "none", (), others)
    if held := tuple(sorted(ends & situation.blocked.keys())):
        whats = [each.wait.what for rank in held for each in situation.blocked[rank]]
        is_slow = all(what.startswith(_FUNCTION) for what in whats)
        return Cause("slow" if is_slow else "stuck", "waiting", held, others)
    for kind in _SOFT:
        ranks = tuple(sorted(rank for rank in ends if kinds[rank] == kind))
        if ranks:
            return Cause("slow", kind, ranks, others, tuple(_missing(situation, waiting, ranks)))
    if busy := tuple(sorted(rank for rank in ends if is_busy(situation.facts.ranks[rank]))):
        return Cause("slow", "computing", busy, others)
    return Cause("unknown", "waiting", tuple(sorted(ends)), others)


def _missing(situation: Situation, waiting: set[int], ranks: tuple[int, ...]) -> list[str]:
    """Return a sentence for each rank that has made fewer calls of a group than the others."""
    lines = []
    for rank in ranks:
        for other in sorted(waiting):
            for blocked in situation.blocked[other]:
                entry = blocked.entry
                if entry is not None and entry.sequence and rank in blocked.ranks:
                    made = situation.calls_made(rank, entry.group)
                    lines.append(
                        f"{situation.facts.ranks[rank].name} has made {_collectives(made)} of this "
                        f"group, and {situation.facts.ranks[other].name} is in number "
                        f"{entry.sequence}."
                    )
                    break
            else:
                continue
            break
    return lines


def _without_end(situation: Situation, loops: set[int]) -> Cause:
    """Return the cause if ranks wait for each other, or for unknown ranks."""
    if (cause := _unmatched(situation, loops) or _different(situation, loops)) is not None:
        return cause
    waiting = tuple(sorted(loops))
    cycle = {rank for rank in loops if rank in _follow(situation, rank)[0]}
    if not cycle:
        return _in_foreign_calls(situation, waiting)
    names = situation.facts.ranks
    behind: dict[int, str] = {}
    ahead = set[int]()  # ranks that are in a collective, or in a wait that is no call of a group
    for rank in cycle:
        for blocked in situation.blocked[rank]:
            entry = blocked.entry
            if entry is None or entry.sequence:
                ahead.add(rank)
            if entry is None and not blocked.wait.is_call:
                continue
            for other in blocked.ranks & cycle:
                if entry is None:
                    behind[other] = f"{names[other].name} has not begun {blocked.wait.what}"
                elif entry.sequence:
                    made = _collectives(situation.calls_made(other, entry.group))
                    recording = names[rank].recording
                    group = "" if recording is None else recording.groups[entry.group][0]
                    behind[other] = (
                        f"{names[other].name} has made {made} of group {group!r}, and "
                        f"{names[rank].name} is in number {entry.sequence}"
                    )
    late = tuple(sorted(behind.keys() - ahead))
    if late:
        others = tuple(rank for rank in waiting if rank not in late)
        return Cause("stuck", "missing_call", late, others, tuple(behind[rank] for rank in late))
    return Cause("stuck", "deadlock", tuple(sorted(cycle)), waiting, tuple(behind.values()))


def _in_foreign_calls(situation: Situation, ranks: tuple[int, ...]) -> Cause:
    """Return the cause if all ranks are in calls with unknown partners.

    It is not certain: ranks that exchange messages are in receives most of the time.
    """
    activities = [situation.activities[rank] for rank in ranks]
    if len(ranks) == 1 or any(activity.kind != "foreign" for activity in activities):
        return Cause("unknown", "unknown", ranks, ranks)
    for one_sided in (_RECEIVES, _SENDS):
        if all(one_sided.search(activity.text) for activity in activities):
            return Cause("unknown", "deadlock", ranks, ranks)
    if any(_WINDOWS.search(activity.text) for activity in activities):
        return Cause("unknown", "window_lock", ranks, ranks)
    lines = Counter(activity.frame for activity in activities)
    if len(lines) == 1:
        return Cause("unknown", "unknown", ranks, ranks)
    (usual, most), (_, second) = lines.most_common(2)
    at_fault = ranks
    if most > second:
        pairs = zip(ranks, activities, strict=True)
        at_fault = tuple(rank for rank, activity in pairs if activity.frame != usual)
    return Cause("unknown", "different_calls", at_fault, ranks)


def _different(situation: Situation, loops: set[int]) -> Cause | None:
    """Return the cause if ranks have different collectives under one number."""
    for rank in sorted(loops):
        for blocked in situation.blocked[rank]:
            entry = blocked.entry
            if entry is None or not entry.sequence:
                continue
            recording = situation.facts.ranks[rank].recording
            assert recording is not None
            name, members = recording.groups[entry.group]
            calls = {
                member: call
                for member in members
                if (call := situation.call_of(member, entry.group, entry.sequence)) is not None
            }
            if len({(call.call, call.peer) for call in calls.values()}) > 1:
                detail = tuple(
                    f"number {entry.sequence} of group {name!r} is {call.call} on "
                    f"{situation.facts.ranks[member].name}"
                    for member, call in sorted(calls.items())
                )
                return Cause(
                    "stuck", "different_calls", tuple(sorted(calls)), tuple(sorted(loops)), detail
                )
    return None


def _unmatched(situation: Situation, loops: set[int]) -> Cause | None:
    """Return the cause if a receive waits, and another message was sent that no receive takes."""
    for rank in sorted(loops):
        for blocked in situation.blocked[rank]:
            entry = blocked.entry
            if entry is None or entry.name != "recv":
                continue
            recording = situation.facts.ranks[rank].recording
            assert recording is not None
            taken = Counter(
                (e.peer, e.tag)
                for e in recording.entries
                if e.name == "recv" and e.group == entry.group and e.slot != entry.slot
            )
            # Receives of earlier messages may have left the recorder.
            begin = recording.entries[0].start if len(recording.entries) >= SLOTS else 0.0
            for other in recording.groups[entry.group][1]:
                sent = situation.facts.ranks[other].recording
                for call in () if sent is None or other == rank else sent.entries:
                    if call.name != "send" or call.group != entry.group or call.peer != rank:
                        continue
                    source = next((peer for peer in (other, -1) if taken[peer, call.tag]), None)
                    if source is not None:
                        taken[source, call.tag] -= 1
                        continue
                    if call.start < begin:
                        continue
                    if (entry.peer, entry.tag) in ((other, call.tag), (-1, call.tag)):
                        continue
                    names = situation.facts.ranks
                    sender = names[entry.peer].name if entry.peer >= 0 else "any rank"
                    at = f" ({_at(call).removeprefix(' at ')})" if call.file else ""
                    detail = (
                        f"{names[rank].name} waits for a message from {sender} with tag "
                        f"{entry.tag}, and no receive matches the message with tag {call.tag} that "
                        f"{names[other].name} has sent to {names[rank].name}{at}",
                    )
                    ranks = tuple(sorted({rank, other}))
                    return Cause("stuck", "unmatched_message", ranks, tuple(sorted(loops)), detail)
    return None


def _of_idle(situation: Situation) -> Cause:
    """Return the cause if no rank waits for another in a call."""
    kinds = {rank: activity.kind for rank, activity in situation.activities.items()}
    ended = tuple(rank for rank, kind in kinds.items() if kind == "ended")
    live = [
        rank.rank
        for rank in situation.facts.ranks
        if rank.is_live and rank.rank not in ended and not situation.serves(rank.rank)
    ]
    for kind in (*_HELD, *_SOFT):
        ranks = tuple(rank for rank in live if kinds[rank] == kind)
        if ranks:
            return Cause("stuck" if kind in _HELD else "slow", kind, ranks, ended)
    return Cause("unknown", "unknown", tuple(live), ended)


def activity_text(situation: Situation, rank: int) -> str:
    """Return the activity of a rank, or the last one before its end, as words after its name."""
    activity = situation.activities[rank]
    if not situation.facts.ranks[rank].is_live:
        return _last_activity(situation, rank)
    waits = situation.blocked.get(rank, [])
    if not waits:
        if situation.serves(rank):
            return f"answers requests{', and computes' * is_busy(situation.facts.ranks[rank])}"
        return activity.text
    # Waits for elements end with the function that makes them.
    functions = [each.wait for each in waits if each.wait.what.startswith(_FUNCTION)]
    if functions:
        return f"is busy with {max(functions, key=lambda wait: len(wait.what)).what}"
    blocked = max(waits, key=lambda each: (each.entry is not None, -each.wait.since))
    where = f" at {activity.frame}" if activity.frame is not None else ""
    if blocked.entry is not None and activity.kind != "waits":  # another thread is in the call
        where = _at(blocked.entry)
    verb = "waits in" if blocked.wait.is_call else "waits for"
    return f"{verb} {blocked.wait.what}{where}"


def _last_activity(situation: Situation, rank: int) -> str:
    """Return the last activity of a rank that has ended."""
    text, last = situation.activities[rank].text, situation.last_operation(rank)
    recording = situation.facts.ranks[rank].recording
    if last is None or recording is None:
        return text
    number = f", number {last.sequence}" if last.sequence else ""
    call = f"{last.call}{number} of group {recording.groups[last.group][0]!r}{_at(last)}"
    if last.end is None and situation.activities[rank].kind == "ended":
        return f"waits in {call}"
    return f"{text}; its last operation was {call}"


def _at(entry: Entry) -> str:
    return f" at {Frame(entry.file, entry.line, '')}" if entry.file else ""
