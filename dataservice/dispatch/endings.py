"""Which consumers that share elements may end, and which of them are missed. Pure.

Who is at its end holds nothing, and gets nothing: what is left of the elements others have. It may
go as soon as one of those has been heard of since, for that one sees to the rest. The last one
stays until all elements are used; so it gets what those leave who are given up, or leave early.
"""

from __future__ import annotations

from dataservice.dispatch.records import Client
from dataservice.proto import dataservice_pb2 as pb

# A connection has been broken for as long when its process counts as lost.
AWAY_S = 5.0


def decide(client: Client) -> bool:
    """Local. Whether a client that is at its end may go; one that may has gone, for the others."""
    iteration, since = client.iteration, client.at_end_since
    if since is None:
        return False
    terms = iteration.job.terms
    keeps = terms.reading == pb.SHARED and terms.delivery != pb.AT_MOST_ONCE
    client.over = (
        client.over
        or not keeps
        or iteration.finished
        or any(not other.over and other.heard >= since for other in _others(client))
    )
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


def _others(client: Client) -> list[Client]:
    return [other for other in client.iteration.clients.values() if other is not client]
