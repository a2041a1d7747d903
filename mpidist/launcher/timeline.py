"""``mpidist timeline``: merge the timelines of a job's ranks into one file for Perfetto."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the subcommand to the command line."""
    parser = subparsers.add_parser(
        "timeline",
        help="merge the timelines of a job's ranks",
        description="Merge the timelines of a job's ranks into one file, for "
        "https://ui.perfetto.dev or chrome://tracing.",
        epilog="Ranks write timelines if MPIDIST_TIMELINE names a folder.",
        allow_abbrev=False,
    )
    parser.add_argument("folder", help="the folder of MPIDIST_TIMELINE")
    parser.add_argument(
        "-o", "--output", metavar="FILE", help="by default timeline.json in the folder"
    )
    parser.set_defaults(run=lambda namespace: _run(parser, namespace))


def events_of(path: Path) -> Iterator[dict[str, object]]:
    """Yield the events in the file of a rank, without a last line that was not written whole.

    Raises:
        ValueError: The file is not a timeline.
    """
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: {error}") from None
    if lines == [""]:
        return
    if lines[0] != "[":
        raise ValueError(f"{path} is not the timeline of a rank")
    for number, line in enumerate(lines[1:], 2):
        if line:
            try:
                yield json.loads(line.removesuffix(","))
            except json.JSONDecodeError as error:
                if number < len(lines):
                    raise ValueError(f"{path}, line {number}: {error}") from None


def _run(parser: argparse.ArgumentParser, namespace: argparse.Namespace) -> int:
    folder = Path(namespace.folder)
    output = folder / "timeline.json" if namespace.output is None else Path(namespace.output)
    paths = sorted(folder.glob("timeline-*.json"))
    if not paths:
        parser.error(f"{folder} has no timelines: was MPIDIST_TIMELINE set to it?")
    try:
        events = [event for path in paths for event in events_of(path)]
        output.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))
    except (OSError, ValueError) as error:
        parser.error(str(error))
    sys.stdout.write(f"{output}: {len(events)} events of {len(paths)} rank(s)\n")
    return 0
