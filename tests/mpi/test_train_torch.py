"""The example with torch: its gradients and values travel through DLPack, launched and alone."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("sklearn")

SCRIPT = Path(__file__).resolve().parent.parent.parent / "scripts" / "train_torch.py"


@pytest.mark.parametrize(
    ("layout", "arguments", "steps"),
    [
        ((), (), 132),
        (("--ps", "1", "--worker", "2"), (), 132),
        (("--ps", "2", "--worker", "2"), ("--ps", "2", "--mode", "sync"), 66),
    ],
    ids=["alone", "async", "sync"],
)
def test_it_learns(layout, arguments, steps, tmp_path):
    launcher = ("-m", "mpidist", "run", *layout) if layout else ()
    words = (*arguments, "--epochs", "3", "--output-dir", str(tmp_path))
    command = (sys.executable, *launcher, str(SCRIPT), *words)
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    found = re.fullmatch(r"(\d+) steps, held-out accuracy (0\.\d+)\n", ended.stdout)
    assert found, ended.stdout
    assert int(found[1]) == steps
    assert float(found[2]) > 0.7
