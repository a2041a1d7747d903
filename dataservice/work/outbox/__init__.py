"""What lies between a task's runner and the consumers that ask for its elements."""

from dataservice.work.outbox.cache import CacheOutbox
from dataservice.work.outbox.outbox import Outbox
from dataservice.work.outbox.shared import SharedOutbox
from dataservice.work.outbox.window import WindowOutbox

__all__ = ["CacheOutbox", "Outbox", "SharedOutbox", "WindowOutbox"]
