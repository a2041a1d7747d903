"""Write files and folders that are on the disk as a whole or not at all.

The content is written under a temporary name and forced to the disk. Then one rename gives it its
name. The folder is forced to the disk as well, because a rename alone does not survive a loss of
power.
"""

from __future__ import annotations

import os
import secrets
from contextlib import suppress

AnyPath = str | os.PathLike[str]


def write_whole(path: AnyPath, content: bytes, temporary: AnyPath | None = None) -> None:
    """Write a file. It has all of the content, or it does not exist.

    Args:
        path: The file. An existing one is replaced.
        content: The bytes of the file.
        temporary: The temporary name, in the same file system. By default a new one beside
            ``path``, so that several processes can write the file at the same time.

    Raises:
        OSError: The file cannot be written. The temporary file is removed.
    """
    temporary = temporary or f"{os.fspath(path)}.partial-{secrets.token_hex(4)}"
    try:
        with open(temporary, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        put_in_place(temporary, path)
    except OSError:
        with suppress(OSError):
            os.unlink(temporary)
        raise


def put_in_place(temporary: AnyPath, path: AnyPath) -> None:
    """Rename a file or folder, which is already on the disk, for good.

    Args:
        temporary: The present name.
        path: The new name, in the same file system. An existing file or empty folder is replaced.
    """
    os.rename(temporary, path)
    folder = os.open(os.path.dirname(os.path.abspath(path)), os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
