"""Messages over tcp of more than 2 GiB, which no 32-bit count holds."""

import numpy as np
import pytest
from _cases.endpoints import Service, ask, pattern

from mpidist import Address, Endpoint, Reply
from mpidist.rpc import tcp_connection
from mpidist.rpc.tcp import TcpTransport

SIZE = (2 << 30) + 12_345
PLACES = (0, 1, 1 << 20, (2 << 30) - 1, 2 << 30, (2 << 30) + 1, SIZE - 1)
LIMIT_S = 600.0


@pytest.mark.long
@pytest.mark.parametrize("secret", [None, "a secret"], ids=["clear", "curve"])
@pytest.mark.parametrize("direction", ["request", "reply"])
def test_large(secret, direction):
    transports = [TcpTransport(secret), TcpTransport(secret)]
    array = np.zeros(SIZE, np.uint8)
    array[list(PLACES)] = range(1, len(PLACES) + 1)
    seen = []

    def take(request):
        seen.append(request.buffers[0].nbytes)
        return Reply(request.buffers[0][list(PLACES)].tobytes())

    with Endpoint(transports[0]) as server, Endpoint(transports[1]) as client:
        server.register("large", {"Take": take, "Give": lambda request: Reply(b"", [array])})
        address = Address("tcp", "127.0.0.1", server.address.port)
        server.serve_in_thread()
        if direction == "request":
            work = client.call(address, "large/Take", b"", [array], timeout=LIMIT_S)
            found = work.result().body
            assert seen == [SIZE]
        else:
            (got,) = client.call(address, "large/Give", timeout=LIMIT_S).result().buffers
            assert got.nbytes == SIZE
            found = got[list(PLACES)].tobytes()
        assert found == bytes(range(1, len(PLACES) + 1))
    for transport in transports:
        transport.close()


def test_buffers_that_travel_in_chunks(monkeypatch):
    monkeypatch.setattr(tcp_connection, "CHUNK_BYTES", 1000)
    monkeypatch.setattr(tcp_connection, "_open_offered", lambda reference: None)
    transports = [TcpTransport(None), TcpTransport(None)]
    with Endpoint(transports[0]) as server, Endpoint(transports[1]) as client:
        Service(server)
        _ = server.address
        server.serve_in_thread()
        sent = [pattern(size, size) for size in (0, 1, 999, 1000, 1001, 20_000, 0, 30_001)]
        reply = ask(client, server.address, "Echo", b"x", sent)
        for got, array in zip(reply.buffers, sent, strict=True):
            np.testing.assert_array_equal(got, array)
    for transport in transports:
        transport.close()
