"""Process groups: ranks that act together."""

from mpidist.group.making import make_group, split
from mpidist.group.process_group import ProcessGroup

__all__ = ["ProcessGroup", "make_group", "split"]
