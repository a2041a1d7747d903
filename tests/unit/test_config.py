"""Settings from environment variables."""

import os
import re

import pytest

import mpidist.config
from mpidist.config import Config

NUMBERS = {
    "MPIDIST_START_TIMEOUT_S": ("start_timeout_s", 60.0),
    "MPIDIST_CALL_TIMEOUT_S": ("call_timeout_s", 120.0),
    "MPIDIST_STALL_S": ("stall_s", 60.0),
    "MPIDIST_STALL_ABORT_S": ("stall_abort_s", float("inf")),
    "MPIDIST_CREDIT_BYTES": ("credit_bytes", 64 << 20),
}
TEXTS = {
    "MPIDIST_RUN_DIR": "run_dir",
    "MPIDIST_TIMELINE": "timeline",
    "MPIDIST_JOBS": "jobs",
    "MPIDIST_SECRET": "secret",
}
CHOICES = {
    "MPIDIST_GPU_MPI": {"0": False, "1": True},
    "MPIDIST_HOOKS": {"0": False, "1": True},
    "MPIDIST_DEBUG": {"info": "info", "off": "off", "detail": "detail"},
}


def test_defaults():
    config = Config.from_env({"OTHER": "x"})
    assert config == Config()
    assert all(getattr(config, name) == default for name, default in NUMBERS.values())
    assert config.run_dir is config.jobs is None


@pytest.mark.parametrize("name", [*NUMBERS, *TEXTS])
def test_empty_means_unset(name):
    assert Config.from_env({name: ""}) == Config()


@pytest.mark.parametrize(("variable", "name"), [(v, n) for v, (n, _) in NUMBERS.items()])
@pytest.mark.parametrize(("text", "value"), [("7", 7), (" 2e3 ", 2000), ("1.0", 1)])
def test_numbers(variable, name, text, value):
    config = Config.from_env({variable: text})
    assert getattr(config, name) == value
    assert type(getattr(config, name)) is type(getattr(Config(), name))


@pytest.mark.parametrize(("variable", "name"), TEXTS.items())
def test_texts(variable, name):
    assert getattr(Config.from_env({variable: "a=1 b"}), name) == "a=1 b"


@pytest.mark.parametrize("variable", NUMBERS)
@pytest.mark.parametrize("text", ["x", "1s", "0", "-3", "nan", "-inf"])
def test_bad_numbers(variable, text):
    with pytest.raises(ValueError, match=f"{variable}='{re.escape(text)}' "):
        Config.from_env({variable: text})


@pytest.mark.parametrize("text", ["inf", "0.5", "1e30"])
def test_memory_needs_a_whole_number(text):
    with pytest.raises(ValueError, match=f"MPIDIST_CREDIT_BYTES='{text}' "):
        Config.from_env({"MPIDIST_CREDIT_BYTES": text})
    assert Config.from_env({"MPIDIST_STALL_S": text}).stall_s == float(text)


def test_the_secret_is_not_shown():
    assert "xyzzy" not in repr(Config.from_env({"MPIDIST_SECRET": "xyzzy"}))


def test_the_process_has_read_its_own():
    assert mpidist.config.config == Config.from_env(os.environ)


def test_every_variable_is_in_the_table():
    text = mpidist.config.__doc__
    known = [*NUMBERS, *TEXTS, *CHOICES]
    assert sorted(re.findall(r"``(MPIDIST_\w+)``", text)) == sorted(known)


@pytest.mark.parametrize(("name", "words"), CHOICES.items())
def test_choices(name, words):
    field = name.removeprefix("MPIDIST_").lower()
    for text, value in words.items():
        assert getattr(Config.from_env({name: text}), field) == value
        assert getattr(Config.from_env({name: text.upper()}), field) == value
    assert Config.from_env({name: ""}) == Config()
    with pytest.raises(ValueError, match=f"{name}='Yes' is none of {', '.join(words)}"):
        Config.from_env({name: "Yes"})
