"""Local mode: a worker and its parameter server in one process."""

from __future__ import annotations

from strategy.host import LocalHost
from strategy.parameter_server import ParameterServer


def local_host() -> LocalHost:
    """Local. A cluster of one ps, which serves on a thread, and one worker."""
    host = LocalHost()
    ParameterServer(host)
    host.endpoint.serve_in_thread()
    return host
