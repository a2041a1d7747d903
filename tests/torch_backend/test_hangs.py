"""``mpidist doctor --hang`` on scripts that use torch's own backend gloo."""

import pytest
from _cases.hanging_jobs import check_answer
from _cases.hangs import GLOO


@pytest.mark.parametrize("name", GLOO)
def test_the_report_names_the_cause_the_ranks_and_the_line(tmp_path, name):
    check_answer(tmp_path, GLOO[name])
