"""Names of files that look like patterns."""

import os

import pytest

from dataservice import Dataset
from mpidist.errors import NotFoundError


def lines(*names):
    return [str(line) for line in Dataset.from_files(*names)]


@pytest.mark.parametrize(
    "names",
    [
        ["run[1].txt"],
        ["run1.txt", "run[1].txt"],
        ["a*.txt", "ab.txt"],
        ["a?.txt", "ab.txt"],
        ["x[!a].txt", "xb.txt"],
        [" [a] .txt"],
        ["**.txt"],
    ],
)
def test_a_name_that_exists_is_no_pattern(tmp_path, names):
    for name in names:
        (tmp_path / name).write_text(f"{name}\n")
    assert lines([tmp_path / name for name in names]) == names
    for name in names:
        assert lines(str(tmp_path / name)) == [name]


def test_patterns_in_a_folder_whose_name_looks_like_one(tmp_path, monkeypatch):
    folder = tmp_path / "[2024] runs"
    folder.mkdir()
    for number in range(2):
        (folder / f"part-{number}.txt").write_text(f"{number}\n")
    assert lines(str(folder / "part-*.txt")) == ["0", "1"]
    assert lines(str(folder / "part-[1].txt")) == ["1"]
    monkeypatch.chdir(tmp_path)
    assert lines(os.path.join("[2024] runs", "part-?.txt")) == ["0", "1"]
    assert lines(os.path.join("*", "part-0.txt")) == ["0"]
    with pytest.raises(NotFoundError, match=r"part-\[2\]"):
        lines(str(folder / "part-[2].txt"))
