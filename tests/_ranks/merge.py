"""Merging of the reports of all ranks into one report for each phase of a test."""

from __future__ import annotations

from dataclasses import dataclass, field

from _pytest.reports import TestReport

PHASES = ("setup", "call", "teardown")


@dataclass
class Outcome:
    """The result of a test that has ended or was ended early.

    Attributes:
        reports: Rank to the reports of its phases. A rank that did not finish has no entry.
        trouble: Reason for the early end, or an empty string.
        stacks: Rank to the stacks of its threads at the early end.
        output: Output of the ranks and the launcher outside of tests.
        late: Problem in the end of the ranks after the test, or an empty string.
        duration: Duration in seconds.
    """

    reports: dict[int, list[TestReport]] = field(default_factory=dict)
    trouble: str = ""
    stacks: dict[int, str] = field(default_factory=dict)
    output: str = ""
    late: str = ""
    duration: float = 0.0

    @property
    def failed(self) -> bool:
        """True if a rank failed or the test was ended early."""
        return bool(self.trouble) or any(
            report.failed for reports in self.reports.values() for report in reports
        )


def merge(item, count: int, outcome: Outcome) -> list[TestReport]:
    """Return the reports to show for a test."""
    if outcome.trouble:
        return [_report(item, "call", "failed", outcome.duration, _ended_text(count, outcome))]
    merged = []
    for phase in PHASES:
        of_phase = {
            rank: report
            for rank, reports in sorted(outcome.reports.items())
            for report in reports
            if report.when == phase
        }
        if of_phase:
            merged.append(_merge_phase(item, count, phase, of_phase))
    if outcome.late:
        text = f"after the test: {outcome.late}\n{outcome.output}"
        merged = [report for report in merged if report.when != "teardown"]
        merged.append(_report(item, "teardown", "failed", 0.0, text))
    return merged


def _merge_phase(item, count, phase, reports):
    """Merge the reports of one phase."""
    duration = max(report.duration for report in reports.values())
    failed = {rank: report for rank, report in reports.items() if report.failed}
    if failed:
        text = "\n".join(_rank_text(rank, count, report) for rank, report in failed.items())
        return _report(item, phase, "failed", duration, text)
    kinds = {(report.outcome, hasattr(report, "wasxfail")) for report in reports.values()}
    if len(kinds) > 1 or len(reports) < count:
        skipped = [rank for rank, report in reports.items() if report.skipped]
        text = f"skipped on ranks {skipped} of {count} alone: all must skip, or none"
        return _report(item, phase, "failed", duration, text)
    first = reports[min(reports)]
    first.duration = duration
    first.nodeid = item.nodeid
    if isinstance(first.longrepr, list):  # JSON has no tuples; pytest expects one for a skip
        first.longrepr = tuple(first.longrepr)
    first.sections = [
        (f"{name} (rank {rank})", text)
        for rank, report in reports.items()
        for name, text in report.sections
    ]
    return first


def _ended_text(count, outcome):
    """Return the text for a test that was ended early."""
    parts = [outcome.trouble]
    for rank in range(count):
        failed = [report for report in outcome.reports.get(rank, []) if report.failed]
        parts += [_rank_text(rank, count, report) for report in failed]
        if rank in outcome.stacks and rank not in outcome.reports:
            parts += [_line(f"rank {rank} of {count}: stacks"), own_frames(outcome.stacks[rank])]
    finished = [rank for rank in range(count) if rank in outcome.reports]
    parts.append(f"ranks that had ended the test: {finished or 'none'}")
    if outcome.output:
        parts.append(f"{_line('output of the launch')}\n{outcome.output}")
    return "\n".join(parts)


def own_frames(stacks):
    """Remove the frames of the test machinery from stacks.

    Args:
        stacks: Output of faulthandler.

    Returns:
        The text without the lines of those frames.
    """
    machinery = ("/_pytest/", "/pluggy/", "/_ranks/")
    lines = [line for line in stacks.splitlines() if not any(part in line for part in machinery)]
    return "\n".join(lines)


def _rank_text(rank, count, report):
    """Return the failure and the captured output of one rank."""
    parts = [_line(f"rank {rank} of {count}: {report.when}"), report.longreprtext]
    for name, text in report.sections:
        parts += [_line(f"rank {rank}: {name}"), text.rstrip("\n")]
    return "\n".join(parts)


def _line(title):
    return f" {title} ".center(80, "=")


def _report(item, phase, outcome, duration, text):
    return TestReport(
        nodeid=item.nodeid,
        location=item.location,
        keywords=dict.fromkeys(item.keywords, 1),
        outcome=outcome,
        longrepr=text,
        when=phase,
        duration=duration,
    )
