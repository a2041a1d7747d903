"""``Dataset.from_files``: lines of text, JSON lines, and rows of .npy and .npz files."""

from __future__ import annotations

import glob
import json
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO, Protocol

import numpy as np

from dataservice.dataset import checks, tree
from dataservice.dataset.context import Context
from dataservice.dataset.node import UNKNOWN_CARDINALITY, ElementIterator, IndexReader, Node
from mpidist.errors import DataLossError, NotFoundError

_BY_SUFFIX = {
    ".txt": "text", ".csv": "text", ".jsonl": "json", ".ndjson": "json", ".npy": "npy",
    ".npz": "npz",
}  # fmt: skip


@dataclass(frozen=True)
class Files(Node):
    """The elements of some files, one file after the other; workers take files.

    Attributes:
        paths: The files.
        format: What is in them.
    """

    paths: tuple[str, ...]
    format: str

    @classmethod
    def of(cls, patterns: str | os.PathLike[str] | Sequence[Any], form: str | None) -> Files:
        """Local. Find the files.

        Raises:
            NotFoundError: There is none of a name or pattern.
            TypeError: Something is no path.
            ValueError: The format is unknown, or cannot be told by their names.
        """
        paths = matching_files("from_files", "files", patterns)
        found = {_BY_SUFFIX.get(os.path.splitext(path)[1].lower(), "") for path in paths}
        form = form or (found.pop() if len(found) == 1 else "")
        if form not in _READERS:
            raise ValueError(
                f"the format of {paths[0]!r} and the other files is not known by their names: give "
                f"one of {sorted(_READERS)}, not {form!r}"
            )
        return cls(tuple(paths), form)

    def cardinality(self) -> int:
        """Local. See :class:`Node`."""
        return UNKNOWN_CARDINALITY

    def source_length(self) -> int:
        """Return the number of files."""
        return len(self.paths)

    def _iterate(self, context: Context) -> ElementIterator:
        return FilesIterator(self, IndexReader(len(self.paths), context.share))

    def summary(self) -> str:
        """Local. See :class:`Node`."""
        return f"from_files({len(self.paths)} of {self.format}, {self.paths[0]!r}, ...)"


def matching_files(method: str, argument: str, patterns: Any) -> list[str]:
    """Return the absolute paths of the files of a name or pattern, or of several.

    Args:
        method: The method of the dataset, for messages.
        argument: The name of the method's argument, for messages.
        patterns: Names and patterns. The files of a pattern are sorted.

    Raises:
        NotFoundError: There are no files, or none of a name or pattern.
        TypeError: A name is not a path.
    """
    if isinstance(patterns, str | bytes | os.PathLike):
        patterns = [patterns]
    given = list(patterns) if isinstance(patterns, Iterable) else [patterns]
    if not given:
        raise NotFoundError(f"{method} is given no files")
    return [
        os.path.abspath(path)
        for pattern in given
        for path in _matching(method, checks.path(method, argument, pattern))
    ]


def _matching(method: str, pattern: str) -> list[str]:
    """Return the files of a name or pattern. A name that exists is never taken for a pattern."""
    if os.path.exists(pattern):
        return [pattern]
    folder, rest = os.path.split(pattern)
    while folder and not os.path.isdir(folder):
        folder, part = os.path.split(folder)
        rest = os.path.join(part, rest)
    paths = sorted(glob.glob(os.path.join(glob.escape(folder), rest)))
    if not paths:
        raise NotFoundError(f"{method}: no file has the name or pattern {pattern!r}")
    return paths


class FilesIterator(ElementIterator):
    """One pass; has one file open."""

    def __init__(self, node: Files, numbers: IndexReader) -> None:
        self._node = node
        self._numbers = numbers
        self._number = -1
        self._reader: Reader | None = None

    def __next__(self) -> Any:
        while True:
            if self._reader is None:
                self._open(next(self._numbers))
            assert self._reader is not None
            try:
                return self._reader.read()
            except StopIteration:
                self.close()
            except OSError as error:
                self.close()
                raise DataLossError(
                    f"cannot read {self._node.paths[self._number]!r} to its end: {error}"
                ) from error

    def get_state(self) -> tuple[Any, int, int | None]:
        """Local. See :class:`ElementIterator`: the file, and the place in it."""
        place = None if self._reader is None else self._reader.place
        return self._numbers.get_state(), self._number, place

    def set_state(self, state: tuple[Any, int, int | None]) -> None:
        """Local. See :class:`ElementIterator`."""
        numbers, number, place = state
        self._numbers.set_state(numbers)
        if place is not None:
            self._open(number)
            assert self._reader is not None
            self._reader.place = place

    def close(self) -> None:
        """Local. See :class:`ElementIterator`."""
        if self._reader is not None:
            self._reader.close()
            self._reader = None

    def goes_on(self, error: Exception) -> bool:
        """Local. See :class:`ElementIterator`."""
        return True

    def _open(self, number: int) -> None:
        self._number = number
        path = self._node.paths[number]
        try:
            self._reader = _READERS[self._node.format](path)
        except FileNotFoundError as error:
            raise NotFoundError(f"there is no file {path!r} here any more") from error
        except (OSError, ValueError) as error:
            raise DataLossError(f"cannot read {path!r}: {error}") from error


class Reader(Protocol):
    """The elements of a file."""

    place: int
    """Where the next one is; may be set."""

    def read(self) -> Any:
        """Local. The next one; StopIteration at the end."""

    def close(self) -> None:
        """Local. Read no more."""


class Lines:
    """Lines of text in UTF-8, without their ends.

    Args:
        path: The file.
        parse: Makes an element of a line.
    """

    def __init__(self, path: str, parse: Callable[[str], Any] = tree.to_numpy) -> None:
        self._path = path
        self._file: BinaryIO = open(path, "rb")  # noqa: SIM115 - until close()
        self._parse = parse

    @property
    def place(self) -> int:
        """Local. In bytes."""
        return self._file.tell()

    @place.setter
    def place(self, place: int) -> None:
        self._file.seek(place)

    def read(self) -> Any:
        """Local. The element of the next line."""
        start = self._file.tell()
        line = self._file.readline()
        if not line:
            raise StopIteration
        try:
            return self._parse(line.decode().rstrip("\r\n"))
        except ValueError as error:
            raise DataLossError(
                f"cannot read the line at byte {start} of {self._path!r}: {error}"
            ) from error

    def close(self) -> None:
        """Local. See :class:`Reader`."""
        self._file.close()


def _json_lines(path: str) -> Lines:
    return Lines(path, lambda line: tree.to_numpy(json.loads(line)))


class Rows:
    """Rows of arrays.

    Args:
        arrays: Arrays, or dicts of them, with equally many rows.
        path: The file.
    """

    def __init__(self, arrays: Any, path: str) -> None:
        lengths = {len(array) if array.ndim else -1 for array in tree.flatten(arrays)}
        if len(lengths) != 1 or -1 in lengths:
            raise ValueError(f"its arrays have no rows, or not equally many: {sorted(lengths)}")
        self._arrays = arrays
        self._rows = lengths.pop()
        self.place = 0

    def read(self) -> Any:
        """Local. The next row."""
        if self.place >= self._rows:
            raise StopIteration
        self.place += 1
        return tree.map_leaves(lambda array: np.array(array[self.place - 1])[()], self._arrays)

    def close(self) -> None:
        """Local. See :class:`Reader`."""
        self._arrays = None


def _npy(path: str) -> Rows:
    return Rows(np.load(path, mmap_mode="r"), path)


def _npz(path: str) -> Rows:
    with np.load(path) as file:
        return Rows(dict(file), path)


_READERS: dict[str, Callable[[str], Reader]] = {
    "text": Lines,
    "json": _json_lines,
    "npy": _npy,
    "npz": _npz,
}
