"""Request and reply between tasks: one interface over ``inproc``, ``mpi`` and ``tcp``."""

from mpidist.endpoint.address import Address, check_protocol, parse, transport_of
from mpidist.endpoint.endpoint import Endpoint
from mpidist.endpoint.inproc import inproc_transport
from mpidist.endpoint.mpi import mpi_transport
from mpidist.endpoint.request import LATER, Reply, Request
from mpidist.runtime import launched

__all__ = [
    "LATER",
    "Address",
    "Endpoint",
    "Reply",
    "Request",
    "check_protocol",
    "inproc_transport",
    "open_endpoint",
    "parse",
    "transport_of",
]


def open_endpoint(protocol: str | None = None, number: int | None = None) -> Endpoint:
    """Local. An endpoint over the transport that a protocol name means here.

    Args:
        protocol: ``"mpi"``, ``"tcp"``, ``"inproc"``, a TensorFlow name, or None for the default:
            mpi in a launched world, inproc in a plain process.
        number: Its number; None takes a free one.

    Returns:
        The endpoint; close it after use.

    Raises:
        DistNetworkError: The number is in use, or does not belong to this rank.
        ValueError: The protocol is unknown.
    """
    transport = transport_of(protocol, launched=launched())
    if transport == "tcp":
        from mpidist.endpoint.tcp import tcp_transport  # its library is slow to import

        return Endpoint(tcp_transport(), number)
    return Endpoint(mpi_transport() if transport == "mpi" else inproc_transport(), number)
