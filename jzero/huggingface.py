"""Hugging Face files as a source of weights, and a source of weights written as such files.

The model's class knows the names and config.json of its kind: it has `arguments_from_huggingface`,
`huggingface_config` and `huggingface_names`, as `models/gpt2.py` shows.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jzero.huggingface_files import (
    CONFIG,
    PREFIX,
    Place,
    find_files,
    find_tensors,
    is_copy,
    read_json,
)
from jzero.safetensors_files import CODES, DTYPES, Tensor, groups, read_piece
from jzero.safetensors_writer import write_folder
from jzero.schema import import_target, parameters
from jzero.source import Index, Source, whole
from jzero.trees import abstract_leaves

TABLE, HEAD = "wte.weight", "lm_head.weight"
HOOKS = ("arguments_from_huggingface", "huggingface_config", "huggingface_names")
HELD_BYTES = 1 << 27  # of a stack of layers while it is written; a single layer may be larger
MAX_SHARD_BYTES = 5_000_000_000


@dataclasses.dataclass(frozen=True)
class HuggingFace:
    """A Hugging Face model as a `jzero.source.Source`; only headers have been read.

    Args:
      path: what was opened.
      config: fields of its config.json.
      arguments: of the model's class, for a model of these sizes.
      leaves: shape and dtype of each parameter by name, layers stacked on dim 0.
      places: by parameter: its tensor, or that of each layer.
    """

    path: Path
    config: Mapping[str, Any]
    arguments: dict[str, Any]
    leaves: Mapping[str, jax.ShapeDtypeStruct]
    places: Mapping[str, tuple[Place, ...]]

    def read(self, name: str, index: Index) -> np.ndarray:
        """As `jzero.source.Source.read`; of a stack only the layers asked for are read."""
        x, places = self.leaves[name], self.places[name]
        spans = [s.indices(size) for s, size in zip(index, x.shape, strict=True)]
        bounds = tuple(slice(start, max(start, stop)) for start, stop, _ in spans)
        piece = np.empty([s.stop - s.start for s in bounds], x.dtype)
        if piece.size == 0:
            return piece
        if len(places[0].tensor.shape) == len(x.shape):
            return _read(places[0], bounds).astype(x.dtype, copy=False)
        for row, layer in zip(piece, places[bounds[0]], strict=True):
            row[...] = _read(layer, bounds[1:])
        return piece


def open_huggingface(path: str | Path, target: str = "models.gpt2:GPT2") -> HuggingFace:
    """Opens the weights of a Hugging Face model, of which only headers are read.

    Tensors may have the prefix "transformer." or not. Masks are passed over, and so is a head that
    is a copy of the token table, unless config.json says that it is no tie.

    Args:
      path: a directory with config.json and model.safetensors, or with an index and shards; or a
        .safetensors file beside its config.json.
      target: import path of the model's class.

    Raises:
      ValueError: files are missing or damaged, it is another kind of model, or tensors are missing,
        left over or of another shape; all of them are named.
    """
    path = Path(path)
    model_type = _model_type(target)
    folder, files = find_files(path)
    config = read_json(folder / CONFIG)
    tensors = find_tensors(files, folder)
    if config.get("tie_word_embeddings", True) and is_copy(tensors, HEAD, TABLE):
        del tensors[HEAD]
    try:
        arguments = model_type.arguments_from_huggingface(config, tensors.keys())
        wanted = _model_leaves(model_type, arguments)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    names = {name: model_type.huggingface_names(name, arguments["num_layers"]) for name in wanted}
    _check_tensors(path, tensors, {n: s for p in wanted for n, s in _shapes(p, wanted, names)})
    places = {name: tuple(tensors[n] for n in names[name]) for name in wanted}
    dtypes = {name: [DTYPES[place.tensor.code] for place in places[name]] for name in wanted}
    leaves = {
        name: jax.ShapeDtypeStruct(x.shape, functools.reduce(jnp.promote_types, dtypes[name]))
        for name, x in wanted.items()
    }
    return HuggingFace(path, config, arguments, leaves, places)


def _model_type(target: str) -> Any:
    found = import_target(target)
    missing = [hook for hook in HOOKS if not hasattr(found, hook)]
    if missing:
        raise ValueError(
            f"{target} knows nothing of Hugging Face: it has no {', '.join(missing)}; give it these"
            " static methods, as models/gpt2.py has them."
        )
    return found


def _model_leaves(model_type: Any, arguments: Mapping[str, Any]) -> dict[str, jax.ShapeDtypeStruct]:
    """Shape and dtype of each parameter, of which none is made."""
    return abstract_leaves(nnx.eval_shape(lambda: model_type(**arguments, rngs=nnx.Rngs(0))))


def _shapes(
    name: str, leaves: Mapping[str, jax.ShapeDtypeStruct], names: Mapping[str, list[str]]
) -> Iterator[tuple[str, tuple[int, ...]]]:
    """The tensors of one parameter, with their shapes."""
    shape = tuple(leaves[name].shape)
    for tensor in names[name]:
        yield tensor, shape if tensor == name else shape[1:]


def _read(place: Place, index: Index) -> np.ndarray:
    return read_piece(place.path, place.name, index)


def _check_tensors(
    path: Path, tensors: Mapping[str, Place], wanted: Mapping[str, tuple[int, ...]]
) -> None:
    """Refuses tensors that are not those of the model, all at once."""
    bad = [f"missing: {name} {shape}" for name, shape in wanted.items() if name not in tensors]
    for name, place in tensors.items():
        shape, code = place.tensor.shape, place.tensor.code
        if name not in wanted:
            bad.append(f"unexpected: {place.name} {shape}")
        elif shape != wanted[name]:
            bad.append(f"another shape: {place.name} is {shape}, and {wanted[name]} is needed")
        elif code not in DTYPES:
            bad.append(f"another dtype: {place.name} is {code}, and {', '.join(DTYPES)} are read")
    if bad:
        raise ValueError(
            f"the tensors of {path} are not those of the model that its {CONFIG} describes; take"
            " both from one model, saved with its head:\n  " + "\n  ".join(bad)
        )


def write_huggingface(
    source: Source,
    model_type: Any,
    arguments: Mapping[str, Any],
    out: str | Path,
    *,
    dtype: Any = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    config: Mapping[str, Any] | None = None,
) -> list[Path]:
    """Writes weights as transformers does; the files have their names only when all are whole.

    In memory are at most two pieces of the weights at a time: each some layers of a stack, of 128
    MiB in all, or one tensor that is larger.

    Args:
      source: of exactly the parameters of the model.
      model_type: the model's class, which knows Hugging Face's names.
      arguments: of the class; those left out have its defaults.
      out: directory, made where it is not there; it must hold no model.
      dtype: "float32", "bfloat16", "float16" or "float64" of every tensor; None keeps the
        source's.
      max_shard_bytes: more than this makes several files and an index; at least 1.
      config: fields of config.json to set besides, such as eos_token_id.

    Returns:
      The files.

    Raises:
      ValueError: parameters are missing, unexpected or of another shape, or do not fit `dtype`; or
        `out` has a model already.
      OSError: the file system refused; there is no half model then.
    """
    out = Path(out)
    arguments = _defaults(model_type) | dict(arguments)
    wanted = _model_leaves(model_type, arguments)
    _check_leaves(source.leaves, wanted)
    _check_free(out)
    names = {name: model_type.huggingface_names(name, arguments["num_layers"]) for name in wanted}
    codes = {name: _code(dtype or x.dtype) for name, x in source.leaves.items()}
    tensors = {
        _with_prefix(n): Tensor(s, codes[p]) for p in wanted for n, s in _shapes(p, wanted, names)
    }
    fields = dict(model_type.huggingface_config(arguments)) | _dtypes(tensors) | dict(config or {})
    values = (
        (_with_prefix(n), x) for name in wanted for n, x in _layers(source, name, names[name])
    )
    return write_folder(out, {CONFIG: fields}, tensors, values, max_shard_bytes)


def _defaults(model_type: Any) -> dict[str, Any]:
    found = parameters(model_type).items()
    return {name: p.default for name, p in found if p.default is not p.empty}


def _with_prefix(name: str) -> str:
    return name if name == HEAD else PREFIX + name


def _check_leaves(
    found: Mapping[str, jax.ShapeDtypeStruct], wanted: Mapping[str, jax.ShapeDtypeStruct]
) -> None:
    bad = [f"missing: {name} {x.shape}" for name, x in wanted.items() if name not in found]
    for name, x in found.items():
        if name not in wanted:
            bad.append(f"unexpected: {name} {x.shape}")
        elif tuple(x.shape) != tuple(wanted[name].shape):
            bad.append(f"another shape: {name} is {x.shape}, and {wanted[name].shape} is needed")
        elif x.dtype not in CODES:
            bad.append(f"another dtype: {name} is {x.dtype}, and {_dtype_names()} are written")
    if bad:
        raise ValueError(
            "the weights are not those of a model with these arguments; give the arguments that it"
            " was made with:\n  " + "\n  ".join(bad)
        )


def _check_free(out: Path) -> None:
    if out.exists() and not out.is_dir():
        raise ValueError(f"{out} is a file; name a directory.")
    patterns = (CONFIG, "*.safetensors", "*.index.json", "pytorch_model*.bin")
    there = sorted(file.name for pattern in patterns for file in out.glob(pattern))
    if there:
        raise ValueError(
            f"{out} has a model already ({', '.join(there)}); name another directory, or remove"
            " these files."
        )


def _code(dtype: Any) -> str:
    try:
        return CODES[jnp.dtype(dtype)]
    except (TypeError, KeyError) as error:
        raise ValueError(f"dtype {dtype!r} is not written; use {_dtype_names()}.") from error


def _dtype_names() -> str:
    return ", ".join(dtype.name for dtype in CODES)


def _dtypes(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """The dtype that config.json tells: that of all tensors, or one that holds each."""
    codes = {x.code for x in tensors.values()}
    return {"dtype": functools.reduce(jnp.promote_types, (DTYPES[code] for code in codes)).name}


def _layers(source: Source, name: str, names: list[str]) -> Iterator[tuple[str, np.ndarray]]:
    """The tensors of one parameter and their values, of a stack some layers at a time."""
    x = source.leaves[name]
    if names == [name]:
        yield name, source.read(name, whole(tuple(x.shape)))
        return
    num_layers, *rest = x.shape
    layer_bytes = x.size // num_layers * x.dtype.itemsize
    for rows in groups(num_layers, layer_bytes, HELD_BYTES):
        yield from zip(names[rows], source.read(name, (rows, *whole(tuple(rest)))), strict=True)
