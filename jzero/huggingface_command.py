"""`jzero import hf` and `jzero export hf`: GPT-2 between Hugging Face's files and checkpoints."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path

from jzero.arrays import pieces_of_source
from jzero.checkpoint import Checkpoints, open_step
from jzero.config import ModelConfig, parse_config
from jzero.huggingface import open_huggingface, write_huggingface
from jzero.loaded import huggingface_tables, tokens_of
from jzero.manifest import Manifest
from jzero.restore import MASTER, PARAMS
from jzero.resume import (
    INFO_CONFIG,
    INFO_TOKENS,
    config_tables,
    saved_config,
    stored_weights,
)
from jzero.schema import import_target, own_arguments
from jzero.source import Renamed

OK = 0


def prepare_import(words: Sequence[str]) -> Callable[[], int]:
    """Reads the words after `jzero import`; every check comes here.

    Raises:
      ValueError: files that are not of the model, or an OUT that holds something.
      SystemExit: help was asked for (0), or a word is wrong (2); the reason is printed.
    """
    parser = _parser("import", "DIR_OR_FILE", "Makes a checkpoint of a Hugging Face GPT-2.")
    parser.add_argument("--target", default=ModelConfig.target, help="import path of the model")
    flags = parser.parse_args(words)
    found = open_huggingface(flags.source, flags.target)
    source, out = stored_weights(found), Path(flags.out)
    _check_empty(out)
    tables = huggingface_tables(found.arguments)
    tables["model"]["target"] = flags.target
    config = parse_config(tables, source=str(flags.source))

    def start() -> int:
        arrays = {name: pieces_of_source(source, name) for name in source.leaves}
        info = {INFO_CONFIG: config_tables(config), INFO_TOKENS: tokens_of(found.arguments)}
        manifest = Manifest(0, {name: x.leaf for name, x in arrays.items()}, info)
        with Checkpoints(out, keep=1, is_async=False) as checkpoints:
            checkpoints.write(manifest, arrays)
        print(f"{out}: {len(arrays)} arrays; to train from it, begin a configuration with")
        print(f'\n[model]\ntarget = "{flags.target}"\ninit_from = "{out}"')
        for key, value in found.arguments.items():
            print(f"{key} = {json.dumps(value)}")
        return OK

    return start


def prepare_export(words: Sequence[str]) -> Callable[[], int]:
    """Reads the words after `jzero export`; every check comes here.

    Raises:
      ValueError: no checkpoint, or of a model that Hugging Face's files are not for.
      SystemExit: help was asked for (0), or a word is wrong (2); the reason is printed.
    """
    parser = _parser("export", "CHECKPOINT", "Writes a checkpoint as Hugging Face's GPT-2.")
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16", "float16"),
        help="of the tensors; default: that of the parameters. Others are made of the master copy",
    )
    flags = parser.parse_args(words)
    step = open_step(flags.source)
    _check_empty(Path(flags.out))
    config = parse_config({"model": saved_config(step)["model"]})
    model_type, arguments = import_target(config.model.target), own_arguments(config.model)
    source = Renamed(step.arrays, _weight_names(step.manifest, flags.dtype))

    def start() -> int:
        options = {"dtype": flags.dtype}
        files = write_huggingface(source, model_type, arguments, Path(flags.out), **options)
        print(f"{flags.out}: {', '.join(sorted(file.name for file in files))}")
        return OK

    return start


def _weight_names(manifest: Manifest, dtype: str | None) -> dict[str, str]:
    """Parameters by their own names; in another dtype they are read from the master copy."""
    names = {}
    for stored, leaf in manifest.leaves.items():
        if not stored.startswith(PARAMS):
            continue
        name = stored.removeprefix(PARAMS)
        is_other = dtype is not None and dtype != leaf.dtype and MASTER + name in manifest.leaves
        names[name] = MASTER + name if is_other else stored
    return names


def _check_empty(out: Path) -> None:
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"{out} holds something already; name a new or an empty folder.")


def _parser(command: str, source: str, description: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=f"jzero {command}",
        usage=f"jzero {command} hf {source} OUT [flags]",
        description=description,
        allow_abbrev=False,
    )
    parser.add_argument("format", choices=("hf",), help="Hugging Face")
    parser.add_argument("source", metavar=source)
    parser.add_argument("out", metavar="OUT", help="a new folder")
    return parser
