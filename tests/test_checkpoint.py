"""A step is committed whole or not at all, and an old one goes only when a new one is there."""

import errno
import json
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

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
    while not checkpoints._handler.has_failed():
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
    assert sorted(path.name for path in tmp_path.iterdir()) == ["4", "5"]


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
    Checkpoints(tmp_path).close()
    assert [path.name for path in tmp_path.iterdir()] == ["3"]


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
        (lambda p: Checkpoints(p / "file"), r"cannot be written .*name another"),
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
    with pytest.raises(ValueError, match=r"manifest\.json is damaged.*earlier step"):
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
