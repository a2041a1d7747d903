"""Request and reply between tasks, over ``inproc``, ``mpi`` or ``tcp``."""

from mpidist.mpi import launched
from mpidist.rpc.address import (
    REMOTE_ALIASES,
    TRANSPORTS,
    Address,
    check_protocol,
    transport_of,
)
from mpidist.rpc.endpoint import Endpoint, Request
from mpidist.rpc.inproc import inproc_transport
from mpidist.rpc.message import LATER, Reply
from mpidist.rpc.mpi import mpi_transport

__all__ = [
    "LATER",
    "REMOTE_ALIASES",
    "Address",
    "Endpoint",
    "Reply",
    "Request",
    "check_protocol",
    "inproc_transport",
    "open_endpoint",
    "transport_of",
]


def open_endpoint(
    protocol: str | None = None, number: int | None = None, *, peer: str | None = None
) -> Endpoint:
    """Open an endpoint over the transport that a protocol name means here.

    Over mpi the first call of each rank is collective.

    Args:
        protocol: ``"mpi"``, ``"tcp"``, ``"inproc"``, a TensorFlow name, or None for the default:
            mpi in a launched world, inproc in a plain process. ``"grpc"`` and ``"grpc+verbs"`` are
            mpi in a launched world and tcp in a plain process, ``"grpc+local"`` is inproc.
        number: Number of the endpoint; over tcp the port. None takes a free one.
        peer: The endpoint to call, as ``[protocol://]host:port``. If no transport is named, a plain
            process takes inproc for endpoints that it serves itself, and tcp for others.

    Returns:
        The endpoint. Close it after use.

    Raises:
        DistNetworkError: The number is in use, or does not belong to this rank.
        ValueError: The protocol is unknown.

    Example:
        >>> import mpidist as dist
        >>> def upper(request):
        ...     return dist.Reply(request.body.upper())
        >>> with dist.open_endpoint() as endpoint:
        ...     endpoint.register("text", {"Upper": upper})
        ...     endpoint.serve_in_thread()
        ...     endpoint.call(endpoint.address, "text/Upper", b"hello").result().body
        b'HELLO'
    """
    if peer is None:
        transport = transport_of(protocol, launched=launched())
    else:
        transport = _transport_to(peer, protocol)
    if transport == "tcp":
        from mpidist.rpc.tcp import tcp_transport  # pyzmq is slow to import

        return Endpoint(tcp_transport(), number)
    return Endpoint(mpi_transport() if transport == "mpi" else inproc_transport(), number)


def _transport_to(peer: str, protocol: str | None) -> str:
    if protocol is not None:
        check_protocol(protocol)
    scheme, _, location = peer.rpartition("://")
    named = protocol if protocol in TRANSPORTS else scheme or protocol
    if launched() or not (named is None or named in REMOTE_ALIASES):
        return transport_of(named, launched=launched())
    return "inproc" if inproc_transport().serves(Address.of(location, "inproc")) else "tcp"
