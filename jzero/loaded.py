"""A trained model by path: a checkpoint or a Hugging Face folder, laid out on any mesh."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jzero.arguments import parse_flags
from jzero.checkpoint import open_step
from jzero.data import check_seq_len
from jzero.evaluate import evaluated
from jzero.huggingface import open_huggingface
from jzero.recipe import Setup, make_setup
from jzero.restore import PARAMS, fit, places_of, restore_state
from jzero.resume import INFO_TOKENS, saved_config, stored_weights
from jzero.source import Source
from jzero.state import abstract_parts, graphdef_of
from jzero.weights import is_checkpoint

DEFAULT_TARGET = "models.gpt2:GPT2"
KEPT = ("model", "precision", "zero")  # sections that say something of a trained model
BYTES, IDS = "bytes", "ids"


@dataclasses.dataclass(frozen=True)
class Stored:
    """A trained model that passed every check; `load` reads its weights.

    Args:
      path: where it is.
      setup: of its configuration, with the user's flags.
      source: of its arrays.
      names: for each that is wanted, its name in the source.
      tokens: "bytes", or "ids" of a vocabulary.
      folder: of Hugging Face files, where a tokenizer may be; None for a checkpoint.
    """

    path: Path
    setup: Setup
    source: Source
    names: dict[str, str]
    tokens: str
    folder: Path | None = None

    def load(self) -> tuple[Any, tuple[Any, Any]]:
        """The model as it is evaluated: static part, parameters at rest and other Variables."""
        parts = _weight_parts(self.setup)
        places = places_of(self.setup.zero, parts)
        state = restore_state(parts, places, self.source, self.names)
        return evaluated(graphdef_of(self.setup), (state["params"], state["others"]))


def open_stored(command: str, path: str, flags: Sequence[str] = ()) -> Stored:
    """Opens a trained model and the configuration it was saved with.

    Args:
      command: for messages and help.
      path: a checkpoint's step, a directory of them, or a Hugging Face folder or file.
      flags: `--section.key value`, over its configuration.

    Raises:
      ValueError: there is none, or it does not fit its configuration.
    """
    if is_checkpoint(path):
        step = open_step(path)
        tables, tokens = _tables(saved_config(step)), step.manifest.info[INFO_TOKENS]
        return _stored(command, step.path, tables, flags, step.arrays, tokens)
    if not Path(path).exists():
        raise ValueError(
            f"{path} does not exist; name a checkpoint, or a Hugging Face folder with config.json "
            "and model.safetensors."
        )
    found = open_huggingface(path, DEFAULT_TARGET)
    tables = huggingface_tables(found.arguments)
    kind = tokens_of(found.arguments)
    place = Path(path) if Path(path).is_dir() else Path(path).parent
    stored = _stored(command, Path(path), tables, flags, stored_weights(found), kind)
    return dataclasses.replace(stored, folder=place)


def huggingface_tables(arguments: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The configuration of a model whose arguments alone are known."""
    data = {"seq_len": arguments["num_positions"]} if "num_positions" in arguments else {}
    return {"model": {"target": DEFAULT_TARGET, **arguments}, "data": data}


def tokens_of(arguments: dict[str, Any]) -> str:
    """Whether a model's tokens are bytes, as far as its vocabulary tells: 256, and a few marks."""
    return BYTES if 256 <= arguments.get("vocab_size", 0) < 300 else IDS


def _tables(saved: dict[str, Any]) -> dict[str, Any]:
    tables = {section: dict(saved[section]) for section in KEPT if section in saved}
    tables.get("model", {}).pop("init_from", None)
    tables.get("zero", {}).pop("axes", None)
    return tables | {"data": {"seq_len": saved["data"]["seq_len"]}}


def _stored(
    command: str, path: Path, tables: Any, flags: Sequence[str], source: Source, tokens: str
) -> Stored:
    config = parse_flags(command, tables, flags, str(path))
    check_seq_len(config.data, config.model)
    setup = make_setup(config)
    parts = _weight_parts(setup)
    places = places_of(setup.zero, parts)
    mine = (PARAMS, "others.", "master.")
    found = {name: x for name, x in source.leaves.items() if name.startswith(mine)}
    try:
        names = fit(places, found).names
    except ValueError as error:
        raise ValueError(f"{path} does not fit {setup.config.model.target}: {error}") from error
    return Stored(path, setup, source, dict(names), tokens)


def _weight_parts(setup: Setup) -> dict[str, Any]:
    parts = abstract_parts(setup)
    return {"params": parts["params"], "others": parts["others"]}
