"""What lies between a task's runner and the consumers that ask for its elements."""

from dataservice.outbox.cache import CacheOutbox
from dataservice.outbox.outbox import Outbox
from dataservice.outbox.shared import SharedOutbox
from dataservice.outbox.window import WindowOutbox

__all__ = ["CacheOutbox", "Outbox", "SharedOutbox", "WindowOutbox"]
