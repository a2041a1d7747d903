"""Addresses and protocol names. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

TRANSPORTS = ("mpi", "tcp", "inproc")
# Names of the TensorFlow interface; they are kept in what users see and mean one of ours.
ALIASES = ("grpc", "grpc+verbs", "grpc+local")
_LARGEST_NUMBER = 0xFFFFFFFF  # what a message has room for


@dataclass(frozen=True)
class Address:
    """Where an endpoint is: ``protocol://host:port``.

    Attributes:
        protocol: A name of :data:`TRANSPORTS` or :data:`ALIASES`.
        host: The host's name.
        port: Over mpi and inproc the endpoint's number, over tcp the port.
    """

    protocol: str
    host: str
    port: int

    def __str__(self) -> str:
        return f"{self.protocol}://{self.host}:{self.port}"

    @classmethod
    def of(cls, text: str, protocol: str = "tcp") -> Address:
        """Local. Read ``[protocol://]host:port``.

        Args:
            text: The address.
            protocol: What to take where the text names no protocol.

        Raises:
            ValueError: The text has another form, or names an unknown protocol.
        """
        return parse(text, protocol)


@lru_cache
def parse(text: str, protocol: str) -> Address:
    """Local. Read ``[protocol://]host:port``.

    Args:
        text: The address.
        protocol: What to take where the text names no protocol.

    Returns:
        The address.

    Raises:
        ValueError: The text has another form, or names an unknown protocol.
    """
    scheme, separator, rest = text.rpartition("://")
    host, colon, port = rest.rpartition(":")
    if not colon or not host or not port.isdecimal() or int(port) > _LARGEST_NUMBER:
        raise ValueError(f"{text!r} is not an address: expected [protocol://]host:port")
    return Address(check_protocol(scheme if separator else protocol), host, int(port))


def check_protocol(protocol: str) -> str:
    """Local. The name, if it is known; otherwise a ValueError that lists the known ones."""
    if protocol not in TRANSPORTS + ALIASES:
        known = ", ".join(repr(name) for name in TRANSPORTS + ALIASES)
        raise ValueError(f"unknown protocol {protocol!r}; the known ones are {known}")
    return protocol


def transport_of(protocol: str | None, *, launched: bool) -> str:
    """Local. The transport that a protocol name means here.

    Args:
        protocol: A name, or None for the default.
        launched: Whether the process is a rank of a launched MPI world.

    Returns:
        ``"mpi"``, ``"tcp"`` or ``"inproc"``.

    Raises:
        ValueError: The name is unknown.
    """
    default = "mpi" if launched else "inproc"
    if protocol is None:
        return default
    check_protocol(protocol)
    if protocol == "grpc+local":
        return "inproc"
    return default if protocol in ALIASES else protocol
