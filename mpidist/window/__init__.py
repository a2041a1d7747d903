"""Windows: one-sided memory."""

from mpidist.window.allocation import Bytes
from mpidist.window.window import Window

__all__ = ["Bytes", "Window"]
