"""Hugging Face files as a source of weights, and back; the model's numbers: models/test_gpt2.py."""

import filecmp
import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jzero import huggingface, huggingface_files
from jzero.huggingface import open_huggingface, write_huggingface
from jzero.source import whole
from models.gpt2 import GPT2

FIXTURE = Path(__file__).parent / "data" / "tiny_gpt2"
PREFIX = "transformer."
SIZES = {"vocab_size": 11, "n_positions": 5, "n_layer": 3, "n_head": 2, "n_embd": 4}
CONFIG = {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], **SIZES}
ARGUMENTS = {
    "vocab_size": 11,
    "num_positions": 5,
    "num_layers": 3,
    "num_heads": 2,
    "embed_dim": 4,
    "layer_norm_eps": 1e-5,
    "tied": True,
}
LAYER = {
    "ln_1.weight": (4,),
    "ln_1.bias": (4,),
    "attn.c_attn.weight": (4, 12),
    "attn.c_attn.bias": (12,),
    "attn.c_proj.weight": (4, 4),
    "attn.c_proj.bias": (4,),
    "ln_2.weight": (4,),
    "ln_2.bias": (4,),
    "mlp.c_fc.weight": (4, 16),
    "mlp.c_fc.bias": (16,),
    "mlp.c_proj.weight": (16, 4),
    "mlp.c_proj.bias": (4,),
}
REST = {"wte.weight": (11, 4), "wpe.weight": (5, 4), "ln_f.weight": (4,), "ln_f.bias": (4,)}
HALF = ("float16", "bfloat16")


def make_tensors(dtype="float32", prefix=PREFIX):
    """A checkpoint's tensors by name, random."""
    rng = np.random.default_rng(0)
    layers = {f"h.{i}.{name}": shape for i in range(3) for name, shape in LAYER.items()}
    shapes = REST | layers
    return {
        prefix + name: rng.normal(size=shape).astype(jnp.dtype(dtype))
        for name, shape in shapes.items()
    }


def save(folder, tensors=None, config=None, file="model.safetensors"):
    """A directory with a config.json and one file of tensors."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG | (config or {})))
    save_file(make_tensors() if tensors is None else tensors, folder / file)
    return folder


def save_shards(folder):
    """The tensors in two files, and the index."""
    tensors = make_tensors()
    files = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    parts = [list(tensors)[:10], list(tensors)[10:]]
    for file, names in zip(files, parts, strict=True):
        save(folder, {name: tensors[name] for name in names}, file=file)
    weight_map = {n: file for file, names in zip(files, parts, strict=True) for n in names}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


def read_all(source):
    return {name: source.read(name, whole(x.shape)) for name, x in source.leaves.items()}


def stacked(tensors):
    """The parameters that a checkpoint's tensors are."""
    found = {name.removeprefix(PREFIX): x for name, x in tensors.items()}
    layers = {f"h.{name}": np.stack([found[f"h.{i}.{name}"] for i in range(3)]) for name in LAYER}
    return {name: x for name, x in found.items() if not name.startswith("h.")} | layers


def assert_equal(found, expected):
    assert found.keys() == expected.keys()
    for name, x in expected.items():
        assert (found[name].dtype, found[name].shape) == (x.dtype, x.shape), name
        assert found[name].tobytes() == x.tobytes(), name


def source_of(leaves):
    """A source of arrays in memory."""
    shapes = {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in leaves.items()}
    return SimpleNamespace(leaves=shapes, read=lambda name, index: leaves[name][index])


def refuse(message, call, *args, **kwargs):
    """Asserts that a call raises ValueError with every part of a message; returns its text."""
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        call(*args, **kwargs)
    for part in [message] if isinstance(message, str) else message:
        assert part in str(caught.value), str(caught.value)
    return str(caught.value)


# Files as a source


def test_the_fixture_has_the_arguments_of_its_config_and_stacked_layers():
    source = open_huggingface(FIXTURE)
    sizes = {"vocab_size": 257, "num_positions": 64, "num_heads": 4, "embed_dim": 64}
    assert source.arguments == ARGUMENTS | sizes | {"num_layers": 2}
    assert source.config["eos_token_id"] == 256
    tensors = load_file(FIXTURE / "model.safetensors")
    stack = [tensors[f"transformer.h.{i}.attn.c_attn.weight"] for i in range(2)]
    found = read_all(source)
    np.testing.assert_array_equal(found["h.attn.c_attn.weight"], np.stack(stack))
    assert sum(x.size for x in found.values()) == sum(x.size for x in tensors.values())


def with_masks(tensors):
    masks = {f"{PREFIX}h.{i}.attn.bias": np.tri(5, dtype=bool)[None, None] for i in range(3)}
    return tensors | masks | {f"{PREFIX}h.0.attn.masked_bias": np.array(-1e4, np.float32)}


@pytest.mark.parametrize(
    "change",
    [
        lambda tensors: tensors,
        lambda tensors: {name.removeprefix(PREFIX): x for name, x in tensors.items()},
        with_masks,
        lambda tensors: tensors | {"lm_head.weight": tensors[PREFIX + "wte.weight"].copy()},
    ],
    ids=["prefix", "no_prefix", "masks", "tied_head_given_twice"],
)
def test_every_form_of_a_checkpoint_is_read_to_the_bit(tmp_path, change):
    tensors = make_tensors()
    source = open_huggingface(save(tmp_path, change(tensors)))
    assert source.arguments == ARGUMENTS
    assert_equal(read_all(source), stacked(tensors))


def test_shards_and_a_single_file_beside_its_config_are_read_to_the_bit(tmp_path):
    expected = stacked(make_tensors())
    assert_equal(read_all(open_huggingface(save_shards(tmp_path / "shards"))), expected)
    folder = save(tmp_path / "file", file="mine.safetensors")
    assert_equal(read_all(open_huggingface(folder / "mine.safetensors")), expected)


@pytest.mark.parametrize("dtype", HALF)
def test_16_bit_tensors_are_read_in_their_dtype(tmp_path, dtype):
    tensors = make_tensors(dtype)
    assert_equal(read_all(open_huggingface(save(tmp_path, tensors))), stacked(tensors))


def test_a_stack_of_layers_in_two_dtypes_has_one_that_holds_both(tmp_path):
    tensors = make_tensors()
    for i in (0, 2):
        name = f"{PREFIX}h.{i}.ln_1.bias"
        tensors[name] = tensors[name].astype("float16")
    source = open_huggingface(save(tmp_path, tensors))
    assert source.leaves["h.ln_1.bias"].dtype == np.float32
    found = source.read("h.ln_1.bias", whole((3, 4)))
    expected = np.stack([tensors[f"{PREFIX}h.{i}.ln_1.bias"].astype("float32") for i in range(3)])
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize(
    "index",
    [
        (slice(1, 3), slice(0, 4), slice(5, 12)),
        (slice(0, 1), slice(2, 3), slice(0, 12)),
        (slice(None), slice(3, 9), slice(-2, None)),
        (slice(2, 2), slice(0, 4), slice(0, 12)),
        (slice(0, 3), slice(4, 4), slice(0, 12)),
    ],
)
def test_a_piece_is_that_piece_of_the_whole(tmp_path, index):
    source = open_huggingface(save(tmp_path))
    for name in ("h.attn.c_attn.weight", "wte.weight"):
        index = index[-len(source.leaves[name].shape) :]
        expected = read_all(source)[name][index]
        found = source.read(name, index)
        assert found.shape == expected.shape
        np.testing.assert_array_equal(found, expected)


def test_opening_reads_no_values_and_a_piece_only_its_layers(tmp_path, monkeypatch):
    asked = []

    def spy(path, name, index, read=huggingface.read_piece):
        asked.append((name, index))
        return read(path, name, index)

    monkeypatch.setattr(huggingface, "read_piece", spy)
    monkeypatch.setattr(huggingface_files, "read_piece", spy)
    source = open_huggingface(save(tmp_path))
    assert asked == []
    source.read("h.ln_1.bias", (slice(1, 2), slice(0, 2)))
    assert asked == [(PREFIX + "h.1.ln_1.bias", (slice(0, 2),))]


def test_a_copied_head_is_compared_in_pieces(tmp_path, monkeypatch):
    sizes = []

    def spy(path, name, index, read=huggingface_files.read_piece):
        sizes.append(read(path, name, index).nbytes)
        return read(path, name, index)

    monkeypatch.setattr(huggingface_files, "read_piece", spy)
    monkeypatch.setattr(huggingface_files, "COMPARED_BYTES", 40)
    tensors = make_tensors()
    head = tensors[PREFIX + "wte.weight"].copy()
    assert open_huggingface(save(tmp_path, tensors | {"lm_head.weight": head})).arguments["tied"]
    assert len(sizes) == 12 and max(sizes) == 32  # two rows of 16 bytes of each, six times
    head[-1, -1] += 1
    refuse("differs", open_huggingface, save(tmp_path, tensors | {"lm_head.weight": head}))


def test_a_config_without_a_tie_gives_a_head_of_its_own_even_if_it_is_equal(tmp_path):
    tensors = make_tensors()
    tensors["lm_head.weight"] = tensors[PREFIX + "wte.weight"].copy()
    source = open_huggingface(save(tmp_path, tensors, {"tie_word_embeddings": False}))
    assert source.arguments == ARGUMENTS | {"tied": False}
    assert_equal(read_all(source), stacked(tensors))


# A source as files


def test_an_export_is_the_file_of_transformers_byte_for_byte(tmp_path):
    source = open_huggingface(FIXTURE)
    files = write_huggingface(source, GPT2, source.arguments, tmp_path / "out")
    assert [file.name for file in files] == ["config.json", "model.safetensors"]
    assert sorted(tmp_path.joinpath("out").iterdir()) == files
    assert filecmp.cmp(files[1], FIXTURE / "model.safetensors", shallow=False)
    found = json.loads(files[0].read_text())
    dropped = {"embd_pdrop", "attn_pdrop", "resid_pdrop", "bos_token_id", "eos_token_id"}
    assert {k: source.config[k] for k in found if k not in dropped} == {
        k: v for k, v in found.items() if k not in dropped
    }


@pytest.mark.parametrize("dtype", ["float32", *HALF])
def test_export_and_import_give_the_same_bits_tied_or_not(tmp_path, dtype):
    for tied in (True, False):
        leaves = stacked(make_tensors(dtype))
        if not tied:
            leaves["lm_head.weight"] = leaves["wte.weight"] + 1
        out, arguments = tmp_path / str(tied), ARGUMENTS | {"tied": tied}
        write_huggingface(source_of(leaves), GPT2, arguments, out)
        found = open_huggingface(out)
        assert (found.arguments, found.config["dtype"]) == (arguments, dtype)
        assert_equal(read_all(found), leaves)
        heads = [name for name in load_file(out / "model.safetensors") if "lm_head" in name]
        assert heads == ([] if tied else ["lm_head.weight"])


def test_an_export_in_shards_keeps_to_the_limit_and_indexes_every_tensor(tmp_path):
    tensors = make_tensors()
    source = open_huggingface(save(tmp_path / "in", tensors))
    files = write_huggingface(source, GPT2, ARGUMENTS, tmp_path / "out", max_shard_bytes=700)
    *shards, index = files[1:]
    parts = [load_file(shard) for shard in shards]
    assert len(parts) > 2 and shards[0].name == f"model-00001-of-{len(parts):05d}.safetensors"
    assert all(sum(x.nbytes for x in part.values()) <= 700 for part in parts)
    assert_equal({name: x for part in parts for name, x in part.items()}, tensors)
    found = json.loads(index.read_text())
    assert found["metadata"]["total_size"] == sum(x.nbytes for x in tensors.values())
    assert found["weight_map"] == {
        name: shard.name for shard, part in zip(shards, parts, strict=True) for name in part
    }
    assert_equal(read_all(open_huggingface(tmp_path / "out")), stacked(tensors))


def test_an_export_in_another_dtype_is_the_rounded_one(tmp_path):
    leaves = stacked(make_tensors())
    write_huggingface(source_of(leaves), GPT2, ARGUMENTS, tmp_path, dtype="bfloat16")
    expected = {name: x.astype(jnp.bfloat16) for name, x in leaves.items()}
    assert_equal(read_all(open_huggingface(tmp_path)), expected)


def test_mixed_dtypes_are_each_kept_and_the_config_names_one_that_holds_all(tmp_path):
    leaves = stacked(make_tensors("bfloat16"))
    leaves |= {name: x.astype("float32") for name, x in leaves.items() if "ln_" in name}
    write_huggingface(source_of(leaves), GPT2, ARGUMENTS, tmp_path)
    found = open_huggingface(tmp_path)
    assert found.config["dtype"] == "float32"
    assert_equal(read_all(found), leaves)


def test_arguments_left_out_are_the_models_and_the_config_may_be_added_to(tmp_path):
    leaves = stacked(make_tensors())
    sizes = {k: v for k, v in ARGUMENTS.items() if k not in ("layer_norm_eps", "tied")}
    added = {"eos_token_id": 10}
    source = source_of(leaves)
    write_huggingface(source, GPT2, sizes | {"dropout": 0.25}, tmp_path, config=added)
    found = open_huggingface(tmp_path)
    assert found.arguments == ARGUMENTS
    expected = {"eos_token_id": 10, "bos_token_id": None, "resid_pdrop": 0.25, "n_layer": 3}
    assert {key: found.config[key] for key in expected} == expected


def test_gpt2s_vocabulary_keeps_its_end_of_text():
    assert GPT2.huggingface_config({})["eos_token_id"] == 50256
    assert GPT2.huggingface_config({"vocab_size": 50256})["eos_token_id"] is None


def test_an_export_holds_one_layer_of_a_stack_where_several_are_too_much(tmp_path, monkeypatch):
    monkeypatch.setattr(huggingface, "HELD_BYTES", 200)
    leaves, sizes = stacked(make_tensors()), []

    def read(name, index):
        sizes.append((name, leaves[name][index].nbytes))
        return leaves[name][index]

    source = source_of(leaves)
    source.read = read
    write_huggingface(source, GPT2, ARGUMENTS, tmp_path)
    assert max(size for name, size in sizes if name.startswith("h.")) == 256  # of c_fc: 4 x 16 x 4
    assert ("h.ln_1.bias", 48) in sizes  # three layers at once
    assert_equal(read_all(open_huggingface(tmp_path)), leaves)


def test_an_export_that_fails_leaves_nothing_and_can_be_made_again(tmp_path):
    leaves = stacked(make_tensors())
    source = source_of(leaves)

    def fail(name, index):
        if name == "wpe.weight":
            raise OSError("disk on fire")
        return leaves[name][index]

    broken = SimpleNamespace(leaves=source.leaves, read=fail)
    with pytest.raises(OSError, match="disk on fire"):
        write_huggingface(broken, GPT2, ARGUMENTS, tmp_path)
    assert list(tmp_path.iterdir()) == []
    write_huggingface(source, GPT2, ARGUMENTS, tmp_path)
    assert_equal(read_all(open_huggingface(tmp_path)), leaves)


def test_while_an_export_is_written_there_is_no_file_of_a_model(tmp_path):
    leaves, seen = stacked(make_tensors()), set()

    def read(name, index):
        seen.update(file.name for file in tmp_path.iterdir())
        return leaves[name][index]

    source = source_of(leaves)
    source.read = read
    write_huggingface(source, GPT2, ARGUMENTS, tmp_path)
    assert seen == {".config.json.unfinished", ".model.safetensors.unfinished"}


# Files that do not fit


def test_every_tensor_that_does_not_fit_is_named_with_what_is_needed(tmp_path):
    tensors = make_tensors()
    del tensors[PREFIX + "ln_f.bias"], tensors[PREFIX + "h.2.attn.c_attn.weight"]
    tensors[PREFIX + "h.1.mlp.c_fc.bias"] = np.zeros(7, np.float32)
    tensors[PREFIX + "h.3.ln_1.bias"] = np.zeros(4, np.float32)
    tensors[PREFIX + "wpe.weight"] = np.zeros((5, 4), np.int32)
    refuse(
        [
            f"the tensors of {tmp_path} are not those of the model that its config.json describes",
            "take both from one model",
            "missing: ln_f.bias (4,)",
            "missing: h.2.attn.c_attn.weight (4, 12)",
            "another shape: transformer.h.1.mlp.c_fc.bias is (7,), and (16,) is needed",
            "unexpected: transformer.h.3.ln_1.bias (4,)",
            "another dtype: transformer.wpe.weight is I32, and F64, F32, F16, BF16 are read",
        ],
        open_huggingface,
        save(tmp_path, tensors),
    )


def test_a_llama_checkpoint_is_told_from_a_gpt2(tmp_path):
    tensors = {"model.embed_tokens.weight": np.zeros((3, 2), np.float32)}
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
    refuse(
        "model_type 'llama' (LlamaForCausalLM), and 'gpt2' is needed; give a GPT-2 checkpoint",
        open_huggingface,
        save(tmp_path, tensors, config),
    )


def test_every_setting_that_gpt2_here_has_not_is_named_and_harmless_ones_pass(tmp_path):
    bad = {
        "activation_function": "relu",
        "n_inner": 17,
        "scale_attn_weights": False,
        "scale_attn_by_inverse_layer_idx": True,
        "add_cross_attention": True,
    }
    refuse(
        [
            "activation_function is 'relu'; needed is gelu_new or gelu_pytorch_tanh",
            "n_inner is 17; needed is null or 4 n_embd = 16",
            "scale_attn_weights is false; needed is true",
            "scale_attn_by_inverse_layer_idx is true; needed is false",
            "add_cross_attention is true; needed is false",
        ],
        open_huggingface,
        save(tmp_path, None, bad),
    )
    harmless = {
        "activation_function": "gelu_pytorch_tanh",
        "n_inner": 16,
        "reorder_and_upcast_attn": True,
        "attn_pdrop": 0.1,
    }
    assert open_huggingface(save(tmp_path, None, harmless)).arguments == ARGUMENTS


def test_a_head_of_its_own_under_a_config_with_a_tie_is_refused(tmp_path):
    tensors = make_tensors()
    for head in (np.ones((11, 4), np.float32), np.ones((12, 4), np.float32)):
        refuse(
            "tie_word_embeddings is true, but lm_head.weight differs from wte.weight; set it to",
            open_huggingface,
            save(tmp_path, tensors | {"lm_head.weight": head}),
        )


def test_a_missing_head_and_a_tensor_given_twice_are_refused(tmp_path):
    folder = save(tmp_path, None, {"tie_word_embeddings": False})
    refuse("missing: lm_head.weight (11, 4)", open_huggingface, folder)
    tensors = make_tensors()
    tensors["ln_f.bias"] = tensors[PREFIX + "ln_f.bias"]
    text = refuse("tensors twice; keep one of each", open_huggingface, save(tmp_path, tensors))
    assert "ln_f.bias in model.safetensors, transformer.ln_f.bias in model.safetensors" in text


def truncate(folder):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-5])


def point(folder):
    (folder / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\n")


def keep_pickle(folder):
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def index_of(text):
    def change(folder):
        (folder / "model.safetensors").unlink()
        (folder / "model.safetensors.index.json").write_text(text)

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (truncate, "is not a whole safetensors file: it has"),
        (point, "download or copy it again (a pointer of git-lfs needs `git lfs pull`)"),
        (lambda d: (d / "config.json").unlink(), "has no config.json, which tells the sizes"),
        (lambda d: (d / "config.json").write_text("{"), "config.json is not JSON"),
        (lambda d: (d / "config.json").write_text("[]"), "is a list, not an object; download"),
        (lambda d: (d / "model.safetensors").unlink(), "has neither model.safetensors nor"),
        (keep_pickle, "has pytorch_model.bin, but no model.safetensors; convert it with"),
        (
            index_of('{"weight_map": {"a": "x.safetensors", "b": "y.safetensors"}}'),
            "names x.safetensors, y.safetensors, which are not in",
        ),
        (index_of("{}"), "model.safetensors.index.json has no weight_map; download it again"),
    ],
)
def test_files_that_are_damaged_or_missing_are_named_with_the_remedy(tmp_path, change, message):
    change(save(tmp_path))
    refuse([str(tmp_path), message], open_huggingface, tmp_path)


def test_a_path_or_a_class_without_hugging_face_files_is_refused(tmp_path):
    refuse("does not exist; give a directory with", open_huggingface, tmp_path / "none")
    (tmp_path / "weights.bin").touch()
    refuse("is no .safetensors file; name one, or the", open_huggingface, tmp_path / "weights.bin")
    refuse(
        "models.gpt2:MLP knows nothing of Hugging Face: it has no arguments_from_huggingface",
        open_huggingface,
        save(tmp_path),
        "models.gpt2:MLP",
    )


def test_a_file_that_is_damaged_after_it_was_opened_is_named(tmp_path):
    source = open_huggingface(save(tmp_path))
    truncate(tmp_path)
    refuse("model.safetensors is not a whole", source.read, "ln_f.bias", (slice(0, 4),))
    save(tmp_path, make_tensors(prefix=""))
    refuse("has no transformer.ln_f.bias of", source.read, "ln_f.bias", (slice(0, 4),))
    (tmp_path / "model.safetensors").unlink()
    refuse("does not exist; was it moved", source.read, "ln_f.bias", (slice(0, 4),))


# Exports that are refused


def test_weights_that_are_not_the_models_are_named_before_anything_is_written(tmp_path):
    leaves = stacked(make_tensors())
    leaves["wpe.weight"] = np.zeros((6, 4), np.float32)
    leaves["ln_f.weight"] = np.zeros(4, np.int32)
    leaves["lm_head.weight"] = leaves.pop("wte.weight")
    refuse(
        [
            "give the arguments that it was made with",
            "missing: wte.weight (11, 4)",
            "unexpected: lm_head.weight (11, 4)",
            "another shape: wpe.weight is (6, 4), and (5, 4) is needed",
            "another dtype: ln_f.weight is int32, and float64, float32, float16, bfloat16 are",
        ],
        write_huggingface,
        source_of(leaves),
        GPT2,
        ARGUMENTS,
        tmp_path / "out",
    )
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": "int8"}, "dtype 'int8' is not written; use float64, float32, float16, bfloat16"),
        ({"dtype": "half!"}, "dtype 'half!' is not written"),
        ({"dtype": "float16"}, "transformer.ln_f.bias has values beyond float16's largest; write"),
        ({"max_shard_bytes": 0}, "max_shard_bytes 0 is below 1"),
    ],
)
def test_a_dtype_or_size_that_cannot_be_is_refused_and_nothing_is_left(tmp_path, options, message):
    leaves = stacked(make_tensors())
    leaves["ln_f.bias"][0] = 1e6
    leaves["ln_f.bias"][1] = np.inf  # what is infinite already is no overflow
    out = tmp_path / "out"
    refuse(message, write_huggingface, source_of(leaves), GPT2, ARGUMENTS, out, **options)
    assert not out.exists() or not list(out.iterdir())


@pytest.mark.parametrize("file", ["config.json", "model.safetensors", "pytorch_model.bin"])
def test_a_directory_that_has_a_model_is_left_as_it_is(tmp_path, file):
    (tmp_path / file).write_text("mine")
    refuse(
        f"has a model already ({file}); name another directory",
        write_huggingface,
        source_of(stacked(make_tensors())),
        GPT2,
        ARGUMENTS,
        tmp_path,
    )
    assert [path.read_text() for path in tmp_path.iterdir()] == ["mine"]
    refuse("is a file; name a directory", write_huggingface, *export_to(tmp_path / file))


def export_to(out):
    return source_of(stacked(make_tensors())), GPT2, ARGUMENTS, out


# transformers itself, where it is installed

LOAD = """
import sys, numpy as np, torch
from transformers import AutoModelForCausalLM
reference = np.load(sys.argv[1])
tokens = torch.tensor(reference["input_ids"]).long()
for folder in sys.argv[2:]:
    model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(info.values()), info
    is_tied = model.lm_head.weight.data_ptr() == model.transformer.wte.weight.data_ptr()
    assert is_tied == model.config.tie_word_embeddings == (not folder.endswith("untied")), folder
    with torch.no_grad():
        logits = model.eval()(tokens).logits.numpy()
    np.testing.assert_allclose(logits, reference["logits"], rtol=0, atol=3e-5)
"""


@pytest.mark.skipif(
    not all(map(importlib.util.find_spec, ("torch", "transformers"))),
    reason="loads an export with transformers, which is not installed",
)
def test_transformers_loads_an_export_without_a_warning_and_computes_its_logits(tmp_path):
    source = open_huggingface(FIXTURE)
    leaves = read_all(source)
    untied = source_of(leaves | {"lm_head.weight": leaves["wte.weight"]})
    outs = [tmp_path / name for name in ("tied", "shards", "untied")]
    write_huggingface(source, GPT2, source.arguments, outs[0])
    write_huggingface(source, GPT2, source.arguments, outs[1], max_shard_bytes=100_000)
    write_huggingface(untied, GPT2, source.arguments | {"tied": False}, outs[2])
    command = [sys.executable, "-c", LOAD, FIXTURE / "ref.npz", *outs]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    said = [line for line in done.stderr.splitlines() if not line.lstrip().startswith("Loading")]
    assert not [line for line in said if line.strip()], said
