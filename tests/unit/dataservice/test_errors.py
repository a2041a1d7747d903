"""Errors that are raised in one process and reported in another."""

import pickle

import pytest

from dataservice.errors import code_and_message, pack_error, unpack_error
from mpidist.errors import NotFoundError, UnknownError


def raised(error):
    try:
        raise error
    except BaseException as caught:
        return caught


def test_errors_keep_their_class_and_say_where():
    error = unpack_error(pack_error(raised(NotFoundError("no such row")), "data worker 5"))
    assert type(error) is NotFoundError
    assert str(error) == "no such row"
    (note,) = error.__notes__
    assert "raised in data worker 5" in note
    assert "in raised" in note  # the traceback's frame


@pytest.mark.parametrize("kind", [SystemExit, KeyboardInterrupt, GeneratorExit])
def test_what_would_end_the_reader_arrives_as_an_error_that_names_it(kind):
    error = unpack_error(pack_error(raised(kind("enough")), "data worker 5"))
    assert type(error) is UnknownError
    assert f"{kind.__name__}: enough (raised in data worker 5" in str(error)
    (note,) = error.__notes__
    assert "in raised" in note  # the traceback's frame


class Unspeakable(Exception):
    def __str__(self):
        raise KeyError("no words")

    def __reduce__(self):
        raise SystemExit(4)


def test_an_error_that_can_be_neither_pickled_nor_printed_is_named():
    error = unpack_error(pack_error(raised(Unspeakable()), "data worker 5"))
    assert type(error) is UnknownError
    assert "Unspeakable" in str(error)
    assert "raised in data worker 5" in str(error)


class Awkward(Exception):
    def __init__(self, a, b):
        super().__init__(f"{a} and {b}")


def test_errors_that_cannot_be_pickled_say_what_they_were():
    with pytest.raises(TypeError):
        pickle.loads(pickle.dumps(Awkward(1, 2)))
    error = unpack_error(pack_error(raised(Awkward(1, 2)), "data worker 5"))
    assert type(error) is UnknownError
    assert "Awkward: 1 and 2 (raised in data worker 5" in str(error)
    error = unpack_error(pack_error(Awkward(1, 2)))
    assert str(error).startswith("Awkward: 1 and 2 (Awkward itself cannot be pickled: ")


def test_packing_does_not_change_the_error():
    error = raised(NotFoundError("no such row"))
    error.add_note("in table 3")
    first, second = (unpack_error(pack_error(error, where)) for where in ("a", "b"))
    assert error.__notes__ == ["in table 3"]
    for copy, where in ((first, "a"), (second, "b")):
        known, added = copy.__notes__
        assert known == "in table 3"
        assert added.startswith(f"raised in {where}:")
    assert unpack_error(pack_error(error)).__notes__ == ["in table 3"]


def test_the_code_and_the_text_of_an_error():
    assert code_and_message(NotFoundError("no such row")) == (NotFoundError.code, "no such row")
    assert code_and_message(KeyError("x")) == (UnknownError.code, "KeyError: 'x'")
    assert code_and_message(Unspeakable())[1].startswith("Unspeakable: ")
