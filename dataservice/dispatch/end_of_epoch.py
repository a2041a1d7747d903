"""The end of an epoch for consumers that share elements. Pure.

A consumer that has drained all its tasks reports ``at_end``. It holds no elements then, and the
remaining ones belong to other consumers. It may leave once another consumer has sent a heartbeat
after that report, because that consumer will handle the remaining elements. (It waits for parts
that others read and it cannot, since those may come to it.) The last consumer stays until every
element is consumed, so it gets the elements of consumers that are given up or leave early.
"""

from __future__ import annotations

from dataservice.dispatch.records import Client, Part, Timeouts
from dataservice.dispatch.scheduler import may_read
from dataservice.proto import dataservice_pb2 as pb

# Seconds without a connection after which a process counts as gone.
AWAY_S = 5.0
# Seconds after an answered heartbeat for which a client uses its elements without another one.
_LEASE_S = 4.0


def lease_s(timeouts: Timeouts) -> float:
    """Return for how long a silent client uses its elements: less than others wait for it."""
    return _LEASE_S / AWAY_S * min(AWAY_S, timeouts.client_s)


def dismiss_if_done(client: Client) -> bool:
    """Return whether a client that is at its end may leave.

    Mark it as dismissed then, so that other clients no longer count on it.
    """
    iteration, since = client.iteration, client.at_end_since
    if since is None:
        return False
    job = iteration.job
    if not job.mode.is_first_come or iteration.finished:
        client.dismissed = True
    elif not any(_may_come_to(client, part) for part in iteration.parts.values()):
        alone = not any(not other.dismissed and other.heard >= since for other in _others(client))
        # Under at_most_once no elements return from others.
        client.dismissed |= job.terms.delivery == pb.AT_MOST_ONCE or not alone
    return client.dismissed


def is_asked_for(client: Client) -> bool:
    """Return whether another client is at its end and has not heard of this one since."""
    return any(
        other.at_end_since is not None and not other.dismissed and client.heard < other.at_end_since
        for other in _others(client)
    )


def is_away(client: Client, now: float) -> bool:
    """Return whether a client's process seems to be gone."""
    return client.away and now - client.last_seen > AWAY_S


def is_waited_for(client: Client) -> bool:
    """Return whether others need to hear of a client, or that it is gone."""
    owes_ack = any(client.id in task.pending_acks for task in client.iteration.tasks)
    return owes_ack or is_asked_for(client)


def _may_come_to(client: Client, part: Part) -> bool:
    """Return whether a client may get elements of a part from a worker that is still to come."""
    if part.finished:
        return False
    if part.task is None:
        return not part.fully_held
    return part.task.lost or not may_read(client, part.task.worker)


def _others(client: Client) -> list[Client]:
    return [other for other in client.iteration.clients.values() if other is not client]
