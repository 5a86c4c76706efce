"""`jzero checkpoint` shows what is saved, and finds a byte that is not as it was written."""

import jax.numpy as jnp
import pytest

from jzero.checkpoint import ITEM, Checkpoints
from jzero.checkpoint_command import prepare_checkpoint
from jzero.mesh import make_mesh
from jzero.zero import Zero


@pytest.fixture
def folder(tmp_path):
    """Steps 2 and 4 of one padded array and a moment of it."""
    zero = Zero(make_mesh(), 3, like={"w": jnp.zeros((13, 3))})
    checkpoints = Checkpoints(tmp_path, keep=5)
    info = {"config": {"zero": {"stage": 3}}, "num_rows": 8}
    for step in (2, 4):
        params = zero.place({"w": jnp.ones((13, 3))})
        checkpoints.save(step, zero, info=info, params=params, extra={"n": jnp.int32(step)})
    checkpoints.close()
    return tmp_path


def test_inspect_lists_steps_arrays_configuration_and_versions(folder, capsys):
    assert prepare_checkpoint(["inspect", str(folder)])() == 0
    printed = capsys.readouterr().out
    for word in ("step        2", "step        4", "arrays of step 4", "params.w", "13x3",
                 "float32", "156 B", "extra.n", "scalar", "int32", "num_rows: 8",
                 "[zero]\nstage = 3", "written by python 3", "tensorstore"):  # fmt: skip
        assert word in printed


def test_inspect_of_one_step_is_of_that_step(folder, capsys):
    assert prepare_checkpoint(["inspect", str(folder / "2")])() == 0
    assert "arrays of step 2" in capsys.readouterr().out


def test_verify_reads_every_step_and_names_the_damage(folder, capsys):
    verify = prepare_checkpoint(["verify", str(folder)])
    assert verify() == 0
    assert capsys.readouterr().out.count("whole") == 2
    (file,) = (folder / "2" / ITEM).glob("params.w/c/3/0")
    content = bytearray(file.read_bytes())
    content[0] ^= 128
    file.write_bytes(content)
    assert verify() == 1
    printed = capsys.readouterr().out
    assert f"{folder / '2'}: DAMAGED" in printed
    assert f"{folder / '4'}: whole" in printed
    assert "params.w in " in printed
    assert str(file) in printed


@pytest.mark.parametrize("words", [[], ["look", "x"], ["verify"], ["verify", "a", "b"]])
def test_other_words_show_the_usage(words):
    with pytest.raises(ValueError, match=r"(?s)is not understood.*jzero checkpoint inspect DIR"):
        prepare_checkpoint(words)


def test_a_folder_without_checkpoints_is_refused(tmp_path):
    with pytest.raises(ValueError, match="holds no checkpoint"):
        prepare_checkpoint(["verify", str(tmp_path)])
