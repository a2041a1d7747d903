"""What the benchmarks share: alternating timing, tables, and JSON."""

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
    """Median seconds a call of each side, measured in turns so that all meet the same noise.

    The order changes from round to round.

    Args:
        sides: Name to a function without arguments.
        rounds: How often each side has its turn.
        seconds: About how long a turn is; a turn is one call at least.
        before: Called before each turn, for instance a barrier.
        warm: Name to what is called, untimed, at the beginning of a turn: so its
            own memory is in the caches.

    Returns:
        Name to the median over the rounds.
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
    # A side that always follows the same other one finds the caches as that one leaves them.
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


def size_text(nbytes):
    """A number of bytes, short: 8 B, 64 KiB, 16 MiB."""
    for unit, factor in (("MiB", 1 << 20), ("KiB", 1 << 10)):
        if nbytes >= factor:
            return f"{nbytes // factor} {unit}"
    return f"{nbytes} B"


def machine():
    """What the figures were measured with."""
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
        title: Of the table.
        columns: Names of the columns; the first is text, the others are numbers or None.
        rows: One list a row.
        facts: What else belongs into the JSON.
        path: Of the JSON file, or None.
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
