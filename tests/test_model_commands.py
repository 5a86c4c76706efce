"""`jzero eval` is the same at any stage and N; `eval` and `sample` refuse what they cannot do."""

import json
import re
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jzero import cli
from jzero.config import parse_config
from jzero.data import Windows
from jzero.evaluate import describe, mean_loss
from jzero.loaded import open_stored
from jzero.mesh import make_mesh
from jzero.recipe import make_setup
from jzero.tokens import open_tokens, write_nanogpt_bin
from models.gpt2 import GPT2
from tests.runs import run, tiny, write_text
from tests.test_tokenizer import MERGES, VOCAB

pytestmark = pytest.mark.usefixtures("unoptimized")

FIXTURE = Path(__file__).parent / "data" / "tiny_gpt2"
TOLERANCE = 1e-5  # of a loss near 6, by the issue


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return write_text(tmp_path_factory.mktemp("text"))


@pytest.fixture(scope="module")
def trained(text, tmp_path_factory):
    out_dir = tmp_path_factory.mktemp("run")
    run(tiny(text, out_dir, train={"num_steps": 1}, zero={"stage": 3}))
    return out_dir / "checkpoints"


def loss_of(capsys):
    (loss,) = re.findall(r"loss (\d+\.\d+) nats", capsys.readouterr().out)
    return float(loss)


def reference(stored, windows, num_rows):
    """Row by row on one device."""
    graphdef, (params, others) = stored.load()
    params = stored.setup.zero.gather(params)
    model = nnx.merge(graphdef, params, others)
    rows = np.stack([windows[i] for i in range(num_rows)])
    loss = nnx.jit(lambda model, row: model.loss(row))
    return float(np.mean([loss(model, jnp.asarray(row[None])) for row in rows]))


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_every_row_counts_once_at_any_stage(trained, text, stage, capsys):
    flags = [
        "--zero.stage",
        str(stage),
        "--train.micro_batch",
        "3",
    ]
    words = ["eval", str(trained), "--data", text, "--max-rows", "53"]
    assert cli.main([*words, *flags]) == 0
    got = loss_of(capsys)
    stored = open_stored("eval", str(trained), flags)
    windows = Windows(open_tokens(text), 16)
    assert got == pytest.approx(reference(stored, windows, 53), rel=0, abs=TOLERANCE)


def test_other_numbers_of_devices_give_the_same_loss(trained, text, capsys):
    assert cli.main(["eval", str(trained), "--data", text]) == 0
    want = loss_of(capsys)
    stored = open_stored("eval", str(trained))
    windows = Windows(open_tokens(text), 16)
    for num_devices in (1, 5):
        setup = make_setup(stored.setup.config, make_mesh(devices=jax.devices()[:num_devices]))
        there = stored.__class__(**{**vars(stored), "setup": setup})
        loss = mean_loss(setup, *there.load(), windows, len(windows))
        assert loss == pytest.approx(want, rel=0, abs=TOLERANCE)


def test_a_hugging_face_folder_is_evaluated_as_it_is(text, capsys):
    assert cli.main(["eval", str(FIXTURE), "--data", text, "--max-rows", "4"]) == 0
    got = loss_of(capsys)
    stored = open_stored("eval", str(FIXTURE))
    windows = Windows(open_tokens(text), 64)
    assert got == pytest.approx(reference(stored, windows, 4), rel=0, abs=TOLERANCE)
    assert isinstance(nnx.merge(stored.load()[0], *stored.load()[1]), GPT2)


def test_bits_are_of_bytes_where_a_tokenizer_tells_them(tmp_path, capsys):
    (tmp_path / "vocab.json").write_text(json.dumps(VOCAB))
    (tmp_path / "merges.txt").write_text("\n".join(MERGES))
    data = tmp_path / "tokens.bin"
    write_nanogpt_bin(data, np.full(200, 256, np.int64))  # "he", two bytes each
    words = ["eval", str(FIXTURE), "--data", str(data), "--data.seq_len", "32"]
    assert cli.main(words) == 0
    by_token = capsys.readouterr().out
    assert cli.main([*words, "--tokenizer", str(tmp_path)]) == 0
    by_byte = capsys.readouterr().out
    bits = [
        float(re.findall(r"([\d.]+) bits per (?:byte|token)", t)[0]) for t in (by_token, by_byte)
    ]
    assert "bits per token" in by_token
    assert "bits per byte" in by_byte
    assert bits[1] == pytest.approx(bits[0] / 2, rel=1e-3)


def test_a_description_has_perplexity():
    assert "perplexity 20.086" in describe(3.0, "token")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["eval", "{here}", "--data", "/nowhere"], "'/nowhere' does not exist"),
        (["eval", "/nothing", "--data", "{text}"], "/nothing does not exist; name a checkpoint"),
        (["eval", "{here}", "--data", "{text}", "--max-rows", "0"], "--max-rows is 0; use 1"),
        (["eval", "{here}", "--data", "{text}", "--data.seq_len", "5000"],
         "seq_len 5000 is longer than the model's num_positions 16"),
        (["eval", "{here}", "--data", "{text}", "--data.max_bytes", "9"], "and a row takes 17"),
        (["eval", "{here}", "--data", "{text}", "--train.num_steps", "9"], "has no effect here"),
        (["eval", "{here}", "--data", "{text}", "--model.embed_dim", "32"],
         "does not fit models.gpt2:GPT2: "),
        (["sample", "{here}", "--top-k", "0"], "top_k is 0; use 1 or more"),
        (["sample", "{here}", "--tokenizer", "/nowhere"], "--tokenizer /nowhere is no folder"),
        (["export", "hf", "{here}", "{here}"], "holds something already; name a new"),
        (["import", "hf", str(FIXTURE), "{here}"], "holds something already; name a new"),
        (["export", "hf", "/nothing", "{here}/out"], "/nothing does not exist"),
        (["checkpoint", "look", "{here}"], "look {here} is not understood"),
    ],
)  # fmt: skip
def test_what_cannot_work_is_refused_before_anything_is_read(trained, text, words, message, capsys):
    names = {"here": trained, "text": text}
    assert cli.main([word.format(**names) for word in words]) == 2
    assert message.format(**names) in capsys.readouterr().err


def test_a_flag_that_nobody_knows_is_named(trained, capsys):
    assert cli.main(["eval", str(trained), "--data", "x", "--rows", "3"]) == 2
    assert "there is no flag --rows" in capsys.readouterr().err


def test_text_is_not_taken_for_token_ids(trained, text, tmp_path, capsys):
    tokens = tmp_path / "tokens.bin"
    write_nanogpt_bin(tokens, np.arange(2000) % 50)
    run(tiny(str(tokens), tmp_path, train={"num_steps": 1}))
    assert cli.main(["eval", str(tmp_path / "checkpoints"), "--data", text]) == 2
    assert "is text, and the tokens of" in capsys.readouterr().err


class Noisy(nnx.Module):
    """A model with Flax's own dropout, which is on unless someone calls `eval`."""

    def __init__(self, rngs: nnx.Rngs):
        self.table = nnx.Embed(256, 256, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, tokens):
        return self.dropout(self.table(tokens))


def test_flax_modules_are_evaluated_without_their_dropout(text, tmp_path, capsys):
    model = {"target": "tests.test_model_commands:Noisy"}
    data = {"path": text, "seq_len": 16, "val_fraction": 0.2}
    train = {"num_steps": 1, "micro_batch": 1, "eval_batches": 1, "out_dir": str(tmp_path)}
    run(parse_config({"model": model, "data": data, "train": train, "checkpoint": {"every": 1}}))
    losses = []
    for rows in ("1", "2"):
        words = ["eval", str(tmp_path), "--data", text, "--train.micro_batch", rows]
        assert cli.main(words) == 0
        losses.append(loss_of(capsys))
    assert losses[0] == pytest.approx(losses[1], rel=0, abs=TOLERANCE)


def test_a_damaged_checkpoint_is_told_in_a_line_with_what_to_do(trained, tmp_path, capsys):
    copy = tmp_path / "copy"
    shutil.copytree(trained, copy)
    next(copy.glob("1/state/params.wte.weight/c/0/0")).unlink()
    assert cli.main(["sample", str(copy), "--prompt", "a", "--length", "1"]) == 1
    printed = capsys.readouterr().err
    assert "params.wte.weight in " in printed
    assert "jzero checkpoint verify" in printed
