"""The worker's side of the protocol: pushes, pulls and synchronization with the ps tasks."""
