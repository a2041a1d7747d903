"""One-sided memory."""

from mpidist.window.memory import Bytes
from mpidist.window.window import Window

__all__ = ["Bytes", "Window"]
