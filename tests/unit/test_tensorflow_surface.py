"""Names and arguments are those of TensorFlow, or docs/tensorflow.md lists the difference."""

import inspect
import re
import runpy
from pathlib import Path
from pydoc import locate

import pytest
from _cases import list_tensorflow_names, tensorflow_names
from _cases.list_tensorflow_names import arguments, described

HERE = Path(__file__).parent
TEXT = (HERE.parents[1] / "docs" / "tensorflow.md").read_text()
NAME = re.compile(r"`([\w.]+)`")
NAMES, MEMBERS = tensorflow_names.NAMES, tensorflow_names.MEMBERS

# The methods of datasets, as another test compares them. TensorFlow's range takes **kwargs.
DATASET = {
    name: described(signature)
    for name, signature in runpy.run_path(HERE / "dataservice" / "test_tensorflow_names.py")[
        "METHODS"
    ].items()
}
MEMBERS["tf.data.Dataset"]["range"] = DATASET["range"]


def rows(*header):
    """Return the other cells of the rows of all tables with a header, by name in the first cell."""
    found = {}
    head = re.escape(f"| {' | '.join(header)} |")
    for table in re.findall(rf"^{head}\n[| -]+\n((?:\|.+\n)+)", TEXT, re.MULTILINE):
        for line in table.splitlines():
            cells = line.strip("| ").split(" | ")
            assert len(cells) == len(header), line
            for name in NAME.findall(cells[0]):
                assert name not in found, f"{name} is listed twice"
                found[name] = cells[1:]
    return found


WHERE = {
    name: NAME.search(cell)[1] + ("same name" in cell) * f".{name.rpartition('.')[2]}"
    for name, (cell,) in rows("TensorFlow", "Here").items()
}
MISSING = rows("Missing", "In its place, or why")
ARGUMENTS = rows("Name", "Arguments that differ", "How")
BEHAVIOUR = rows("Name", "What differs")
EXTRA = rows("Extra", "What it does")


def short(name, member=""):
    """Return a name without its module, as in the tables."""
    return f"{name.rpartition('.')[2]}.{member}".rstrip(".")


def has(ours, member):
    """Return whether a class has an attribute, a documented attribute or a message field."""
    fields = getattr(getattr(ours, "DESCRIPTOR", None), "fields_by_name", ())
    said = re.search(rf"^ +{member}: ", ours.__doc__ or "", re.MULTILINE)
    return hasattr(ours, member) or member in fields or said is not None


def placed(found):
    """Return the text of each argument, with its place unless it is given by keyword."""
    return {
        name: (text, None if text.startswith("*") else place)
        for place, (name, text) in enumerate(found.items())
    }


def differing(theirs, ours):
    """Return the names of the arguments that differ in presence, default or place."""
    theirs, ours = placed(theirs), placed(ours)
    return {name for name in theirs | ours if theirs.get(name) != ours.get(name)}


def present():
    """Yield each name and member that is here, with the arguments of TensorFlow and ours."""
    for name, here in WHERE.items():
        ours, theirs = locate(here), NAMES[name]
        yield short(name), theirs, None if theirs is None else arguments(ours)
        for member, theirs in MEMBERS.get(name, {}).items():
            if has(ours, member):
                static = inspect.getattr_static(ours, member, None)
                yield short(name, member), theirs, arguments(getattr(ours, member, None), static)


PRESENT = {name: (theirs, ours) for name, theirs, ours in present()}
DIFFERENCES = {
    name: differing(theirs, ours) for name, (theirs, ours) in PRESENT.items() if theirs is not None
}
# The page lists the differences of all optimizers once.
RULES = [name for name in DIFFERENCES if f"tf.keras.optimizers.{name}" in WHERE]
COMMON = set.intersection(*(DIFFERENCES[name] for name in RULES))
DIFFERENCES |= {name: DIFFERENCES[name] - COMMON for name in RULES} | {"Optimizer": COMMON}
DIFFERENT = {name for name, found in DIFFERENCES.items() if found}
ABSENT = {
    short(name, member)
    for name, members in MEMBERS.items()
    for member in members
    if name not in WHERE or not has(locate(WHERE[name]), member)
}


def test_the_stored_names_are_those_of_tensorflow():
    pytest.importorskip("tensorflow")
    if list_tensorflow_names.installed() != tensorflow_names.VERSION:
        pytest.skip(f"this TensorFlow is not {tensorflow_names.VERSION}")
    stored = runpy.run_path(tensorflow_names.__file__)
    facts = list_tensorflow_names.facts()
    assert facts == {name: stored[name] for name in facts}


def test_the_stored_names_are_many():
    assert len(NAMES) > 200
    assert sum(map(len, MEMBERS.values())) > 200
    assert len(PRESENT) > 150
    assert len(ARGUMENTS) > 40
    assert len(BEHAVIOUR) > 20


def test_methods_of_datasets_are_stored_alike():
    assert MEMBERS["tf.data.Dataset"] == {"element_spec": None, **DATASET}


@pytest.mark.parametrize("name", NAMES)
def test_each_name_is_here_or_left_out_for_a_reason(name):
    if name in WHERE:
        assert locate(WHERE[name]) is not None
        assert name not in MISSING
    else:
        assert len(MISSING[name][0]) > 10


def test_members_that_are_missing():
    assert {name for name in MISSING if not name.startswith("tf.")} == ABSENT


def test_documented_names_are_tensorflows():
    assert {name for name in MISSING if name.startswith("tf.")} | WHERE.keys() == NAMES.keys()
    assert set(BEHAVIOUR) <= PRESENT.keys()


@pytest.mark.parametrize("name", sorted(DIFFERENT | ARGUMENTS.keys()))
def test_arguments_that_differ(name):
    listed, how = ARGUMENTS[name]
    assert set(NAME.findall(listed)) == DIFFERENCES[name]
    assert len(how) > 10


@pytest.mark.parametrize("name", [name for name, (theirs, _) in PRESENT.items() if theirs is None])
def test_attributes_are_no_methods(name):
    assert PRESENT[name][1] is None


@pytest.mark.parametrize("name", EXTRA)
def test_extra_names(name):
    assert locate(name) is not None
    assert name not in WHERE.values()
    kind, _, member = name.rpartition(".")
    assert not any(member in MEMBERS.get(known, ()) for known in WHERE if WHERE[known] == kind)
