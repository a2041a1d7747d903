"""Host lists in Slurm's notation."""

import os
import random
import shutil
import subprocess

import pytest

from mpidist.errors import InvalidArgumentError
from mpidist.host_list import expand_hosts


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("login", ["login"]),
        ("n1,n2", ["n1", "n2"]),
        ("n[1-3]", ["n1", "n2", "n3"]),
        ("n[10,2,1-2]", ["n10", "n2", "n1", "n2"]),
        ("n[08-11]", ["n08", "n09", "n10", "n11"]),
        ("n[8-11]", ["n8", "n9", "n10", "n11"]),
        ("n[1-2],gpu[01,003],x", ["n1", "n2", "gpu01", "gpu003", "x"]),
        ("r[1-2]n[08-09]", ["r1n08", "r1n09", "r2n08", "r2n09"]),
        ("n[1-2]-ib.site", ["n1-ib.site", "n2-ib.site"]),
        ("[3-4]", ["3", "4"]),
        ("a-1,a-[2-3]", ["a-1", "a-2", "a-3"]),
    ],
)
def test_lists(text, hosts):
    assert expand_hosts(text) == hosts


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        (" a", ["a"]),
        ("a,", ["a"]),
        (",a", ["a"]),
        ("a,,b", ["a", "b"]),
        ("a, b", ["a", "b"]),
        ("a ,b ", ["a", "b"]),
        ("a b", ["a", "b"]),
        ("a\tb\n", ["a", "b"]),
        ("a\r\nb\r\n", ["a", "b"]),
        ("n[1-2] , x", ["n1", "n2", "x"]),
        ("x n[1-2]-ib", ["x", "n1-ib", "n2-ib"]),
        ("n[1-2], [3-4]", ["n1", "n2", "3", "4"]),
    ],
)
def test_blanks_and_commas(text, hosts):
    assert expand_hosts(text) == hosts


@pytest.mark.parametrize(
    "text",
    ["", " ", ",", " , ", "n[", "n]", "n[]", "n[1-]", "n[-1]", "n[3-1]", "n[a-c]", "n[1-2", "a,b]",
     "n[[1]]", "n[1-70000]", "n[1-300][1-300]", "n[1 - 2]", "n[\u0661-\u0663]", "n[1-3, 5]",
     "n[1, 2]", "n[1,2", "n[1,,2]", "n[1-2,]", "n [1-2]", "n[1-2] [3]", "# a", "a #b", "a # b",
     "a;b", "a:2", "-a", "a\u00a0b\u2009;", "\u00e4", "\ufeffa", "a\0", "a*2", "'a'", "a/b"],
)  # fmt: skip
def test_no_lists(text):
    with pytest.raises(InvalidArgumentError, match="host"):
        expand_hosts(text)


def drawn_list(rng, separators):
    """Return a random host list of any form that Slurm accepts, some with a final separator."""

    def brackets():
        parts = []
        for _ in range(rng.randint(1, 3)):
            first, width = rng.randint(0, 120), rng.choice((1, 1, 2, 3))
            last = first + rng.randint(0, 15)
            parts.append(f"{first:0{width}}" + (f"-{last:0{width}}" if rng.random() < 0.7 else ""))
        return f"[{','.join(parts)}]"

    def item():
        name = rng.choice(("n", "gpu", "rack-", "a1b", "x.y"))
        end = rng.random()
        if end < 0.2:
            return f"{name}{rng.randint(0, 50)}"
        return name + brackets() + ("" if end < 0.8 else f"c{brackets()}")

    text = item()
    for _ in range(rng.randint(0, 3)):
        text += rng.choice(separators) + item()
    if len(separators) > 1 and rng.random() < 0.5:
        text += rng.choice(separators)
    return text


@pytest.mark.skipif(shutil.which("scontrol") is None, reason="Slurm is not installed")
@pytest.mark.parametrize("separators", [(",",), (",", " ", ", ", " ,", ",,", "\t", " , ")])
def test_slurms_own_answers(tmp_path, separators):
    configuration = tmp_path / "slurm.conf"
    configuration.write_text("ClusterName=test\nSlurmctldHost=localhost\n")
    rng = random.Random(11)
    for _ in range(500):
        text = drawn_list(rng, separators)
        done = subprocess.run(
            ["scontrol", "show", "hostnames", text],
            env={**os.environ, "SLURM_CONF": str(configuration)},
            capture_output=True, text=True, timeout=30, check=False,
        )  # fmt: skip
        assert done.returncode == 0, (text, done.stderr)
        assert expand_hosts(text) == done.stdout.split(), text
