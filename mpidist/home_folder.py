"""The folder of the user, for MPI libraries that end a process without HOME."""

from __future__ import annotations

import os


def home_folder() -> str:
    """Return HOME, or the folder of the user database if HOME is not set.

    Users of containers are often not in the database. They get "/", as Docker has it.
    """
    folder = os.path.expanduser("~")
    return "/" if folder == "~" else folder
