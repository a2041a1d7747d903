"""What the methods of a dataset are made of."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Self

from dataservice.dataset.node import Node


class Described(ABC):
    """Something that holds a description, and that can be made of another one."""

    _node: Node

    @classmethod
    @abstractmethod
    def of(cls, node: Node) -> Self:
        """Local. A dataset of a description."""
