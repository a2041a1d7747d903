"""One report of those of all ranks. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

from _pytest.reports import TestReport

PHASES = ("setup", "call", "teardown")


@dataclass
class Outcome:
    """What is known of a test after it ran, or was ended.

    Attributes:
        reports: Rank to the reports of its phases; nothing of a rank that did not get to the end.
        trouble: Why the test was ended, if it was.
        stacks: Rank to the stacks of its threads at that time.
        output: What the ranks and the launcher printed outside of tests.
        late: What went wrong when the ranks ended after the test.
        duration: Seconds.
    """

    reports: dict[int, list[TestReport]] = field(default_factory=dict)
    trouble: str = ""
    stacks: dict[int, str] = field(default_factory=dict)
    output: str = ""
    late: str = ""
    duration: float = 0.0

    @property
    def failed(self) -> bool:
        """Whether a rank failed, or the test was ended."""
        return bool(self.trouble) or any(
            report.failed for reports in self.reports.values() for report in reports
        )


def merge(item, count: int, outcome: Outcome) -> list[TestReport]:
    """The reports to show for a test."""
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
    """One report of a phase."""
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
    if isinstance(first.longrepr, list):  # JSON has no tuples; a skip is shown by one
        first.longrepr = tuple(first.longrepr)
    first.sections = [
        (f"{name} (rank {rank})", text)
        for rank, report in reports.items()
        for name, text in report.sections
    ]
    return first


def _ended_text(count, outcome):
    """The text for a test that was ended."""
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
    """Stacks without the frames of the test machinery.

    Args:
        stacks: What faulthandler wrote.

    Returns:
        The text without those lines.
    """
    machinery = ("/_pytest/", "/pluggy/", "/_ranks/")
    lines = [line for line in stacks.splitlines() if not any(part in line for part in machinery)]
    return "\n".join(lines)


def _rank_text(rank, count, report):
    """The failure of one rank, with what it printed."""
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
