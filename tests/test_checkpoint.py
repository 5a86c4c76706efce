"""A step is committed whole or not at all, and an old one goes only when a new one is there."""

import errno
import json
import os
import pathlib
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jzero
from jzero import checkpoint
from jzero.arrays import write_arrays
from jzero.checkpoint import ITEM, Checkpoints, damaged, open_step, steps_in
from jzero.manifest import MANIFEST_FILE, read_manifest
from jzero.mesh import make_mesh
from jzero.zero import Zero

pytestmark = pytest.mark.filterwarnings("ignore:.*Attempted to create temporary directory")

ZERO = Zero(make_mesh(), 1, like={"w": jnp.zeros((13, 3))})


def save(checkpoints, step):
    checkpoints.save(step, ZERO, params=ZERO.place({"w": jnp.full((13, 3), float(step))}))


def value(folder, step=None):
    params = {"w": jax.ShapeDtypeStruct((13, 3), jnp.float32)}
    got = Checkpoints(folder).restore(ZERO, step=step, params=params)
    return float(np.asarray(got["params"]["w"])[12, 2])


class FullDisk:
    """Writes of arrays fail while `is_full`, after the first file of them was written."""

    def __init__(self, monkeypatch):
        self.is_full = False
        monkeypatch.setattr(checkpoint, "write_arrays", self.write)

    def write(self, directory, arrays):
        write_arrays(directory, arrays)
        if self.is_full:
            raise OSError(errno.ENOSPC, "No space left on device")


@pytest.fixture
def disk(monkeypatch):
    return FullDisk(monkeypatch)


@pytest.mark.parametrize("is_async", [True, False])
def test_the_latest_are_kept_and_restored(tmp_path, is_async):
    checkpoints = Checkpoints(tmp_path, keep=2, is_async=is_async)
    for step in (3, 7, 11):
        save(checkpoints, step)
    checkpoints.close()
    assert steps_in(tmp_path) == [7, 11]
    assert value(tmp_path) == 11.0
    assert value(tmp_path, step=7) == 7.0


def test_an_old_step_is_deleted_only_when_the_new_one_is_committed(tmp_path, disk):
    checkpoints = Checkpoints(tmp_path, keep=1)
    save(checkpoints, 1)
    checkpoints.wait()
    disk.is_full = True
    save(checkpoints, 2)
    with pytest.raises(OSError, match="No space left"):
        checkpoints.wait()
    assert steps_in(tmp_path) == [1]
    assert damaged(open_step(tmp_path)) == []
    disk.is_full = False
    save(checkpoints, 2)
    checkpoints.close()
    assert steps_in(tmp_path) == [2]


def test_a_failed_background_write_is_told_once_at_the_next_check(tmp_path, disk):
    checkpoints = Checkpoints(tmp_path)
    disk.is_full = True
    save(checkpoints, 1)
    while not checkpoints._writer.has_failed:
        time.sleep(0.01)
    with pytest.raises(OSError, match="No space left"):
        checkpoints.check()
    checkpoints.check()
    checkpoints.wait()
    checkpoints.close()
    assert steps_in(tmp_path) == []


def test_a_failed_save_does_not_lose_count_of_what_is_kept(tmp_path, disk):
    checkpoints = Checkpoints(tmp_path, keep=2)
    for step, disk.is_full in ((1, False), (2, False), (3, True), (4, False), (5, False)):
        save(checkpoints, step)
        try:
            checkpoints.wait()
        except OSError:
            assert step == 3
    checkpoints.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["4", "5", "jzero.json"]


def test_a_process_that_was_killed_leaves_nothing_that_counts(tmp_path):
    half = tmp_path / "9.orbax-checkpoint-tmp"
    half.mkdir()
    save(first := Checkpoints(tmp_path), 8)
    first.close()
    assert steps_in(tmp_path) == [8]
    assert not half.exists()


def test_a_process_that_was_killed_while_it_deleted_leaves_no_step_in_parts(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr("jzero.checkpoint.shutil.rmtree", lambda *_, **__: None)  # never gets to it
        checkpoints = Checkpoints(tmp_path, keep=1)
        for step in (1, 2, 3):
            save(checkpoints, step)
        checkpoints.close()
        assert steps_in(tmp_path) == [3]
        assert (tmp_path / "deleted" / "2").exists()
    checkpoints = Checkpoints(tmp_path)
    checkpoints.take()
    checkpoints.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["3", "jzero.json"]


def test_a_directory_that_is_gone_is_an_error_and_is_not_made_anew(tmp_path):
    checkpoints = Checkpoints(tmp_path / "here")
    save(checkpoints, 1)
    checkpoints.wait()
    (tmp_path / "here").rename(tmp_path / "there")
    with pytest.raises(OSError, match="here is gone"):
        save(checkpoints, 2)
    assert not (tmp_path / "here").exists()
    (tmp_path / "there").rename(tmp_path / "here")
    save(checkpoints, 2)
    checkpoints.close()
    assert steps_in(tmp_path / "here") == [1, 2]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda p: Checkpoints(p, keep=0), "keep is 0; keep at least 1"),
        (lambda p: Checkpoints(p / "file"), "file is a file; name a directory"),
        (lambda p: Checkpoints(p / "file" / "x").take(), r"cannot be written .*name another"),
        (lambda p: open_step(p / "nowhere"), "does not exist; name the folder"),
        (lambda p: open_step(p), "holds no checkpoint; name the folder"),
        (lambda p: read_manifest(p), "is no checkpoint of jzero"),
    ],
)
def test_what_cannot_work_says_so(tmp_path, make, message):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=message):
        make(tmp_path)


@pytest.fixture
def one_step(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    save(checkpoints, 1)
    checkpoints.close()
    return open_step(tmp_path)


def flip(path, place):
    content = bytearray(path.read_bytes())
    content[place % len(content)] ^= 4
    path.write_bytes(content)


@pytest.mark.parametrize("place", [1, 40, 200, -3])
def test_a_flipped_byte_of_an_arrays_metadata_is_found_and_named(one_step, place):
    assert damaged(one_step) == []
    flip(one_step.path / ITEM / "params.w" / "zarr.json", place)
    assert any("params.w" in line for line in damaged(one_step))


@pytest.mark.parametrize("place", [5, 300, -2])
def test_a_flipped_byte_of_the_manifest_is_found_and_named(one_step, place):
    flip(one_step.path / ITEM / MANIFEST_FILE, place)
    with pytest.raises(ValueError, match=r"manifest\.json is damaged"):
        open_step(one_step.path)


def test_a_format_of_the_future_is_refused(one_step, monkeypatch):
    path = one_step.path / ITEM / MANIFEST_FILE
    fields = json.loads(path.read_text())
    path.write_text(json.dumps(fields | {"format": 2}))
    monkeypatch.setattr("jzero.manifest._checksum", lambda _: fields["checksum"])
    with pytest.raises(ValueError, match="format 2, and this jzero reads 1; upgrade"):
        open_step(one_step.path)


def test_a_manifest_tells_versions_and_logical_shapes(one_step):
    manifest = one_step.manifest
    assert manifest.leaves["params.w"].shape == (13, 3)
    assert manifest.versions["jax"] == jax.__version__
    assert manifest.num_bytes == 13 * 3 * 4


def test_steps_only_go_forward(tmp_path):
    with Checkpoints(tmp_path) as checkpoints:
        save(checkpoints, np.int32(5))
        checkpoints.wait()
        for step in (5, 3):
            with pytest.raises(ValueError, match=f"step {step} is not after step 5, which is in"):
                save(checkpoints, step)
        assert (checkpoints.steps, checkpoints.latest_step) == ([5], 5)


def test_numbers_and_what_is_known_of_a_step_come_back(tmp_path):
    params = ZERO.place({"w": jnp.ones((13, 3))})
    with Checkpoints(tmp_path) as checkpoints:
        assert checkpoints.latest_step is None
        checkpoints.save(1, ZERO, info={2: 1, 10: 2}, params=params, epoch=3)
        like = {"epoch": jax.ShapeDtypeStruct((), jnp.int32)}
        assert int(checkpoints.restore(ZERO, **like)["epoch"]) == 3  # a part alone
        assert checkpoints.info() == {"2": 1, "10": 2}
    assert damaged(open_step(tmp_path)) == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"step": -1}, "step is -1; give a number of steps"),
        ({"step": "1"}, "step is '1'; give a number of steps"),
        ({"info": {"x": np.float32(1)}}, "info is no JSON .*Python's own numbers"),
        ({"optimizer": {"mu": jnp.ones(2)}}, "a part cannot be called optimizer"),
        ({"master": {"w": jnp.ones(2)}}, "a part cannot be called master"),
        (
            {"opt_state": {"mu": {"x": jnp.ones(2)}}},
            "opt_state is no state of this Zero",
        ),
    ],
)
def test_what_cannot_be_saved_is_refused_at_the_call(tmp_path, options, message):
    params = ZERO.place({"w": jnp.ones((13, 3))})
    with pytest.raises(ValueError, match=message):
        Checkpoints(tmp_path).save(**{"step": 1, "zero": ZERO, "params": params} | options)
    assert steps_in(tmp_path) == []


SCRIPT = """
import jax, jax.numpy as jnp, jzero
jax.config.update("jax_num_cpu_devices", 2)
zero = jzero.Zero(jzero.make_mesh(), 3, like={"w": jnp.ones((300, 300))})
jzero.Checkpoints("here").save(7, zero, params=zero.place({"w": jnp.ones((300, 300))}))
"""


def test_the_last_save_of_a_script_that_ends_is_not_lost(tmp_path):
    env = {**os.environ, "PYTHONPATH": str(pathlib.Path(__file__).parent.parent), "XLA_FLAGS": ""}
    done = subprocess.run([sys.executable, "-c", SCRIPT], cwd=tmp_path, env=env, text=True,
                          capture_output=True)  # fmt: skip
    assert done.returncode == 0
    assert "Traceback" not in done.stderr
    assert steps_in(tmp_path / "here") == [7]


def test_in_another_precision_a_loss_scale_starts_anew_and_is_to_be_given(tmp_path):
    states = {}
    for name in ("bfloat16", "float16"):
        policy = jzero.policy(name)
        tx = ZERO.optimizer(jzero.with_policy(optax.adam(1e-3), policy))
        params = ZERO.place({"w": jnp.ones((13, 3), policy.param_dtype)})
        states[name] = (params, tx.init(params), jax.eval_shape(tx.init, params))
    params, opt_state, _ = states["bfloat16"]
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, ZERO, params=params, opt_state=opt_state)
        params, opt_state, shapes = states["float16"]
        with pytest.raises(ValueError, match=r"bfloat16 there and float16 here, so the loss scale"):
            checkpoints.restore(ZERO, params=params, opt_state=shapes)
        got = checkpoints.restore(ZERO, params=params, opt_state=opt_state)
    assert float(got["opt_state"].loss_scale) == 65536.0
