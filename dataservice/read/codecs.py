"""Which compression a consumer asks of which worker."""

from __future__ import annotations

import time
from collections.abc import Sequence

from dataservice.compression import choose_codec
from dataservice.proto import dataservice_pb2 as pb
from dataservice.wire import PROBE_BYTES, Array
from mpidist import Endpoint, Work

_PROBE_LIMIT_S = 10.0


class Codecs:
    """The codec for each worker: as the user says, or as a probe of the way and the elements says.

    Args:
        name: As given to ``distribute``.
        endpoint: Calls go out from here.
    """

    def __init__(self, name: str | None, endpoint: Endpoint) -> None:
        self._auto = name == "AUTO"
        self._name = "" if self._auto or name is None else name
        self._endpoint = endpoint
        self._chosen: dict[str, str] = {}
        self._probes: dict[str, tuple[Work, list[float], list[Array]]] = {}

    def of(self, worker: str) -> str:
        """Local. The codec for requests to a worker; empty for none."""
        return self._chosen.get(worker, self._name)

    def learn(self, worker: str, buffers: Sequence[Array]) -> None:
        """Local. Look at what has come from a worker, the first time that there is something."""
        if not self._auto or worker in self._chosen:
            return
        if worker in self._probes:
            self._look(worker)
        elif buffers:
            own = self._endpoint.address
            if own.protocol != "tcp" or f"://{own.host}:" in worker:
                self._chosen[worker] = ""  # memory is shared, or MPI is faster
                return
            body = pb.ProbeRequest(nbytes=PROBE_BYTES).SerializeToString()
            work = self._endpoint.call(worker, "data_worker/Probe", body, timeout=_PROBE_LIMIT_S)
            times = [time.monotonic()]
            # When it is looked at depends on when there is an element next.
            work.add_done_callback(lambda _: times.append(time.monotonic()))
            self._probes[worker] = (work, times, list(buffers))

    def _look(self, worker: str) -> None:
        work, times, first = self._probes[worker]
        if len(times) < 2:
            return
        del self._probes[worker]
        if work.exception() is None:
            rate = PROBE_BYTES / max(times[1] - times[0], 1e-9)
            self._chosen[worker] = choose_codec("AUTO", "tcp", rate, first) or ""
        else:
            self._chosen[worker] = ""
