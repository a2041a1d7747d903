"""A leak check of endpoints: many requests of every kind."""

from __future__ import annotations

import json
import time

import numpy as np
import pytest

from _cases.endpoints import LIMIT_S, as_bytes, ask, pattern
from _cases.footprint import Footprint
from mpidist import Reply, errors

REQUESTS = 10_000
WARM = 2_000


def serve_footprint(endpoint):
    """Serve the resource use of this process to clients."""

    def footprint(request):
        return Reply(Footprint.of(endpoint).pack())

    endpoint.register("see", {"Footprint": footprint})


def check_leaks(client, address, key=b""):
    """Check that requests leave no resources behind in client and server.

    The first WARM of the REQUESTS requests run before the first measurement.
    """
    _requests(client, address, key, 0, WARM)
    before = _look(client, address)
    _requests(client, address, key, WARM, REQUESTS)
    # Pending messages and ending threads are gone at a later look. Leaks remain.
    deadline = time.monotonic() + LIMIT_S
    while True:
        after = _look(client, address)
        growth = [now.growth(then) for now, then in zip(after, before, strict=True)]
        if not any(growth):
            return
        assert time.monotonic() < deadline, f"client and server keep {growth}"


def _requests(client, address, key, first, last):
    data = pattern(65_536)
    for number in range(first, last):
        kind = number % 20
        if kind == 0:
            (got,) = ask(client, address, "Echo", b"", [data]).buffers
            np.testing.assert_array_equal(as_bytes(got), data)
        elif kind == 5:
            with pytest.raises(errors.InvalidArgumentError):
                ask(client, address, "Fail", json.dumps(["ValueError", "bad"]).encode())
        elif kind == 10:
            with pytest.raises(errors.UnimplementedError):
                ask(client, address, "Unknown", b"", [data])
        elif kind == 13:
            with pytest.raises(errors.DeadlineExceededError):
                ask(client, address, "Never", b"", [data], timeout=1e-4)
        elif kind == 17:  # the reply arrives, with a buffer, after the deadline of the call
            name = key + b"%d" % number
            with pytest.raises(errors.DeadlineExceededError):
                ask(client, address, "Later", name, timeout=1e-4)
            assert ask(client, address, "Release", name).body == b"1"
        else:
            body = b"%d" % number
            assert ask(client, address, "Echo", body).body == body


def _look(client, address):
    """Return the footprints of client and server, after late replies have arrived."""
    for _ in range(200):
        ask(client, address, "Echo")
    reply = client.call(address, "see/Footprint").result(LIMIT_S)
    return Footprint.of(client), Footprint.unpack(reply.body)
