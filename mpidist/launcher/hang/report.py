"""The report on a hang, as text and as JSON."""

from __future__ import annotations

import itertools
import re
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mpidist.launcher.hang.activity import children_of, is_of_user, line_of_user
from mpidist.launcher.hang.causes import (
    OF_STRATEGY,
    Blocked,
    Cause,
    Situation,
    activity_text,
    find_cause,
)
from mpidist.launcher.hang.facts import Frame, Rank, Stack, gather

_MOST_PLACES = 12  # merged stacks in the text
_MOST_FRAMES = 4
_MOST_UNENDED = 4
_MOST_NAMES = 3
_COLUMNS = 98
# Groups of the managers of checkpoints.
_OF_MANAGERS = re.compile(rf"of group ['\"](?:mpidist\.Checkpoints|checkpoints \d+{OF_STRATEGY})")
_ADVICE = {
    "missing_call": "Every rank of a group must make the same calls: look for a branch, an "
    "exception or a loop of another length on {ranks}.",
    "different_calls": "All ranks must make the same calls in the same order, with the same shape, "
    "dtype and root.",
    "ended": "Every rank must make the same calls: look for an early return, or fewer batches.",
    "unmatched_message": "Give the send and the receive the same tag, and each the rank of the "
    "other.",
    "computing": "The code may be slow, or an endless loop: ask again, and compare the lines.",
    "sleeping": "The code may wait for an event that never comes: ask again, and compare the "
    "lines.",
    "thread": "Make the thread a daemon, or end it before the end of the script.",
    "debugger": "Continue in the debugger, or end it.",
    "socket": "Look at the process that should send data.",
    "accept": "Look at the process that should connect.",
    "event_loop": "A coroutine may await something that never comes: ask again, and compare the "
    "lines.",
    "child": "Look at the child process with py-spy or ps.",
    "window_lock": "Another rank may hold the lock of the window: unlock it before a call that "
    "waits for other ranks.",
    "swapped": "Give the job more memory, or start fewer ranks on the host.",
    "waiting": "Ask again, and look at the tasks that the ranks wait for.",
    "unknown": "Look at the lines below, or ask again.",
}


@dataclass(frozen=True)
class Place:
    """Ranks with the same activity and stack.

    Attributes:
        ranks: The ranks.
        names: Their names.
        doing: Their activity, in words.
        frames: The stack of one of them, innermost first.
    """

    ranks: tuple[int, ...]
    names: str
    doing: str
    frames: tuple[Frame, ...]


@dataclass(frozen=True)
class Report:
    """The report on a job that may hang.

    Attributes:
        folder: The run folder.
        cause: The cause.
        text: The cause in one paragraph.
        evidence: Facts behind it, one a line.
        places: The activities of the ranks, merged.
        unanswered: Missing facts, one a line.
        silent: The ranks that did not answer, and have not moved.
        alive: The other ranks that have not ended.
        waited_s: The longest wait of a blocked rank, in seconds.
    """

    folder: Path
    cause: Cause
    text: str
    evidence: tuple[str, ...]
    places: tuple[Place, ...]
    unanswered: tuple[str, ...]
    silent: tuple[int, ...]
    alive: tuple[int, ...]
    waited_s: float

    def as_json(self) -> dict[str, Any]:
        """Return the report as an object for JSON."""
        return {
            "folder": str(self.folder),
            "verdict": self.cause.verdict,
            "cause": self.cause.kind,
            "ranks": list(self.cause.ranks),
            "text": self.text,
            "evidence": list(self.evidence),
            "stacks": [
                {
                    "ranks": list(place.ranks),
                    "doing": place.doing,
                    "frames": [list(asdict(frame).values()) for frame in place.frames],
                }
                for place in self.places
            ],
            "unanswered": list(self.unanswered),
        }

    def lines(self) -> list[str]:
        """Return the report as lines of text."""
        lines = [*textwrap.wrap(self.text, _COLUMNS), ""]
        lines += [f"  {line}" for line in self.evidence if line not in self.text][:_MOST_PLACES]
        for place in self.places[:_MOST_PLACES]:
            doing = place.doing.removeprefix("waits in ").removeprefix("is ")
            lines.append(f"  {place.names}: {doing}")
            shown = list(filter(is_of_user, place.frames))
            lines += [f"      {frame} in {frame.function}" for frame in shown[1:_MOST_FRAMES]]
        if len(self.places) > _MOST_PLACES:
            lines.append(f"  and {len(self.places) - _MOST_PLACES} more places; --json shows all")
        lines += [f"  {line}" for line in self.unanswered]
        return lines


def report_on(folder: Path) -> Report:
    """Ask the ranks of a job, and return the report. This takes one to eight seconds.

    Raises:
        OSError: The folder is not that of a job, or cannot be written.
        ValueError: A file is not JSON.
    """
    situation = Situation(gather(folder))
    cause = find_cause(situation)
    silent = _silent(situation)
    return Report(
        folder,
        cause,
        _paragraph(situation, cause),
        tuple(dict.fromkeys(map(_sentence, (*cause.detail, *_unended(situation, cause))))),
        tuple(_places(situation)),
        tuple(_unanswered(situation)),
        tuple(silent),
        tuple(r.rank for r in situation.facts.ranks if r.is_live and r.rank not in silent),
        max((situation.facts.time - since for since in situation.wait_starts()), default=0.0),
    )


def _paragraph(situation: Situation, cause: Cause) -> str:
    """Return the cause in one paragraph."""
    if cause.verdict == "ended":
        over = "The job has ended." if situation.facts.is_over else "The job is ending."
        if situation.facts.ended_meanwhile:
            over = "The job ended while it was asked."
        return " ".join([over, *map(_sentence, cause.detail)])
    if cause.verdict == "moving":
        moving = _names(sorted(situation.moving))
        return f"The job is moving: {moving} made calls or steps since the report began."
    parts = []
    if cause.kind in ("deadlock", "different_calls", "unknown", "unmatched_message"):
        opening = {
            "deadlock": f"{_upper(_names(cause.ranks))} wait for each other.",
            "different_calls": "The ranks make different calls.",
            "unmatched_message": "No receive matches a message that was sent.",
            "unknown": "The cause is not known.",
        }[cause.kind]
        if cause.verdict == "unknown" and cause.kind != "unknown":
            opening = f"Perhaps {opening[0].lower()}{opening[1:]}"
        parts.append(opening)
        is_between_all = cause.kind in ("unmatched_message", "different_calls")
        parts += _sentences(situation, cause.waiting if is_between_all else cause.ranks)
    else:
        others = [rank for rank in cause.waiting if rank not in cause.ranks]
        if others:
            first, *more = _sentences(situation, others)
            parts += [f"{first[:-1]}, for {_all_names(situation, cause.ranks)}.", *more]
        elif not cause.ranks:
            parts.append("No rank waits for another in a call.")
        parts += _sentences(situation, cause.ranks)
    if cause.detail:
        parts.append(_sentence(cause.detail[0]))
    advice = _advice(situation, cause)
    if cause.verdict == "unknown" and cause.kind != "unknown":
        advice = f"If the lines are the same when you ask again: {advice[0].lower()}{advice[1:]}"
    return " ".join(part for part in (*parts, advice) if part)


def _advice(situation: Situation, cause: Cause) -> str:
    """Return the next step of the user, in one or a few sentences."""
    if cause.kind == "deadlock":
        return _advice_on_cycle(situation, cause)
    if cause.kind == "lock":
        texts = dict.fromkeys(_behind_lock(situation.facts.ranks[rank]) for rank in cause.ranks)
        return " ".join(list(texts)[:_MOST_NAMES])
    if cause.kind == "waiting" and cause.verdict == "slow":
        return "The function may be slow, or hang: ask again, and compare the elements."
    if cause.kind == "file":
        return " ".join(list(dict.fromkeys(_holders(situation, cause.ranks)))[:_MOST_NAMES])
    advice = _ADVICE.get(cause.kind, "").format(ranks=_names(cause.ranks))
    if cause.kind == "missing_call" and _are_in_messages(_waits_of(situation, cause)):
        advice += " Or the message was not sent, or was sent to another rank."
    return advice


def _waits_of(situation: Situation, cause: Cause) -> list[Blocked]:
    """Return the waits of the ranks at fault."""
    return [wait for rank in cause.ranks for wait in situation.blocked.get(rank, [])]


def _are_in_messages(waits: Iterable[Blocked]) -> bool:
    """Return whether one of the waits is that of a send or a receive."""
    return any(wait.entry is not None and not wait.entry.sequence for wait in waits)


def _advice_on_cycle(situation: Situation, cause: Cause) -> str:
    """Return the advice on ranks that wait for each other."""
    waits = _waits_of(situation, cause)
    whats = [wait.wait.what for wait in waits]
    if any(map(_OF_MANAGERS.search, whats)):
        return (
            "All ranks must make the manager of checkpoints, and make the same calls on it: "
            "restore(), step(), save() and close()."
        )
    if any(OF_STRATEGY in what for what in whats):
        return (
            "Make the other call after the same step on all workers. A worker that makes no more "
            "steps must call finish() of its strategy before it waits for other workers."
        )
    if _are_in_messages(waits) or not waits:
        return (
            "Compare the peers and the tags of the messages, or change the order of the calls on "
            "one rank, or use isend and irecv."
        )
    return (
        "Either a rank has skipped a call (look for a branch or an exception), or the ranks use "
        "the groups in different orders."
    )


def _behind_lock(rank: Rank) -> str:
    """Return the threads and child processes for which a rank may wait, in words."""
    texts = ["The lines of its other threads are below."]
    if all(line_of_user(thread.stack) is None for thread in rank.other_threads):
        texts = [
            f"No other thread of {rank.name} runs code of the script: the thread that should fill "
            "the queue, or release the lock, may have ended."
        ]
    if children := children_of(rank):
        listed = ", ".join(children[:_MOST_NAMES]) + ", ..." * (len(children) > _MOST_NAMES)
        texts.append(
            f"Look at its child processes with py-spy or ps: {listed}. If another one has died, "
            "its result never comes."
        )
    else:
        texts.append("It has no child processes.")
    return " ".join(texts)


def _holders(situation: Situation, ranks: Iterable[int]) -> Iterable[str]:
    """Yield the holder of each lock of a file for which some ranks wait, in words."""
    looks = [rank.look for rank in situation.facts.ranks if rank.look is not None]
    for rank in ranks:
        own = situation.facts.ranks[rank].look
        if own is None or not own["lock"]:
            continue
        holder = own["lock"]["holder"]
        if not holder:
            yield "No process of its host has the lock: run lslocks on the other hosts."
            continue
        of_ranks = [
            other["rank"]
            for other in looks
            if other["host"] == own["host"]
            and (other["pid"] == holder or str(holder) in other["children"])
        ]
        process = f"process {holder} on {own['host']}"
        if of_ranks:
            process = f"{situation.facts.ranks[of_ranks[0]].name} ({process})"
        yield f"{_upper(process)} has the lock."


def _sentences(situation: Situation, ranks: Iterable[int]) -> list[str]:
    """Return a sentence for each activity of the ranks."""
    by_text: dict[str, list[int]] = {}
    for rank in ranks:
        by_text.setdefault(activity_text(situation, rank), []).append(rank)
    sentences = [f"{_subject(situation, some)} {text}." for text, some in by_text.items()]
    if len(sentences) > 3:
        sentences[3:] = ["The others are below."]
    return sentences


def _upper(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}"


def _sentence(text: str) -> str:
    return f"{_upper(text.removesuffix('.'))}."


def _subject(situation: Situation, ranks: Sequence[int]) -> str:
    """Return the names of ranks, at the beginning of a sentence."""
    if len(ranks) == 1:
        return _upper(situation.facts.ranks[ranks[0]].name)
    return f"Each of {_all_names(situation, ranks)}"


def _all_names(situation: Situation, ranks: Sequence[int]) -> str:
    """Return the names of a few ranks with their tasks, and the numbers of many ranks."""
    names = [situation.facts.ranks[rank].name for rank in ranks]
    if len(ranks) > _MOST_NAMES or not any("(" in name for name in names):
        return _names(ranks)
    return f"{', '.join(names[:-1])} and {names[-1]}" if len(names) > 1 else names[0]


def _names(ranks: Sequence[int]) -> str:
    """Return ranks in words: ``rank 3``, ``ranks 0-2 and 5``."""
    runs: list[str] = []
    for _, run in itertools.groupby(enumerate(sorted(ranks)), lambda pair: pair[1] - pair[0]):
        numbers = [number for _, number in run]
        runs += [f"{numbers[0]}-{numbers[-1]}"] if len(numbers) > 2 else map(str, numbers)
    listed = " and ".join(runs) if len(runs) == 2 else ", ".join(runs)
    return f"rank{'s' * (len(ranks) > 1)} {listed}"


def _places(situation: Situation) -> list[Place]:
    """Return the activities of the ranks, merged where they are the same."""
    now = situation.facts.time
    merged: dict[tuple[str, Stack], list[int]] = {}
    for each in situation.facts.ranks:
        stack = each.stacks[-1] if each.stacks else ()
        frame = line_of_user(stack)
        inside = stack[stack.index(frame) :] if frame is not None else stack
        merged.setdefault((activity_text(situation, each.rank), inside), []).append(each.rank)
    places = []
    for (doing, stack), ranks in merged.items():
        starts = [each.wait.since for rank in ranks for each in situation.blocked.get(rank, [])]
        since = f", for {now - min(starts):.0f} s" if starts else ""
        names = _all_names(situation, ranks)
        places.append(Place(tuple(ranks), names, doing + since, stack))
        for rank in ranks:
            places += _threads(situation, situation.facts.ranks[rank])
    return places


def _threads(situation: Situation, rank: Rank) -> list[Place]:
    """Return the other threads of a rank that run code of the user, if it waits for one."""
    if situation.activities[rank.rank].kind != "lock":
        return []
    found = []
    for thread in rank.other_threads:
        frame = line_of_user(thread.stack)
        if frame is not None:
            name = f"thread {thread.name!r}" if thread.name else "another thread"
            found.append(Place((rank.rank,), rank.name, f"{name} is at {frame}", thread.stack))
    return found


def _unended(situation: Situation, cause: Cause) -> list[str]:
    """Return the asynchronous operations of the ranks at fault that have not ended."""
    lines: list[str] = []
    for facts in (situation.facts.ranks[rank] for rank in cause.ranks):
        shown = {wait.slot for wait in facts.waits}
        lines += (
            f"{facts.name} has started {entry.call}, which has not ended"
            for entry in (() if facts.recording is None else facts.recording.entries)
            if entry.end is None and entry.slot not in shown
        )
    return lines[:_MOST_UNENDED]


def _is_mute(rank: Rank) -> bool:
    return rank.look is None and rank.is_live


def _silent(situation: Situation) -> list[int]:
    """Return the ranks that did not answer, and have not moved."""
    if situation.facts.is_over or situation.facts.is_ending:
        return []
    mute = [rank.rank for rank in situation.facts.ranks if _is_mute(rank)]
    return [rank for rank in mute if rank not in situation.moving]


def _unanswered(situation: Situation) -> list[str]:
    """Return the missing facts."""
    if situation.facts.is_over:
        return ["The job is over, so there are no stacks."]
    ranks, lines = situation.facts.ranks, []
    silent = _silent(situation)
    late = [rank.rank for rank in ranks if _is_mute(rank) and rank.rank in situation.moving]
    if late:
        lines.append(f"{_names(late)} did not answer in time: the host may be busy.")
    if silent:
        text = "did not answer: the host may be down, or lack the run folder"
        lines.append(f"{_names(silent)} {text}")
    mute = [
        rank.rank
        for rank in ranks
        if rank.look is not None
        and not rank.stacks
        and rank.look["has_handler"]
        and rank.look["state"] not in ("T", "t")
    ]
    if mute:
        lines.append(f"No Python stack of {_names(mute)} could be read.")
    return lines
