"""Executors carry Ops out; here, the one that hands them to MPI on host memory."""

from mpidist.executor.host import HostExecutor
from mpidist.executor.request_work import RequestWork, backend_error

__all__ = ["HostExecutor", "RequestWork", "backend_error"]
