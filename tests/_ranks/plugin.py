"""Hooks of the outer pytest. In a rank, the hooks of :mod:`_ranks.inner` are added."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from _ranks import inner
from _ranks.launch import Key, Launches
from _ranks.merge import own_frames

DEFAULT_COUNTS = (2, 3)
DEFAULT_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class Wish:
    """The arguments of a test's mark ``ranks``."""

    counts: tuple[int, ...]
    timeout_s: float
    own_launch: bool

    @classmethod
    def of(cls, node) -> Wish | None:
        mark = node.get_closest_marker("ranks")
        if mark is None:
            return None

        def read(*counts, timeout=DEFAULT_TIMEOUT_S, own_launch=False):
            return cls(counts or DEFAULT_COUNTS, float(timeout), own_launch)

        return read(*mark.args, **mark.kwargs)


def pytest_addoption(parser):
    group = parser.getgroup("ranks")
    group.addoption("--long", action="store_true", help="run the tests marked long, and only them")
    group.addoption("--gpu", action="store_true", help="run the tests marked gpu, and only them")
    group.addoption("--rank-socket", metavar="PATH", help="where a rank gets its orders")


@pytest.hookimpl(trylast=True)  # after the terminal reporter, which a rank unregisters
def pytest_configure(config):
    config.addinivalue_line(
        "markers",
        "ranks(*counts, timeout=60, own_launch=False): run the test on every rank of a launched "
        "world, once per number of ranks",
    )
    config.addinivalue_line("markers", "alone: no other job may start on this host meanwhile")
    config.addinivalue_line("markers", "long: takes long; runs only with --long")
    config.addinivalue_line("markers", "gpu: needs CuPy and a GPU; runs only with --gpu")
    if config.option.rank_socket:
        inner.configure(config)
    else:
        config.pluginmanager.register(Outer(config), "ranks-outer")


@pytest.fixture(autouse=True)
def rank_count(request):
    """Return the number of ranks of the launched world, or 0 in a test without ranks."""
    return getattr(request, "param", 0)


def pytest_generate_tests(metafunc):
    wish = Wish.of(metafunc.definition)
    if wish is not None:
        ids = [f"n{count}" for count in wish.counts]
        metafunc.parametrize("rank_count", wish.counts, ids=ids, indirect=True)


class Outer:
    """The plugin of the outer pytest. It sorts the tests, and runs tests with ranks in worlds."""

    def __init__(self, config):
        self._config = config
        self._launches = Launches(config)

    def pytest_collection_modifyitems(self, items):
        chosen = [item for item in items if self._is_wanted(item)]
        dropped = [item for item in items if not self._is_wanted(item)]
        if dropped:
            self._config.hook.pytest_deselected(items=dropped)
        files: dict[object, int] = {}
        for number, item in enumerate(chosen):
            files.setdefault(item.path, number)

        def place(item):
            # A world is slow to start, so all its tests run together, across files. Within a file,
            # tests without ranks come last: after the last test of a file, pytest tears down the
            # fixtures of the file, and tests that run in a world have not set them up here.
            launch = _launch_of(item)
            shared = launch is not None and launch.own is None
            return not shared, launch.count if shared else 0, files[item.path], launch is None

        items[:] = sorted(chosen, key=place)
        self._launches.plan(items, _launch_of)

    def _is_wanted(self, item):
        wishes = (("long", self._config.option.long), ("gpu", self._config.option.gpu))
        return all((item.get_closest_marker(mark) is not None) == wish for mark, wish in wishes)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item, nextitem):
        launch = _launch_of(item)
        if launch is None:
            return None
        follower = nextitem if nextitem is not None and _launch_of(nextitem) == launch else None
        item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        wish = Wish.of(item)
        for report in self._launches.run(launch, item, follower, wish.timeout_s):
            item.ihook.pytest_runtest_logreport(report=report)
        item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
        return True

    def pytest_keyboard_interrupt(self):
        """Show the stacks of the ranks before their world ends."""
        writer = self._config.get_terminal_writer()
        for rank, text in sorted(self._launches.stacks().items()):
            writer.line(f"\nrank {rank}: stacks\n{own_frames(text)}")

    def pytest_sessionfinish(self):
        self._launches.close()


def _launch_of(item):
    """Return the key of a test's world, or None for a test without ranks."""
    wish = Wish.of(item)
    if wish is None:
        return None
    count = item.callspec.params["rank_count"]
    return Key(count, item.nodeid if wish.own_launch else None)
