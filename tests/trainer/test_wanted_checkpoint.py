"""The checkpoint that a person asks for: found by name, and where it cannot be had, the others are named."""

import pytest

from thermopile.trainer.errors import RunError
from thermopile.trainer.run_directory import RunDirectory, find_checkpoint, load_found

from support.written_checkpoints import write_checkpoint


def write(folder, *steps):
    """A run with these checkpoints."""
    run = RunDirectory(folder)
    for step in steps:
        write_checkpoint(run, step)
    return run


def test_the_latest_is_found_and_any_other_by_its_name(tmp_path):
    run = write(tmp_path, 3, 10)
    assert find_checkpoint(run, "latest") == run.checkpoints / "step-10"
    assert load_found(find_checkpoint(run, "step-3"))[0].step == 3


@pytest.mark.parametrize("at", ["step-7", "step-99", "../checkpoints/step-3", ""])
def test_where_there_is_none_of_that_name_those_that_there_are_are_named_by_step(at, tmp_path):
    run = write(tmp_path, 3, 10)
    (run.checkpoints / "step-99").write_text("no directory")
    with pytest.raises(RunError, match=f"no checkpoint '{at}'; available: step-3, step-10$"):
        find_checkpoint(run, at)


def test_the_latest_is_the_newest_there_is_whatever_the_file_of_that_name_says(tmp_path):
    run = write(tmp_path, 3, 7, 10)
    (run.checkpoints / "latest").write_text("step-3")
    assert find_checkpoint(run, "latest").name == "step-10"
    (run.checkpoints / "step-10").rename(tmp_path / "elsewhere")
    assert find_checkpoint(run, "latest").name == "step-7"


def test_where_one_is_damaged_the_others_are_offered(tmp_path):
    run = write(tmp_path, 3, 7, 10)
    (run.checkpoints / "step-10" / "training.json").write_bytes(b"")
    with pytest.raises(RunError, match=r"step-10 is damaged .* Choose another with --at: step-3, step-7$") as refusal:
        load_found(run.checkpoints / "step-10")
    assert "\n" not in str(refusal.value)


def test_where_the_only_one_is_damaged_a_new_run_is_the_cure(tmp_path):
    run = write(tmp_path, 3)
    (run.checkpoints / "step-3" / "training.json").write_bytes(b"")
    with pytest.raises(RunError, match=r"is damaged \([^()]*\)\. There is no other; start a new run$"):
        load_found(run.checkpoints / "step-3")
