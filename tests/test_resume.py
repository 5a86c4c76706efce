"""A run that goes on from a checkpoint is the run that was never interrupted."""

import shutil

import pytest

from tests.runs import assert_same, curve, run, saved, tiny, write_text

pytestmark = pytest.mark.usefixtures("unoptimized")

FLOAT16 = {"policy": "float16", "initial_scale_power": 24, "loss_scale_window": 3, "hysteresis": 1}


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> str:
    return write_text(tmp_path_factory.mktemp("text"))


def interrupted(out_dir):
    """The run as it was after step 10, before anything of step 11 was written."""
    shutil.rmtree(out_dir / "checkpoints" / "20")


@pytest.mark.parametrize(
    ("stage", "precision"),
    [(0, {}), (1, {}), (2, {}), (3, {}), (2, FLOAT16), (3, {"policy": "bfloat16"})],
    ids=["stage 0", "stage 1", "stage 2", "stage 3", "float16", "bfloat16 stage 3"],
)
def test_20_steps_equal_10_a_restart_and_10_bitwise(text, tmp_path, stage, precision):
    config = tiny(text, tmp_path, zero={"stage": stage}, precision=precision)
    run(config)
    losses, (_, state) = curve(tmp_path), saved(tmp_path)
    assert len(losses) == 20
    interrupted(tmp_path)
    _, printed = run(config)
    assert "goes on from step 10" in printed
    assert "set differently" not in printed
    assert curve(tmp_path) == losses
    assert_same(saved(tmp_path)[1], state)
    if precision is FLOAT16:
        assert state["loss_scale.skipped_steps"] > 0
