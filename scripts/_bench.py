"""Timing of alternating sides, tables and JSON records for the benchmarks."""

import itertools
import json
import platform
import statistics
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from rich.console import Console
from rich.table import Table

PACKAGES = ("mpidist", "numpy", "mpi4py", "mpich", "openmpi", "torch", "tensorflow-cpu")


def alternate(sides, rounds, seconds, before=lambda: None, warm=None):
    """Return the median time of a call of each side.

    The sides take turns, so that all sides meet the same noise. Their order changes from round to
    round.

    Args:
        sides: Functions without arguments, by name.
        rounds: Number of turns of each side.
        seconds: Approximate length of a turn. A turn has 1 to 20,000 calls.
        before: Function to call before each turn, for instance a barrier.
        warm: Functions to call without timing at the start of a turn, by name. They bring the
            memory of the side into the caches.

    Returns:
        The medians over the rounds in seconds, by name.
    """
    calls = {}
    for name, function in sides.items():
        before()
        function()
        begin = time.perf_counter()
        function()
        once = max(time.perf_counter() - begin, 1e-7)
        calls[name] = max(1, min(int(seconds / once), 20000))
    times = {name: [] for name in sides}
    # In a fixed order, each side would always find the caches as the same other side leaves them.
    orders = itertools.cycle(itertools.permutations(sides.items()))
    for order in itertools.islice(orders, rounds):
        for name, function in order:
            before()
            if warm is not None:
                warm[name]()
            begin = time.perf_counter()
            for _ in range(calls[name]):
                function()
            times[name].append((time.perf_counter() - begin) / calls[name])
    return {name: statistics.median(values) for name, values in times.items()}


def repeat(function, count):
    """Return a function that calls another function ``count`` times."""

    def repeated():
        for _ in range(count):
            function()

    return repeated


def size_text(nbytes):
    """Return a number of bytes as a short text: 8 B, 64 KiB, 16 MiB."""
    for unit, factor in (("MiB", 1 << 20), ("KiB", 1 << 10)):
        if nbytes >= factor:
            return f"{nbytes // factor} {unit}"
    return f"{nbytes} B"


def machine():
    """Return the versions of Python and of the packages of a measurement."""
    packages = {}
    for name in PACKAGES:
        try:
            packages[name] = version(name)
        except PackageNotFoundError:
            continue
    return {"python": platform.python_version(), "packages": packages}


def report(title, columns, rows, facts, path):
    """Print a table, and write it as JSON if a path is given.

    Args:
        title: Title of the table.
        columns: Names of the columns. The first column is text, the others are numbers or None.
        rows: Lists of values, one list for each row.
        facts: Further entries of the JSON record.
        path: Path of the JSON file, or None.
    """
    table = Table(title=title)
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index == 0 else "right", no_wrap=True)
    for row in rows:
        table.add_row(row[0], *("-" if value is None else f"{value:,.2f}" for value in row[1:]))
    Console(width=120).print(table)
    if path is not None:
        record = {"title": title, "columns": columns, "rows": rows, **facts, **machine()}
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(json.dumps(record, indent=2) + "\n")
