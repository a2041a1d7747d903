"""Which consumers that share elements may end, and which of them are missed. Pure.

Who is at its end holds nothing, and gets nothing: what is left of the elements others have. It may
go as soon as one of those has been heard of since, for that one sees to the rest (but waits for
parts that others read and it cannot, since they may come to it). The last one stays until all
elements are used; so it gets what those leave who are given up, or leave early.
"""

from __future__ import annotations

from dataservice.dispatch.leases import may_read
from dataservice.dispatch.records import Client, Part, Timeouts
from dataservice.proto import dataservice_pb2 as pb

# A connection has been broken for as long when its process counts as lost.
AWAY_S = 5.0
# For so long after it has been heard of, a client uses what it has; then it must be heard of again.
_LEASE_S = 4.0


def lease_s(timeouts: Timeouts) -> float:
    """Local. For how long a client that is silent still uses what it has: less than we wait."""
    return _LEASE_S / AWAY_S * min(AWAY_S, timeouts.client_s)


def decide(client: Client) -> bool:
    """Local. Whether a client that is at its end may go; one that may has gone, for the others."""
    iteration, since = client.iteration, client.at_end_since
    if since is None:
        return False
    terms = iteration.job.terms
    if terms.reading != pb.SHARED or iteration.finished:
        client.over = True
    elif not any(_may_give(part, client) for part in iteration.parts.values()):
        # Under at_most_once nothing comes back of what others have.
        alone = not any(not other.over and other.heard >= since for other in _others(client))
        client.over |= terms.delivery == pb.AT_MOST_ONCE or not alone
    return client.over


def is_asked_for(client: Client) -> bool:
    """Local. Whether another one is at its end, and has not heard of this client since."""
    return any(
        other.at_end_since is not None and not other.over and client.heard < other.at_end_since
        for other in _others(client)
    )


def is_away(client: Client, now: float) -> bool:
    """Local. Whether a client's process seems to be gone."""
    return client.away and now - client.last_seen > AWAY_S


def is_waited_for(client: Client) -> bool:
    """Local. Whether others need to hear of a client, or that it is gone."""
    unsettled = (client.id in task.unsettled for task in client.iteration.tasks)
    return any(unsettled) or is_asked_for(client)


def _may_give(part: Part, client: Client) -> bool:
    """Whether a worker may get a part that a client cannot read now, or could not all the time."""
    task = part.task
    if part.finished:
        return False
    if task is None:
        return not part.given_out
    return task.lost or not may_read(client, task.worker)


def _others(client: Client) -> list[Client]:
    return [other for other in client.iteration.clients.values() if other is not client]
