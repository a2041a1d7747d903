"""The examples in the docstrings of public names.

As a program, run all of them in this process and write the failures as JSON, by name.
"""

import doctest
import inspect
import json
import os
import sys
from pathlib import Path

import mpidist
from dataservice.dataset.dataset import DatasetIterator

sys.path.insert(0, str(Path(__file__).parents[2] / "docs" / "_ext"))
from public_names import PACKAGES, public


def examples():
    """Return the docstrings with examples, by the names of their objects."""
    found = {}
    for name, value in (public() | {"dataservice.DatasetIterator": DatasetIterator}).items():
        if inspect.isclass(value) or inspect.isfunction(value):  # not a number, with int's text
            found.setdefault(inspect.getdoc(value), name)
        if inspect.isclass(value):
            for key, member in inspect.getmembers(value):
                if is_own(member):
                    found.setdefault(inspect.getdoc(member), f"{name}.{key}")
    return {name: text for text, name in found.items() if text and ">>> " in text}


def is_own(member):
    """Return whether a method or property is defined in the packages."""
    module = getattr(getattr(member, "fget", None) or member, "__module__", None) or ""
    return module.partition(".")[0] in PACKAGES


def failure(name, text):
    """Run an example, and return the report of its failures, empty if there are none."""
    test = doctest.DocTestParser().get_doctest(text, {}, name, None, None)
    report = []
    environ = dict(os.environ)
    try:
        doctest.DocTestRunner(verbose=False).run(test, out=report.append)
    finally:
        os.environ.clear()
        os.environ.update(environ)
        if mpidist.is_initialized():
            mpidist.destroy_process_group()
    return "".join(report)


def main():
    """Run all examples."""
    reports = {name: failure(name, text) for name, text in examples().items()}
    print(json.dumps({name: report for name, report in reports.items() if report}))


if __name__ == "__main__":
    main()
