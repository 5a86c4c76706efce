"""A run that cannot save says so, goes on or stops as it is told to, and loses nothing."""

import shutil
from typing import ClassVar

import jax.numpy as jnp
import pytest

from jzero.checkpoint import Checkpoints, steps_in
from jzero.config import CheckpointConfig, parse_config
from jzero.ownership import MARK, Owner, check_is_ours
from jzero.saving import SaveError, Saver
from tests.test_checkpoint import ZERO, disk  # noqa: F401

pytestmark = pytest.mark.filterwarnings("ignore:.*Attempted to create temporary directory")


def parts():
    return {"params": ZERO.place({"w": jnp.ones((13, 3))})}


class Run:
    """A saver of a run of one array, whose writes end before the next step."""

    all: ClassVar[list["Run"]] = []

    def __init__(self, folder, **settings):
        self.all.append(self)
        self.said = []
        settings = CheckpointConfig(**{"every": 2, "is_async": False} | settings)
        options = {"keep": settings.keep, "is_async": settings.is_async}
        self.checkpoints = Checkpoints(folder, **options)
        self.checkpoints.take()
        self.saver = Saver(settings, self.checkpoints, ZERO, self.said.append)

    def steps(self, *steps):
        for step in steps:
            self.saver.after(step, parts, {})


@pytest.fixture
def folder(tmp_path):
    yield tmp_path / "checkpoints"
    for run in Run.all:
        run.saver.close()
    Run.all.clear()


def test_steps_are_saved_when_due_and_at_the_end(folder):
    run = Run(folder, keep=9)
    run.steps(1, 2, 3, 4, 5)
    assert steps_in(folder) == [2, 4]
    run.saver.finish(5, parts, {})
    run.saver.finish(5, parts, {})
    run.saver.close()
    assert steps_in(folder) == [2, 4, 5]
    assert len([line for line in run.said if "saving" in line]) == 3


@pytest.mark.parametrize("is_async", [True, False])
def test_a_save_that_fails_is_told_and_tried_again_until_it_works(folder, disk, is_async):  # noqa: F811
    run = Run(folder, every=4, is_async=is_async)
    disk.is_full = True
    for step in range(4, 8):
        run.steps(step)
        while run.checkpoints.is_busy:
            pass
    failed = [line for line in run.said if "SAVING FAILED" in line]
    assert "No space left" in failed[0]
    assert "what was saved before is intact" in failed[0]
    assert steps_in(folder) == []
    disk.is_full = False
    run.steps(*range(8, 13))
    run.saver.finish(13, parts, {})
    run.saver.close()
    assert steps_in(folder)[-1] == 13


def test_tries_are_further_and_further_apart_but_never_more_than_every(folder, disk):  # noqa: F811
    run = Run(folder, every=4)
    disk.is_full = True
    run.steps(*range(4, 20))
    tried = [int(line.split()[1].rstrip(":")) for line in run.said if "FAILED" in line]
    assert tried == [4, 5, 7, 8, 12, 16]


def test_stop_ends_the_run_and_says_how_to_go_on(folder, disk):  # noqa: F811
    run = Run(folder, on_failure="stop")
    run.steps(1, 2)
    disk.is_full = True
    with pytest.raises(SaveError, match=r"step 4: saving failed .*intact in .*same command"):
        run.steps(3, 4)
    assert steps_in(folder) == [2]


def test_the_last_save_is_tried_several_times_and_then_an_error(folder, disk, monkeypatch):  # noqa: F811
    waits = []
    monkeypatch.setattr("jzero.saving.time.sleep", waits.append)
    run = Run(folder)
    disk.is_full = True
    with pytest.raises(SaveError, match="step 3: saving failed"):
        run.saver.finish(3, parts, {})
    assert waits == [1, 2, 4, 8]


def test_a_directory_that_vanishes_is_named_and_used_again_when_it_is_back(folder):
    run = Run(folder)
    run.steps(2)
    shutil.rmtree(folder)
    run.steps(4)
    assert "checkpoints is gone; bring it back" in run.said[-1]
    assert not folder.exists()
    folder.mkdir()
    run.steps(5)
    assert steps_in(folder) == [5]


def test_a_directory_in_use_is_refused(folder):
    run = Run(folder)
    with pytest.raises(ValueError, match="is in use by another run; name another"):
        Owner(folder)
    run.checkpoints._writer._owner.close()
    Owner(folder).close()


def test_a_run_that_began_later_takes_over_and_the_first_is_told(folder):
    run = Run(folder)
    run.checkpoints._writer._owner.close()  # as on a file system without locks
    Owner(folder).close()
    run.steps(2)
    assert "belongs to another run" in run.said[-1]
    assert steps_in(folder) == []


def test_a_directory_of_something_else_is_refused(tmp_path):
    (tmp_path / "7").mkdir()
    with pytest.raises(ValueError, match=f"holds 7 and no {MARK}"):
        check_is_ours(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="is a file; name a directory"):
        check_is_ours(tmp_path / "file")
    check_is_ours(tmp_path / "new")


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"every": -1}, r"\[checkpoint\] every is -1"),
        ({"every": 1, "keep": 0}, r"\[checkpoint\] keep is 0"),
        ({"dir": "x"}, r"\[checkpoint\] dir is 'x'.*has no effect without checkpoint.every"),
        ({"resume": "must"}, "has no effect without checkpoint.every"),
        ({"every": 1, "resume": "yes"}, "resume is 'yes'"),
        ({"every": 1, "is_async": False}, "has no key 'is_async'; did you mean 'async'"),
    ],
)
def test_settings_that_cannot_work_are_refused(table, message):
    with pytest.raises(ValueError, match=message):
        parse_config({"checkpoint": table})


def test_async_is_a_key_of_the_file():
    assert not parse_config({"checkpoint": {"every": 1, "async": False}}).checkpoint.is_async
