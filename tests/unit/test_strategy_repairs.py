"""Folders that a save keeps, and the truth value of a variable."""

from strategy import ParameterServerStrategy, get_variable


def test_a_save_at_a_lower_step_stays(tmp_path):
    for step in (1000, 2000, 3000):
        (tmp_path / f"step-{step}").mkdir()
        (tmp_path / f"step-{step}" / "index.json").write_text("{}")
    path = ParameterServerStrategy().save(str(tmp_path), keep=3)
    assert path.endswith("step-0")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-0", "step-2000", "step-3000"]


def test_a_save_leaves_other_folders_alone(tmp_path):
    (tmp_path / "my.partial-results").mkdir()
    (tmp_path / "step-5.partial-77").mkdir()
    ParameterServerStrategy().save(str(tmp_path))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["my.partial-results", "step-0"]


def test_truth_of_a_variable():
    with ParameterServerStrategy().scope():
        assert not get_variable("off", initializer=0.0)
        assert get_variable("on", (1,), initializer="ones")
