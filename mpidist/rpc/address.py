"""Addresses and protocol names."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from functools import lru_cache

from mpidist.errors import InvalidArgumentError

TRANSPORTS = ("mpi", "tcp", "inproc")
# Names of the TensorFlow interface. Users see them as given; each means one of our transports.
REMOTE_ALIASES = ("grpc", "grpc+verbs")
ALIASES = (*REMOTE_ALIASES, "grpc+local")
_LARGEST_NUMBER = 0xFFFFFFFF  # the header of a message has 32 bits for it


@dataclass(frozen=True)
class Address:
    """The location of an endpoint: ``protocol://host:port``.

    Attributes:
        protocol: A name of :data:`TRANSPORTS` or :data:`ALIASES`.
        host: Name of the host.
        port: The endpoint's number over mpi and inproc, the port over tcp.
    """

    protocol: str
    host: str
    port: int

    def __str__(self) -> str:
        return f"{self.protocol}://{self.host}:{self.port}"

    @classmethod
    @lru_cache
    def of(cls, text: str, protocol: str = "tcp") -> Address:
        """Parse ``[protocol://]host:port``.

        Args:
            text: The address.
            protocol: Protocol of a text that names none.

        Raises:
            ValueError: The text has another form, or names an unknown protocol.
        """
        scheme, separator, rest = text.rpartition("://")
        host, colon, port = rest.rpartition(":")
        number = port.isascii() and port.isdigit()
        if not colon or not host or not number or int(port) > _LARGEST_NUMBER:
            raise ValueError(f"{text!r} is not an address: expected [protocol://]host:port")
        return cls(check_protocol(scheme if separator else protocol), host, int(port))


def check_protocol(protocol: str) -> str:
    """Return a protocol name; an unknown name is an InvalidArgumentError that lists the known."""
    if protocol not in TRANSPORTS + ALIASES:
        known = ", ".join(repr(name) for name in TRANSPORTS + ALIASES)
        raise InvalidArgumentError(f"unknown protocol {protocol!r}; the known ones are {known}")
    return protocol


def is_loopback(host: str) -> bool:
    """Return True if a host name or IP address means the local host."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def transport_of(protocol: str | None, *, launched: bool) -> str:
    """Return the transport that a protocol name means here.

    Args:
        protocol: A name, or None for the default.
        launched: True if the process is a rank of a launched MPI world.

    Returns:
        ``"mpi"``, ``"tcp"`` or ``"inproc"``.

    Raises:
        ValueError: The name is unknown.
    """
    if protocol is None:
        return "mpi" if launched else "inproc"
    check_protocol(protocol)
    if protocol in REMOTE_ALIASES:
        return "mpi" if launched else "tcp"
    return protocol if protocol in TRANSPORTS else "inproc"
