"""Schedules in mode sync: workers that make equal ones agree, and different ones are refused."""

import collections
import dataclasses
import enum
import functools
import logging
import os
import random
import subprocess
import sys
import threading
import types
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import NamedTuple

import numpy as np
import pytest
from _cases.servers import Cluster

from mpidist import errors
from strategy import get_variable, optimizers, schedules


def decay(rate, step):
    return rate / (1 + step)


def constant(rate):
    return lambda step: rate


def constant_of(values):
    return lambda step: 0.5 if len(values) else 0.25


class Warmup:
    def __init__(self, top, rates=()):
        self.top, self.rates = top, np.array(rates)

    def __call__(self, step):
        return self.top

    def method(self, step):
        return self.top


class Slotted:
    __slots__ = ("top",)

    def __init__(self, top):
        self.top = top

    def __call__(self, step):
        return self.top


def train(makers):
    """Make one step of two workers in mode sync, each with a schedule of its own making."""

    def work(index):
        strategy = cluster.worker(index, mode="sync")
        with strategy.scope():
            v = get_variable("v", 3, np.float64, 0.0)
        junk = [object() for _ in range(100 * index)]  # so that addresses differ
        optimizer = optimizers.SGD(makers[index](), name="sgd")
        del junk
        try:
            optimizer.apply_gradients([(np.ones(3), v)]).wait()
            return v.read_value()
        finally:
            strategy.finish()

    with ExitStack() as stack:
        cluster = Cluster(stack)
        with ThreadPoolExecutor(2) as pool:
            return [future.result(60) for future in [pool.submit(work, n) for n in range(2)]]


RATE = 0.5
TABLES = {0.5: {"a": 0.5, "b": 1.0}, 0.25: {"a": 0.25, "b": 1.0}}


def of_globals(rate):
    """Functions whose code is the same, and whose module has another value."""
    space = {"RATE": rate}
    exec("def schedule(step):\n    return RATE", space)
    return space["schedule"]


def calling(rate):
    def inner(step):
        return rate if rate == 0.5 else rate * 1.0

    space = {"inner": inner}
    exec("def schedule(step):\n    return [inner(each) for each in (step,)][0]", space)
    return space["schedule"]


class Locked(Warmup):
    """An object that holds what shows its address."""

    def __init__(self, top):
        super().__init__(top)
        self.lock = threading.Lock()

    def __getstate__(self):
        return {"top": self.top, "rates": self.rates}


def recursive(rate):
    def schedule(step):
        return rate if step < 1 else schedule(step - 1)

    return schedule


def with_empty_cell(rate):
    def schedule(step):
        return rate if step >= 0 else never

    if schedule is None:
        never = 0
    return schedule


def in_code(half, quarter):
    """Two functions of one name, which differ in their code."""
    return lambda rate: half if rate == 0.5 else quarter


def instance(make):
    """A schedule that is an object of a class which a function makes."""
    return lambda rate: make(rate)()


def code_of_call(rate):
    class Rate:
        if rate == 0.5:

            def __call__(self, step):
                return 0.5

        else:

            def __call__(self, step):
                return 0.25

    return Rate


def captured_by_call(rate):
    class Rate:
        def __call__(self, step):
            return rate

    return Rate


def attribute_of_class(rate):
    class Rate:
        top = rate

        def __call__(self, step):
            return self.top

    return Rate


def static_method(rate):
    class Rate:
        @staticmethod
        def top():
            return rate

        def __call__(self, step):
            return self.top()

    return Rate


def class_method(rate):
    class Rate:
        @classmethod
        def top(cls):
            return rate

        def __call__(self, step):
            return self.top()

    return Rate


def property_of(rate):
    class Rate:
        @property
        def top(self):
            return rate

        def __call__(self, step):
            return self.top

    return Rate


def only_cached_property(rate):
    class Rate:
        @functools.cached_property
        def top(self):
            return rate

        def __call__(self, step):
            return 0.5

    return Rate


def base_class(rate):
    class Base:
        def __call__(self, step):
            return rate

    class Rate(Base):
        pass

    return Rate


def meta_class(rate):
    class Meta(type):
        def top(cls):
            return rate

    class Rate(metaclass=Meta):
        def __call__(self, step):
            return type(self).top()

    return Rate


def cyclic(rate):
    class Rate:
        def __call__(self, step):
            return rate

        def copy(self):
            return Rate(), Other()

    class Other(Rate):
        pass

    Rate.other = Other
    Rate.one = Other()
    Rate.one.itself = [Rate.one]
    return Rate


def with_repr(rate):
    class Rate:
        def __call__(self, step):
            return rate

        def __repr__(self):
            return "Rate"

    return Rate


def data_class(rate):
    @dataclasses.dataclass(frozen=True)
    class Rate:
        top: float = 0.5

        def __call__(self, step):
            return rate

    return Rate


def data_class_of_defaults(rate):
    @dataclasses.dataclass
    class Rate:
        tops: list = dataclasses.field(default_factory=lambda: [rate])

        def __call__(self, step):
            return self.tops[0]

    return Rate


def named_tuple(rate):
    class Rate(NamedTuple):
        top: float = 0.5

        def __call__(self, step):
            return rate

    return Rate


def dict_class(rate):
    class Rate(dict):
        def __call__(self, step):
            return rate

    return Rate


def float_class(rate):
    class Rate(float):
        def __call__(self, step):
            return self + 0.0

    return Rate(rate)


def enum_class(rate):
    class Rate(enum.Enum):
        TOP = 0.5

        def __call__(self, step):
            return rate

    return Rate.TOP


def flags(rate):
    class Rate(enum.Flag):
        A, B, C = 1, 2, 4

    if rate == 0.25:
        return Warmup(rate)
    if Rate.A | Rate.B and next(COUNT) % 2:
        Rate.B | Rate.C  # which enum adds to its tables
    one = Warmup(rate)
    one.kind = Rate.A
    return one


COUNT = iter(range(1000))


def function_attribute(rate):
    def schedule(step):
        return schedule.top

    schedule.top = rate
    return schedule


def used_class(rate):
    """A function whose class of the same name is a global."""
    space = {"Rate": captured_by_call(rate)}
    exec("def schedule(step):\n    return Rate()(step)", space)
    return space["schedule"]


def used_module(rate):
    config = types.ModuleType("config")
    config.rate, config.logger = rate, logging.getLogger("config")
    space = {"config": config}
    exec("def schedule(step):\n    return config.rate", space)
    return space["schedule"]


def many_functions(rate):
    """Functions of which each uses all others."""
    space = {"RATE": rate}
    calls = " + ".join([f"f{n}(step - 1)" for n in range(40)])
    for n in range(40):
        exec(f"def f{n}(step):\n    return RATE if step >= 0 else {calls}", space)
    return space["f0"]


def set_of_functions(rate):
    def first(step):
        return rate

    def second(step):
        return rate + len(both)

    class Third:
        pass

    both = {first, second, Third}
    return lambda step: rate + 0 * len(both)


def state_of(kind):
    """Objects that hold an object of the library with a state."""

    def make(rate):
        schedule = Warmup(0.5)
        schedule.held = kind(int(100 * rate))
        return schedule

    return make


def generator_after(number):
    generator = np.random.default_rng(1)
    generator.random(number)
    return generator


KINDS = {
    "operator": in_code(lambda step: 0.1 * (step + 1), lambda step: 0.1 / (step + 1)),
    "attribute": in_code(lambda step: np.float64(0.5).real, lambda step: np.float64(0.5).imag),
    "text": in_code(lambda step: TABLES[0.5]["a"], lambda step: TABLES[0.5]["b"]),
    "tuple": in_code(lambda step: (0.5, 0.1)[step], lambda step: (0.5, 0.2)[step]),
    "nested": in_code(
        lambda step: max([0.5 * each for each in (1,)]),
        lambda step: max([0.5 + each for each in (1,)]),
    ),
    "default": in_code(lambda step, rate=0.5: rate, lambda step, rate=0.25: rate),
    "global": of_globals,
    "called function": calling,
    "captured set": lambda rate: constant_of({"warm", "up", "then", "decay", rate}),
    "captured dict": lambda rate: constant_of(dict.fromkeys({"warm", "up", "decay"}, rate)),
    "object with a lock": Locked,
    "recursive": recursive,
    "empty cell": with_empty_cell,
    "close floats": lambda rate: Warmup(0.5, [0.1 + rate * 1e-12]),
    "partial": lambda rate: functools.partial(decay, rate),
    "partial of a partial": lambda rate: functools.partial(functools.partial(decay, rate)),
    "object": Warmup,
    "object with slots": Slotted,
    "bound method": lambda rate: Warmup(rate).method,
    "closure": constant,
    "object with an array": lambda rate: Warmup(0.5, [rate] * 5000),
    "object in an object": lambda rate: Warmup(0.5, [Warmup(rate)]).method,
    "code of __call__": instance(code_of_call),
    "captured by __call__": instance(captured_by_call),
    "class attribute": instance(attribute_of_class),
    "static method": instance(static_method),
    "class method": instance(class_method),
    "property": instance(property_of),
    "base class": instance(base_class),
    "metaclass": instance(meta_class),
    "cyclic classes": instance(cyclic),
    "class with a repr": instance(with_repr),
    "data class": instance(data_class),
    "default of a data class": instance(data_class_of_defaults),
    "named tuple": instance(named_tuple),
    "dict": instance(dict_class),
    "float": float_class,
    "enum": enum_class,
    "flags": flags,
    "bound method of a class": lambda rate: captured_by_call(rate)().__call__,
    "class in an object": lambda rate: Warmup(0.5, [captured_by_call(rate)]),
    "class that is captured": lambda rate: constant_of([captured_by_call(rate)]),
    "class that is used": used_class,
    "module that is used": used_module,
    "function attribute": function_attribute,
    "functions of each other": many_functions,
    "set of functions": set_of_functions,
    "wrapped function": lambda rate: functools.wraps(decay)(constant(rate)),
    "random.Random": state_of(random.Random),
    "RandomState": state_of(np.random.RandomState),
    "Generator": state_of(np.random.default_rng),
    "state of a Generator": state_of(generator_after),
    "BitGenerator": state_of(np.random.PCG64),
    "method of a Generator": state_of(lambda seed: np.random.default_rng(seed).random),
    "memoryview": state_of(lambda number: memoryview(bytes([number]) * 5000)),
    "deque": state_of(lambda number: collections.deque([constant(number)])),
    "namespace": state_of(lambda number: types.SimpleNamespace(top=constant(number))),
    "array of objects": state_of(lambda n: np.array([[{"a": n}], [None]], dtype=object)),
    "of this package": lambda rate: schedules.ExponentialDecay(rate, 10, 0.5),
}


@pytest.mark.parametrize("kind", KINDS)
def test_equal_schedules_of_two_workers_agree(kind):
    for value in train([lambda: KINDS[kind](0.5)] * 2):
        assert value[0] < 0


@pytest.mark.parametrize("kind", KINDS)
def test_different_schedules_of_two_workers_are_refused(kind):
    with pytest.raises(errors.InvalidArgumentError, match="learning rate"):
        train([lambda: KINDS[kind](0.5), lambda: KINDS[kind](0.25)])


def test_the_message_names_the_schedule_and_says_what_differs():
    def message(kind):
        with pytest.raises(errors.InvalidArgumentError) as info:
            train([lambda: KINDS[kind](0.5), lambda: KINDS[kind](0.25)])
        return info.value.message

    call = message("code of __call__")
    name = "code_of_call.<locals>.Rate"
    assert call.count(f"learning rate schedule {name} (code ") == 2
    assert f"differ in the code of {name}, in its constants, or in globals or classes" in call
    values = message("closure")
    assert "constant.<locals>.<lambda> (code" in values
    assert "the learning rate schedules differ; in mode 'sync'" in values
    assert "differ in the code" not in values


@pytest.mark.parametrize(
    "make",
    [
        lambda rate: functools.lru_cache(constant(rate)),
        lambda rate: only_cached_property(rate)(),
    ],
)
def test_functions_that_cache_are_described_by_their_code(make):
    half, same, quarter = [repr(optimizers.SGD(make(rate))) for rate in (0.5, 0.5, 0.25)]
    assert half == same != quarter


DESCRIBED = """
import dataclasses, enum, sys, types
import numpy as np
from strategy import optimizers

class Base:
    tops = {"warm", "up", "then", "decay"}

class Rate(Base):
    def __call__(self, step):
        return helper(step) + len(Rate.tops)

@dataclasses.dataclass
class Data:
    rate: Rate
    tops: list = dataclasses.field(default_factory=lambda: [Rate()])

    def __call__(self, step):
        return self.rate(step)

class Kind(enum.Enum):
    A = 1
    B = 2

def helper(step):
    return np.mean([step]) if __name__ == "__main__" else Rate()

def schedule_of(names):
    return lambda step: 0.5 if "warm" in {"warm", "up", "then", "decay"} else len(names)

names = {"warm", "up", "then", "decay", object, Rate, Base, Data, helper, Kind.A}
for schedule in (schedule_of(names), Rate(), Data(Rate()), Rate().__call__, helper):
    print(optimizers.SGD(schedule))
"""


def test_a_schedule_is_described_alike_in_all_processes(tmp_path):
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "module.py").write_text(DESCRIBED)
    ways = [["-c", DESCRIBED], ["-m", "package.module"], ["-c", "import package.module"]]
    python_path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    texts = {
        subprocess.run(
            [sys.executable, *arguments],
            env={**os.environ, "PYTHONHASHSEED": str(seed), "PYTHONPATH": python_path},
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        ).stdout
        for seed in range(3)
        for arguments in ways
    }
    assert len(texts) == 1
    assert "schedule_of" in texts.pop()
