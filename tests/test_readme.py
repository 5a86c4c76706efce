"""What the README shows is true: its snippets run, its commands work, its diff is the script's."""

import os
import pathlib
import re
import shlex
import shutil
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jzero
from jzero import cli
from jzero.plan_figures import FIGURES
from jzero.target import library_path
from scripts import stage_table

ROOT = pathlib.Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
SMALL = [
    "--model.num_layers",
    "1",
    "--model.embed_dim",
    "16",
    "--model.num_heads",
    "2",
    "--model.num_positions",
    "16",
    "--data.seq_len",
    "16",
    "--data.max_bytes",
    "20000",
    "--train.num_steps",
    "2",
    "--schedule.warmup_steps",
    "0",
    "--train.eval_batches",
    "1",
    "--train.sample_length",
    "2",
    "--train.plot",
    "False",
]


def blocks(language):
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def commands():
    lines = [line.split("#")[0].strip() for block in blocks("bash") for line in block.splitlines()]
    return [line for line in lines if line]


PLAN = (
    "jzero plan configs/gpt2_1558m.toml --gpu h100-sxm --num-gpus 64 --train.num_microbatches 1 "
    "--num-tokens 300e9 --plot docs/plan_gpt2_1558m.png"
)


def test_every_command_shown_is_one_that_is_run_here():
    assert commands() == [
        "make demo",
        "make test",
        "python -m scripts.stage_table --precision float32 bfloat16 --num-microbatches 1 4",
        "jzero train configs/gpt2_demo.toml --zero.stage 3 --train.out_dir runs/stage_3",
        "jzero report configs/gpt2_1558m.toml",
        "jzero train --help",
        "python scripts/prepare_data.py my_texts --out data/mine --tokenizer bytes",
        "jzero checkpoint inspect runs/gpt2_demo/checkpoints",
        "jzero checkpoint verify runs/gpt2_demo/checkpoints",
        'jzero sample runs/gpt2_demo/checkpoints --prompt "def " --length 200',
        "jzero eval runs/gpt2_demo/checkpoints --data README.md --zero.stage 3",
        "jzero import hf gpt2_folder runs/imported",
        "jzero export hf runs/imported exported",
        'jzero sample gpt2_folder --prompt "Hello" --top-k 50 --length 40',
        PLAN,
        "jzero plan --formula --params 1e12 --gpu h100-sxm --num-gpus 1024",
        "jzero plan --check",
    ]


@pytest.fixture
def at_root(monkeypatch):
    monkeypatch.chdir(ROOT)


def test_jzero_train(at_root, tmp_path, capsys):
    words = ["train", "configs/gpt2_demo.toml", "--zero.stage", "3"]
    assert cli.main([*words, *SMALL, "--train.out_dir", str(tmp_path / "run")]) == 0
    assert "step" in capsys.readouterr().out
    assert (tmp_path / "run" / "metrics.jsonl").exists()


def test_the_commands_on_checkpoints_after_a_run(at_root, tmp_path, capsys):
    """As shown, on the checkpoint of a smaller model in another folder."""
    words = ["train", "configs/gpt2_demo.toml", *SMALL, "--train.out_dir", str(tmp_path)]
    assert cli.main(words) == 0
    capsys.readouterr()
    shown = [line for line in commands() if "runs/gpt2_demo/checkpoints" in line]
    printed = []
    for line in shown:
        words = shlex.split(line.replace("runs/gpt2_demo", str(tmp_path)))
        assert cli.main(words[1:]) == 0
        printed.append(capsys.readouterr().out)
    inspected, verified, sampled, evaluated = printed
    assert "params.wte.weight" in inspected
    assert "[optimizer]" in inspected
    assert "2: whole" in verified
    assert sampled.startswith("def ")
    assert "bits per byte" in evaluated
    assert "perplexity" in evaluated


def test_the_commands_on_hugging_face_folders(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(ROOT))
    shutil.copytree(ROOT / "tests" / "data" / "tiny_gpt2", "gpt2_folder")
    for line in [line for line in commands() if " hf " in line or "gpt2_folder" in line]:
        assert cli.main(shlex.split(line)[1:]) == 0
    assert "Hello" in capsys.readouterr().out
    exported = pathlib.Path("exported", "model.safetensors").read_bytes()
    assert exported == pathlib.Path("gpt2_folder", "model.safetensors").read_bytes()


def test_stage_3_trains_where_leaves_are_padded(at_root, tmp_path, capsys):
    """259 tokens and 36 columns suit neither dim of 8 devices."""
    text = tmp_path / "text.txt"
    text.write_text("to be or not to be, that is the question. " * 100)
    words = (
        f"train configs/gpt2_demo.toml --zero.stage 3 --data.path {text} --data.seq_len 16 "
        "--model.embed_dim 36 --model.num_heads 2 --model.vocab_size 259 --model.num_layers 1 "
        "--model.num_positions 16 --train.num_steps 2 --schedule.warmup_steps 0 "
        "--train.eval_batches 1 "
        f"--train.sample_length 2 --train.plot False --train.out_dir {tmp_path / 'run'}"
    )
    assert cli.main(words.split()) == 0
    assert "step" in capsys.readouterr().out


def test_jzero_report(at_root, capsys):
    assert cli.main(["report", "configs/gpt2_1558m.toml"]) == 0
    assert "h.attn.c_attn.weight" in capsys.readouterr().out


@pytest.mark.skipif(library_path() is None, reason="needs pip install 'jzero[plan]'")
@pytest.mark.xdist_group("gpu_program")
def test_jzero_plan_draws_and_prints(at_root, tmp_path, capsys):
    """The command shown, of a smaller model and of one stage."""
    words = [*PLAN.split()[1:-1], str(tmp_path / "plan.png")]
    small = SMALL[: SMALL.index("--data.seq_len") + 2]
    assert cli.main([*words, *small, "--stage", "2", "--no-search"]) == 0
    out = capsys.readouterr().out
    assert "on 64 x h100-sxm" in out
    assert "Stage 2 fits" in out
    assert (tmp_path / "plan.png").stat().st_size > 10_000


def test_jzero_plan_by_formula(at_root, capsys):
    words = "plan --formula --params 1e12 --gpu h100-sxm --num-gpus 1024"
    assert cli.main(words.split()) == 0
    assert "1.0T parameters on 1024 x h100-sxm" in capsys.readouterr().out


def test_jzero_plan_check(capsys):
    assert cli.main(["plan", "--check"]) == 0
    assert "3.70" in capsys.readouterr().out


def test_the_plan_shown_is_of_the_command_shown_and_the_picture_is_there():
    (table,) = re.findall(r"```\n(GPT2.*?)```", README, re.DOTALL)
    assert table.startswith("GPT2, 1.6B parameters, on 64 x h100-sxm")
    for row in FIGURES:
        if row.key not in ("largest_params", "margin_bytes"):
            assert row.label.strip() in table, row.label
    assert (ROOT / "docs" / "plan_gpt2_1558m.png").stat().st_size > 10_000


def test_jzero_help(at_root, capsys):
    assert cli.main(["train", "--help"]) == 0
    assert "CONFIG" in capsys.readouterr().out


def test_prepare_data(tmp_path):
    (tmp_path / "my_texts").mkdir()
    (tmp_path / "my_texts" / "a.txt").write_text("to be or not to be " * 200)
    script = ROOT / "scripts" / "prepare_data.py"
    words = ["my_texts", "--out", "data/mine", "--tokenizer", "bytes"]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, script, *words]
    subprocess.run(command, cwd=tmp_path, env=env, check=True, capture_output=True)
    assert (tmp_path / "data" / "mine" / "train.bin").exists()


def test_stage_table(at_root, capsys, monkeypatch):
    sizes = "--num-layers 2 --embed-dim 16 --num-heads 2 --num-positions 16"
    words = f"stage_table {sizes} --precision float32 --num-microbatches 2".split()
    monkeypatch.setattr(sys, "argv", words)
    with monkeypatch.context() as patch:
        patch.setattr(jax.config, "update", lambda *_: None)  # eight devices are there already
        stage_table.main()
    lines = [line.strip("| ").split(" | ") for line in capsys.readouterr().out.splitlines()]
    rows = {tuple(row[:3]): row for row in lines[2:]}
    assert len(rows) == 5
    assert float(rows["1", "float32", "2"][-1]) == pytest.approx(2, rel=0.01)
    assert float(rows["2", "float32", "2"][-1]) == pytest.approx(3, rel=0.01)
    assert float(rows["3, kept", "float32", "2"][-1]) == pytest.approx(3, rel=0.01)
    assert float(rows["2", "float32", "2"][6]) == pytest.approx(4 + 8 / 8, rel=0.01)


def test_make_knows_the_two_commands():
    makefile = (ROOT / "Makefile").read_text()
    assert re.search(r"^demo: .*\n\t.*jzero train configs/gpt2_demo\.toml$", makefile, re.MULTILINE)
    assert re.search(r"^test: ", makefile, re.MULTILINE)
    assert "make test" in (ROOT / ".ci" / "run").read_text()


def init_fn(key):
    return {"h": {"attn": jax.random.normal(key, (13, 7))}}


def loss_fn(params, batch):
    return ((batch @ params["h"]["attn"]) ** 2).mean()


def test_the_snippet_in_functions_runs():
    key = jax.random.key(0)
    names = {
        "key": key,
        "init_fn": init_fn,
        "loss_fn": loss_fn,
        "batch": np.ones((32, 13), np.float32),
    }
    snippet = next(block for block in blocks("python") if "zero.init" in block)
    exec(snippet, names)
    before = names["full"]["h"]["attn"]
    assert before.shape == (13, 7)
    assert float(names["loss"]) == pytest.approx(
        float(names["loss_fn"](names["full"], names["batch"]))
    )
    params, _, loss = names["step"](names["params"], names["opt_state"], names["batch"])
    assert float(loss) == pytest.approx(float(names["loss"]))
    assert jnp.abs(params["h"]["attn"][:, :7] - before).max() > 0


def test_the_checkpoint_snippet_goes_on_when_it_is_run_again(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    first = next(block for block in blocks("python") if "zero.init" in block)
    snippet = next(block for block in blocks("python") if "jzero.Checkpoints" in block)
    batch = np.ones((32, 13), np.float32)
    ends = []
    for _ in range(2):
        names = {"key": jax.random.key(0), "init_fn": init_fn, "loss_fn": loss_fn, "batch": batch}
        exec(first, names)
        exec(snippet, names)
        ends.append((names["start"], float(names["loss"])))
    assert [start for start, _ in ends] == [0, 2]
    assert ends[1][1] < ends[0][1]


@pytest.mark.skipif(library_path() is None, reason="needs pip install 'jzero[plan]'")
@pytest.mark.xdist_group("gpu_program")
def test_the_snippet_on_gpus_that_are_not_here_runs(capsys):
    first = next(block for block in blocks("python") if "zero.init" in block)
    step = first[first.index("@jax.jit") : first.index("loss = zero.apply")].replace("@jax.jit", "")
    snippet = next(block for block in blocks("python") if "virtual_mesh" in block)
    made = snippet.replace("step = jax.jit", f"{step.strip()}\nstep = jax.jit")
    names = {"jax": jax, "jzero": jzero, "optax": optax, "loss_fn": loss_fn,
             "like": jax.eval_shape(init_fn, jax.random.key(0)),
             "batch": jax.ShapeDtypeStruct((128, 13), jnp.float32)}  # fmt: skip
    exec(made, names)
    out = capsys.readouterr().out
    assert "all-gather" in out


def test_the_precision_snippet_runs_after_it():
    names = {
        "jax": jax,
        "jzero": jzero,
        "optax": optax,
        "mesh": jzero.make_mesh(),
        "full": {"h": jax.random.normal(jax.random.key(0), (13, 7))},
        "loss_fn": lambda params, batch: ((batch @ params["h"]) ** 2).mean().astype(jnp.float32),
        "batch": np.ones((32, 13), jnp.bfloat16),
    }
    exec(next(block for block in blocks("python") if "jzero.policy" in block), names)
    assert names["params"]["h"].dtype == jnp.bfloat16
    assert names["opt_state"].inner.master["h"].dtype == jnp.float32
    assert int(names["opt_state"].step) == 1
    assert np.isfinite(float(names["loss"]))


def test_the_diff_shown_is_the_diff_of_the_script():
    def changes(text):
        lines = [line for line in text.splitlines() if re.match(r"[+-](?![+-])", line)]
        return [line[0] + line[1:].lstrip() for line in lines]

    (shown,) = blocks("diff")
    assert changes(shown) == changes((ROOT / "scripts" / "train_flax.diff").read_text())
    assert sum(line.startswith("+") for line in changes(shown)) <= 5


def test_the_one_changed_line_is_tested_as_shown():
    assert "jzero.Zero(mesh, stage=1).optimizer(optax.adamw(1e-3))" in README
    assert "stage=1).optimizer(" in (ROOT / "tests" / "test_one_line.py").read_text()


def test_the_tree_names_every_module():
    for path in (ROOT / "jzero").glob("*.py"):
        assert path.stem.startswith("__") or path.name in README, path.name
