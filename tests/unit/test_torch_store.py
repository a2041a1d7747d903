"""Stores have torch's names, and do what torch's do, where torch is installed."""

import inspect
from datetime import timedelta

import pytest

import mpidist

torch = pytest.importorskip("torch.distributed")

SHORT = timedelta(milliseconds=50)
# A file of torch's has a key of its own.
OWN_KEY = "efcount/"

SCRIPT = [
    ("set", "a", "1"),
    ("get", "a"),
    ("add", "a", 5),
    ("get", "a"),
    ("set", "raw", b"x\xff"),
    ("get", "raw"),
    ("add", "raw", 1),
    ("set", "empty", ""),
    ("get", "empty"),
    ("add", "empty", 1),
    ("set", "half", "12a"),
    ("add", "half", 1),
    ("set", "spaces", " 7 "),
    ("add", "spaces", 1),
    ("set", "float", "2.5"),
    ("add", "float", 1),
    ("add", "n", True),
    ("add", "n", -3),
    ("add", "zero", 0),
    ("get", "n"),
    ("add", "n", 1.5),
    ("check", ["a", "missing"]),
    ("check", ["a", "n"]),
    ("check", []),
    ("check", "a"),
    ("compare_set", "c", "", "first"),
    ("compare_set", "c", "first", "second"),
    ("compare_set", "c", "no", "third"),
    ("compare_set", "c", "", "third"),
    ("compare_set", "absent", "expected", "desired"),
    ("check", ["absent"]),
    ("append", "long", "x"),
    ("append", "long", b"y"),
    ("get", "long"),
    ("multi_set", ["m", "o"], ["1", b"2"]),
    ("multi_get", ["o", "m"]),
    ("multi_get", []),
    ("multi_set", [], []),
    ("multi_get", ["m", "missing"]),
    ("delete_key", "m"),
    ("check", ["m"]),
    ("num_keys",),
    ("list_keys",),
    ("get", "missing"),
    ("wait", ["missing"]),
    ("wait", ["a", "missing"], SHORT),
    ("wait", ["a"]),
    ("wait", []),
    ("wait", "a"),
    ("set", 1, "x"),
    ("set", "x", 1),
    ("get", None),
    ("set", "ü", "é"),
    ("get", "ü"),
    ("set", "", "no name"),
    ("get", ""),
    ("set", "nul\0key", "1"),
    ("get", "nul\0key"),
    ("barrier", "bar", 1),
    ("barrier", "bar", 1),
    ("barrier", "two", 2, SHORT),
    ("list_keys",),
]
QUEUES = [
    ("delete_key", "m"),
    ("queue_push", "q", "1"),
    ("queue_push", "q", b"2"),
    ("queue_len", "q"),
    ("check", ["q"]),
    ("num_keys",),
    ("wait", ["q"]),
    ("get", "q"),
    ("queue_pop", "q"),
    ("queue_pop", "q", False),
    ("queue_pop", "q", False),
    ("queue_pop", "q"),
    ("queue_len", "q"),
    ("check", ["q"]),
    ("queue_len", "never"),
    ("queue_push", "q", "3"),
    ("delete_key", "q"),
    ("queue_len", "q"),
    ("has_extended_api",),
]


def outcome(store, name, *arguments):
    try:
        value = getattr(store, name)(*arguments)
    except Exception as error:
        kinds = ("QueueEmptyError", "TypeError", "ValueError")
        return type(error).__name__ if type(error).__name__ in kinds else "failed"
    if name == "list_keys":
        return sorted(key for key in value if key != OWN_KEY)
    return value


def check_same(theirs, ours, script, own_keys=0):
    assert ours.timeout == theirs.timeout
    for store in (theirs, ours):
        store.set_timeout(SHORT)
    assert ours.timeout == theirs.timeout == SHORT
    for call in script:
        want = outcome(theirs, *call)
        if call == ("num_keys",):
            want -= own_keys
        assert outcome(ours, *call) == want, call


def test_hash_store():
    check_same(torch.HashStore(), mpidist.HashStore(), SCRIPT + QUEUES)


def test_file_store(tmp_path):
    theirs = torch.FileStore(str(tmp_path / "theirs"), 1)
    ours = mpidist.FileStore(str(tmp_path / "ours"), 1)
    check_same(theirs, ours, SCRIPT, own_keys=1)
    assert (theirs.path, ours.path) == (str(tmp_path / "theirs"), str(tmp_path / "ours"))


def test_prefix_store():
    below = torch.HashStore(), mpidist.HashStore()
    pair = []
    for package, store in zip((torch, mpidist), below, strict=True):
        store.set("other", "1")
        pair.append(package.PrefixStore("a", package.PrefixStore("b", store)))
    check_same(*pair, SCRIPT + QUEUES)
    assert below[1].timeout == below[0].timeout == SHORT
    assert sorted(below[1].list_keys()) == sorted(below[0].list_keys())


@pytest.mark.parametrize("name", ["Store", "HashStore", "FileStore", "PrefixStore"])
def test_names(name):
    theirs = {one for one in dir(getattr(torch, name)) if not one.startswith("_")}
    ours = {one for one in dir(getattr(mpidist, name)) if not one.startswith("_")}
    assert ours - theirs <= {"close"}
    assert theirs <= ours


def test_arguments_that_torch_names():
    for name in ("queue_pop", "barrier"):
        words = getattr(torch.Store, name).__doc__.partition("(")[2].partition(")")[0].split(", ")
        theirs = [word.partition(":")[0] for word in words]
        assert list(inspect.signature(getattr(mpidist.Store, name)).parameters) == theirs


def test_errors():
    assert issubclass(torch.QueueEmptyError, torch.DistStoreError)
    assert issubclass(mpidist.QueueEmptyError, mpidist.DistStoreError)
