"""The pytest of one rank. It runs the tests that the outer pytest names."""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import socket
from pathlib import Path

import pytest

STACKS_SIGNAL = signal.SIGUSR2


def stacks_path(folder: Path, rank: int) -> Path:
    """Return the file for the stacks that a rank writes at STACKS_SIGNAL."""
    return folder / f"stacks-{rank}.txt"


def configure(config):
    """Turn a pytest into the pytest of a rank."""
    config.pluginmanager.register(Inner(config), "ranks-inner")
    # The outer pytest reports the results. Output of the ranks would only be noise.
    reporter = config.pluginmanager.getplugin("terminalreporter")
    if reporter is not None:
        config.pluginmanager.unregister(reporter)


def own_rank() -> int:
    """Return the rank of this process from the launcher's environment, without MPI."""
    from mpidist.launcher.vendors import VENDORS

    names = [v.rank_variable for v in VENDORS if v.rank_variable in os.environ]
    return int(os.environ[names[0]])


class Inner:
    """The plugin of a rank. It connects to the outer pytest and follows its orders."""

    def __init__(self, config):
        self._config = config
        self._reports = []
        self._rank = own_rank()
        path = Path(config.option.rank_socket)
        self._stacks = stacks_path(path.parent, self._rank).open("w")
        faulthandler.register(STACKS_SIGNAL, file=self._stacks, all_threads=True)
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.connect(str(path))
        self._orders = self._socket.makefile("r", encoding="utf-8")

    def _say(self, **message):
        data = json.dumps({"rank": self._rank, "pid": os.getpid(), **message}, default=str)
        self._socket.sendall(data.encode() + b"\n")

    def pytest_runtest_logreport(self, report):
        data = self._config.hook.pytest_report_to_serializable(config=self._config, report=report)
        self._reports.append(data)

    def pytest_collectreport(self, report):
        if report.failed:
            print(report.longreprtext, flush=True)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session):
        items = {item.nodeid: item for item in session.items}
        self._say(kind="ready")
        for line in self._orders:
            order = json.loads(line)
            item, follower = items[order["run"]], items.get(order["next"])
            self._reports.clear()
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=follower)
            self._say(kind="done", reports=self._reports)
        return True

    def pytest_unconfigure(self):
        # The socket stays open until the process ends, so a closed socket means an ended rank.
        faulthandler.unregister(STACKS_SIGNAL)
        self._stacks.close()
