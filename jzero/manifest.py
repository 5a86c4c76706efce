"""The manifest of a checkpoint: its arrays by name, and what the run says of itself, as JSON."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import platform
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jzero.arrays import DamagedError, StoredLeaf, folder_name

MANIFEST_FILE = "manifest.json"
FORMAT = 1
PACKAGES = ("jzero", "jax", "flax", "optax", "orbax-checkpoint", "tensorstore", "numpy")


@dataclasses.dataclass(frozen=True)
class Manifest:
    """What a checkpoint holds; nothing in it depends on the number of devices or the stage.

    Args:
      step: optimizer steps done.
      leaves: every array by name.
      info: JSON values that the run adds, such as its configuration and data position.
      versions: of Python and the packages that wrote it.
    """

    step: int
    leaves: Mapping[str, StoredLeaf]
    info: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    versions: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @property
    def num_bytes(self) -> int:
        """Bytes of all arrays."""
        return sum(leaf.num_bytes for leaf in self.leaves.values())


def write_manifest(directory: Path, manifest: Manifest) -> None:
    """Writes the manifest with a checksum of itself.

    Raises:
      OSError: the file system refused.
    """
    fields = dataclasses.asdict(manifest) | {"format": FORMAT, "versions": _versions()}
    text = json.dumps(fields | {"checksum": _checksum(fields)}, indent=1)
    (directory / MANIFEST_FILE).write_text(text, encoding="utf-8")


def read_manifest(directory: Path) -> Manifest:
    """Reads and checks a manifest.

    Raises:
      ValueError: there is none, it is damaged, or of a format from the future.
    """
    path = directory / MANIFEST_FILE
    if not path.is_file():
        raise ValueError(
            f"{directory} is no checkpoint of jzero: it has no {MANIFEST_FILE}; name the folder "
            "that [checkpoint] dir named, or one of its steps."
        )
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
        checksum = fields.pop("checksum")
        is_right = checksum == _checksum(fields)
    except (ValueError, KeyError, AttributeError):
        is_right, fields = False, {}
    if not is_right:
        raise DamagedError(f"{path} is damaged: it does not have the checksum it was written with")
    if fields["format"] != FORMAT:
        raise ValueError(
            f"{path} has format {fields['format']}, and this jzero reads {FORMAT}; upgrade jzero."
        )
    leaves = {name: _leaf(leaf) for name, leaf in fields["leaves"].items()}
    return Manifest(fields["step"], leaves, fields["info"], fields["versions"])


def damaged_metadata(directory: Path, manifest: Manifest) -> list[str]:
    """Compares each array's own metadata with the manifest; one line for each that differs."""
    bad = []
    for name, leaf in manifest.leaves.items():
        path = directory / folder_name(name) / "zarr.json"
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            found = {}
        wanted = leaf.metadata | {
            "chunk_key_encoding": {"name": "default"},
            "node_type": "array",
            "zarr_format": 3,
        }
        found.pop("fill_value", None)  # never read: a chunk that is gone is an error
        if found != wanted:
            bad.append(f"{name}: {path} is damaged or gone")
    return bad


def _checksum(fields: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(fields, sort_keys=True).encode())


def _leaf(fields: dict[str, Any]) -> StoredLeaf:
    shape, chunk = tuple(fields["shape"]), tuple(fields["chunk"])
    return StoredLeaf(shape, fields["dtype"], chunk, fields["key_impl"])


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "unknown"
    return found
