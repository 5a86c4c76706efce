"""Whose a directory of checkpoints is: one run's, and of it one process group's at a time."""

from __future__ import annotations

import fcntl
import json
import uuid
from pathlib import Path
from typing import IO

import jax

MARK = "jzero.json"


def check_is_ours(directory: Path) -> None:
    """Refuses a directory in which something else keeps numbered folders.

    Raises:
      ValueError: it is a file, or holds what jzero did not write.
    """
    if directory.exists() and not directory.is_dir():
        raise ValueError(f"checkpoint.dir {directory} is a file; name a directory.")
    if not directory.is_dir() or (directory / MARK).is_file():
        return
    others = sorted(path.name for path in directory.iterdir() if not path.name.startswith("."))
    if others:
        raise ValueError(
            f"checkpoint.dir {directory} holds {', '.join(others[:3])} and no {MARK}: it is not a "
            "directory of checkpoints of jzero. Name an empty or a new one."
        )


class Owner:
    """Holds a directory of checkpoints for this run, until it is closed or the process ends.

    Args:
      directory: made where it is missing; process 0 alone marks and locks it.

    Raises:
      ValueError: another run that is alive holds it, or it cannot be written.
    """

    def __init__(self, directory: Path) -> None:
        self.directory, self._token = directory, uuid.uuid4().hex
        self._file: IO[str] | None = None
        if jax.process_index() == 0:
            self._take()

    def _take(self) -> None:
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            self._file = (self.directory / MARK).open("a+", encoding="utf-8")
        except OSError as error:
            raise ValueError(
                f"checkpoint.dir {self.directory} cannot be written ({error}); name another "
                "directory, or give write permission."
            ) from error
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._file.close()
            raise ValueError(
                f"checkpoint.dir {self.directory} is in use by another run; name another "
                "directory, or stop that run."
            ) from None
        except OSError:  # a file system without locks: the mark alone tells
            pass
        self._write()

    def _write(self) -> None:
        text = json.dumps({"owner": self._token})
        (self.directory / MARK).write_text(text, encoding="utf-8")

    def check(self) -> None:
        """Refuses to write where another run has taken over; an empty directory is taken again.

        Raises:
          OSError: the directory is gone, or another run writes there.
        """
        if jax.process_index() != 0:
            return
        if not self.directory.is_dir():
            raise OSError(f"{self.directory} is gone; bring it back, empty if need be")
        if not any(self.directory.iterdir()):
            self._write()
        try:
            text = (self.directory / MARK).read_text(encoding="utf-8")
            owner = json.loads(text)["owner"]
        except (OSError, ValueError, KeyError, TypeError):
            owner = None
        if owner != self._token:
            raise OSError(f"{self.directory} belongs to another run, which began there later")

    def close(self) -> None:
        """Lets go of the directory."""
        if self._file is not None:
            self._file.close()
