"""Checkpoints by step in one directory: committed whole or not at all, written in the background.

Orbax commits a step by renaming its finished folder, and deletes old ones afterwards. The arrays
are written by `jzero.arrays`, since Orbax's own handlers store the padding of uneven shards.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import dataclasses
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
from flax import nnx
from orbax.checkpoint.checkpoint_managers import LatestN

from jzero.arrays import Pieces, StoredArrays, write_arrays
from jzero.manifest import Manifest, damaged_metadata, read_manifest, write_manifest
from jzero.restore import fit, places_of, restore_state, state_pieces
from jzero.zero import Zero

OTHERS = "others"  # part of a module's Variables that are no parameters
MARK_OF_STEP = "state/manifest.json"
DELETED = "deleted"  # folder of steps that are not kept, until they are gone
ITEM = "state"  # folder of the arrays within that of a step


class Checkpoints:
    """Writes steps into a directory and keeps the latest few.

    Args:
      directory: made if it is missing.
      keep: how many steps to keep, at least 1; older ones are deleted once a new one is committed.
      is_async: whether `save` returns when the arrays are copied to the host, and writes them in
        the background.

    Raises:
      ValueError: `keep` below 1, or a directory that cannot be written.
    """

    def __init__(self, directory: str | Path, *, keep: int = 2, is_async: bool = True) -> None:
        if keep < 1:
            raise ValueError(f"keep is {keep}; keep at least 1 checkpoint.")
        self.directory = Path(directory).absolute()
        check_writable(self.directory)
        self.is_async = is_async
        self._handler = _Handler()
        options = ocp.CheckpointManagerOptions(
            preservation_policy=LatestN(keep),
            cleanup_tmp_directories=True,  # of a process that was killed while it wrote
            todelete_subdir=DELETED,  # by a rename: a step is there whole, or not at all
            async_options=ocp.options.AsyncOptions(create_directories_asynchronously=False),
        )
        self._manager = ocp.CheckpointManager(
            self.directory, item_handlers={ITEM: self._handler}, options=options
        )
        self._handler.purge(self.directory / DELETED)

    def save(
        self, step: int, zero: Zero, *, info: Mapping[str, Any] | None = None, **parts: Any
    ) -> int:
        """Saves a state by parts; every process calls it.

        The arrays are copied to the host before it returns, so a later step may donate them. It
        waits until the save before is committed.

        Args:
          step: steps done, >= 0.
          zero: that laid out `params` and `opt_state`.
          info: JSON values to keep beside the arrays.
          **parts: trees of arrays: `params` (or a whole `nnx.Module`), `opt_state`, and any others,
            which every device holds whole.

        Returns:
          Bytes of the logical arrays.

        Raises:
          OSError: this one or the one before could not be written. What was committed is intact,
            and the same step may be saved again.
        """
        trees = _without_modules(parts)
        arrays = state_pieces(trees, places_of(zero, trees))
        manifest = Manifest(step, {n: x.leaf for n, x in arrays.items()}, dict(info or {}))
        self.write(manifest, arrays)
        return manifest.num_bytes

    def restore(self, zero: Zero, *, step: int | None = None, **parts: Any) -> dict[str, Any]:
        """Reads a state back, on any mesh, at any stage; each device receives only its shards.

        Args:
          zero: of the run that goes on.
          step: which one; the latest where left out.
          **parts: as in `save`, arrays or shapes, such as `params=jax.eval_shape(init_fn, key)` and
            `opt_state=jax.eval_shape(tx.init, params)`.

        Returns:
          The parts, at rest.

        Raises:
          OSError: the step that is being written could not be.
          ValueError: there is no such step, or its arrays are others: all that are missing,
            unexpected or of another shape are named.
        """
        self.wait()
        found = open_step(self.directory if step is None else self.directory / str(step))
        trees = _without_modules(parts)
        places = places_of(zero, trees)
        arrays = found.arrays
        try:
            names = fit(places, arrays.leaves).names
        except ValueError as error:
            raise ValueError(f"{found.path} is of another state: {error}") from error
        return _with_modules(parts, restore_state(trees, places, arrays, names))

    def write(self, manifest: Manifest, arrays: Mapping[str, Pieces]) -> None:
        """Saves arrays that are on the host, or are read while they are written; as `save`.

        Raises:
          OSError: this one or the one before could not be written. What was committed is intact,
            and the same step may be saved again.
        """
        self.wait()
        if not self.directory.is_dir():  # Orbax would make it anew, on another disk perhaps
            raise OSError(f"{self.directory} is gone")
        args = ocp.args.Composite(**{ITEM: _Write(manifest, arrays)})
        try:
            self._manager.save(manifest.step, args=args, force=True)
        except ValueError as error:  # how Orbax tells of a directory that it cannot make
            raise OSError(str(error)) from error
        if not self.is_async:
            self.wait()

    def check(self) -> None:
        """Raises what the background write of the last step failed with, once; else nothing."""
        if self._handler.has_failed() or not self.is_busy:
            self.wait()

    @property
    def is_busy(self) -> bool:
        """Whether a step is still being written."""
        return self._manager.is_saving_in_progress()

    def wait(self) -> None:
        """Waits until the last step is committed.

        Raises:
          OSError: it could not be written.
        """
        self._handler.forget()
        try:
            self._manager.wait_until_finished()
        except (OSError, ValueError) as error:
            self._manager.reload()  # else it goes on counting what it did not write
            if jax.process_index() == 0:
                for half in self.directory.glob("*.orbax-checkpoint-tmp*"):
                    shutil.rmtree(half, ignore_errors=True)  # room for the next try
            raise OSError(f"{error}") from error
        self._handler.purge(self.directory / DELETED)

    def close(self) -> None:
        """Waits, and ends the threads."""
        try:
            self.wait()
        finally:
            self._manager.close()
            self._handler.close()


def _without_modules(parts: Mapping[str, Any]) -> dict[str, Any]:
    """A module as `params` becomes its parameters and its other Variables."""
    params = parts.get("params")
    if not isinstance(params, nnx.Module):
        return dict(parts)
    _, trained, others = nnx.split(params, nnx.Param, ...)
    return {**parts, "params": trained, OTHERS: others}


def _with_modules(parts: Mapping[str, Any], restored: dict[str, Any]) -> dict[str, Any]:
    params = parts.get("params")
    if not isinstance(params, nnx.Module):
        return restored
    graphdef = nnx.split(params, nnx.Param, ...)[0]
    module = nnx.merge(graphdef, restored["params"], restored.pop(OTHERS))
    return {**restored, "params": module}


@dataclasses.dataclass(frozen=True)
class Step:
    """A committed checkpoint, as a `Source` of all its arrays in `arrays`."""

    path: Path
    manifest: Manifest

    @property
    def arrays(self) -> StoredArrays:
        """Its arrays, of which nothing is read yet."""
        return StoredArrays(self.path / ITEM, self.manifest.leaves)


def steps_in(directory: str | Path) -> list[int]:
    """The steps committed in a directory, in order; none where there is no such directory."""
    if not Path(directory).is_dir():
        return []
    found = (path for path in Path(directory).iterdir() if path.name.isdecimal())
    return sorted(int(path.name) for path in found if (path / ITEM).is_dir())


def open_step(path: str | Path) -> Step:
    """Opens one step's folder, or the latest step of a directory of them.

    Raises:
      ValueError: there is no checkpoint; or its manifest is damaged.
    """
    path = Path(path)
    if not (path / ITEM).is_dir():
        steps = steps_in(path)
        if not steps:
            what = "holds no checkpoint" if path.exists() else "does not exist"
            raise ValueError(
                f"{path} {what}; name the folder that [checkpoint] dir named, or one of its steps."
            )
        path = path / str(steps[-1])
    return Step(path, read_manifest(path / ITEM))


def damaged(step: Step) -> list[str]:
    """Reads every byte of every array of a step and compares checksums; one line for each fault."""
    bad = damaged_metadata(step.path / ITEM, step.manifest)
    named = {line.split(":")[0] for line in bad}
    for name in step.manifest.leaves:
        if name not in named:
            bad += step.arrays.damaged(name)
    return bad


def check_writable(directory: Path) -> None:
    """Makes a directory and a file in it, and removes that file.

    Raises:
      ValueError: it cannot be done.
    """
    probe = directory / f".jzero-{jax.process_index()}"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise ValueError(
            f"the checkpoint directory {directory} cannot be written ({error}); name another as "
            "[checkpoint] dir, or give write permission."
        ) from error


@dataclasses.dataclass
class _Write(ocp.args.CheckpointArgs):
    manifest: Manifest
    arrays: Mapping[str, Pieces]


@dataclasses.dataclass
class _Read(ocp.args.CheckpointArgs):
    pass


class _Handler(ocp.AsyncCheckpointHandler):
    """Writes arrays and manifest in a thread; Orbax commits and deletes."""

    def __init__(self) -> None:
        self._pool = concurrent.futures.ThreadPoolExecutor(1, "jzero-checkpoint")
        self._last: concurrent.futures.Future[None] | None = None

    async def async_save(self, directory: Any, args: _Write) -> Any:  # type: ignore[override]
        """Starts a write; the arrays are on the host already."""
        self._last = self._pool.submit(_write, Path(directory), args)
        return [self._last]

    def save(self, directory: Any, args: _Write) -> None:  # type: ignore[override]
        """Writes, and waits."""
        for future in asyncio.run(self.async_save(directory, args)):
            future.result()

    def restore(self, directory: Any, args: Any = None) -> Manifest:  # type: ignore[override]
        """The manifest alone; arrays are read piece by piece."""
        return read_manifest(Path(directory))

    def has_failed(self) -> bool:
        """Whether the last write has ended with an error that nobody was told of."""
        last = self._last
        return last is not None and last.done() and last.exception() is not None

    def purge(self, folder: Path) -> None:
        """Starts to delete what old steps were moved to."""
        if jax.process_index() == 0 and folder.exists():
            self._pool.submit(shutil.rmtree, folder, ignore_errors=True)

    def forget(self) -> None:
        """Takes the last write as told."""
        self._last = None

    def close(self) -> None:
        """Ends the thread."""
        self._pool.shutdown()


ocp.args.register_with_handler(_Handler, for_save=True)(_Write)
ocp.args.register_with_handler(_Handler, for_restore=True)(_Read)


def _write(directory: Path, args: _Write) -> None:
    write_arrays(directory, args.arrays)
    if jax.process_index() == 0:
        write_manifest(directory, args.manifest)
