"""The command line: exit statuses, overrides, help, and errors without a traceback."""

import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import jax
import pytest

from jzero.cli import main, parse_arguments
from jzero.metrics import read_metrics
from jzero.schema import (
    find_schedule,
    optimizers,
    own_arguments,
    parameters,
    schedules_by_name,
)

ROOT = Path(__file__).parent.parent
CONFIGS = sorted((ROOT / "configs").glob("*.toml"))
SIZES = {"gpt2_124m": "124.4M", "gpt2_355m": "354.8M", "gpt2_774m": "774.0M", "gpt2_1558m": "1.6B"}
SIZES |= {"megatron_8b": "8.3B", "turing_nlg_17b": "17.2B", "zero_100b": "101.1B"}

TOML = """
[model]
vocab_size = 256
num_positions = 16
num_layers = 1
num_heads = 1
embed_dim = 8

[data]
path = "{text}"
seq_len = 8

[train]
num_steps = 2
micro_batch = 1
eval_batches = 1
out_dir = "{out_dir}"
"""

USER_MODEL = """
import jax, jax.numpy as jnp
from flax import nnx

class Table(nnx.Module):
    def __init__(self, rows: int, *, width: int = 8, rngs: nnx.Rngs):
        self.table = nnx.Param(jax.random.normal(rngs.params(), (rows, width)))
        self.head = nnx.Param(jnp.zeros((width, rows)))

    def __call__(self, tokens):
        return jnp.take(self.table[...], tokens, axis=0) @ self.head[...]
"""


@pytest.fixture(scope="module", autouse=True)
def unoptimized():
    """XLA compiles in half the time; what is claimed here is of the loop around the program."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture
def config_path(tmp_path) -> str:
    (tmp_path / "text.txt").write_text("all work and no play " * 100)
    path = tmp_path / "tiny.toml"
    path.write_text(TOML.format(text=tmp_path / "text.txt", out_dir=tmp_path / "out"))
    return str(path)


def test_train_runs_a_file_and_exits_0(config_path, tmp_path, capsys):
    assert main(["train", config_path, "--train.num_steps", "3"]) == 0
    out, err = capsys.readouterr()
    assert "step     3/3 | loss" in out
    assert "\x1b" not in out
    assert err == ""
    assert (tmp_path / "out" / "metrics.jsonl").exists()


@pytest.mark.parametrize("path", CONFIGS, ids=[path.stem for path in CONFIGS])
def test_report_prints_the_table_of_every_config(path, capsys):
    assert main(["report", str(path)]) == 0
    out, _ = capsys.readouterr()
    assert "h.attn.c_attn.weight" in out
    assert f"{SIZES.get(path.stem, '842.5k')} parameters, per device" in out
    assert "no loss traced yet" not in out


def test_report_runs_and_writes_nothing(config_path, tmp_path):
    assert main(["report", config_path, "--data.path", "/nowhere", "--zero.stage", "3"]) == 0
    assert not (tmp_path / "out").exists()


def test_a_flag_sets_a_key_in_either_spelling(config_path):
    flags = ["--zero.stage", "3", "--train.num-steps=7", "--train.eval_every", "2",
             "--zero.axes", "replica", "data", "--data.max_bytes", "99", "--train.plot", "True",
             "--precision.reduce_dtype", "bfloat16", "--model.num_layers", "4",
             "--optimizer.b2", "0.5"]  # fmt: skip
    config = parse_arguments("train", [config_path, *flags])
    assert (config.zero.stage, config.zero.axes) == (3, ("replica", "data"))
    assert (config.train.num_steps, config.train.eval_every, config.train.plot) == (7, 2, True)
    assert (config.data.max_bytes, config.precision.reduce_dtype) == (99, "bfloat16")
    assert own_arguments(config.model)["num_layers"] == 4
    assert own_arguments(config.optimizer)["b2"] == 0.5
    assert config.train.micro_batch == 1  # what no flag names stays as in the file


@pytest.mark.parametrize("flags", [["--profile", "1:2"], ["--profile=1:2"]])
def test_profile_stands_for_train_profile(config_path, flags):
    assert parse_arguments("train", [config_path, *flags]).train.profile == "1:2"


def test_another_optimizer_brings_its_own_flags(config_path):
    flags = ["--optimizer.name", "sgd", "--optimizer.momentum", "0.9"]
    config = parse_arguments("train", [config_path, *flags])
    assert own_arguments(config.optimizer)["momentum"] == 0.9


def test_another_schedule_brings_its_own_flags(config_path):
    flags = ["--schedule.name", "WarmupLR", "--schedule.warmup_num_steps=9"]
    config = parse_arguments("train", [config_path, *flags])
    assert own_arguments(config.schedule)["warmup_num_steps"] == 9
    flags = ["--schedule.name", "piecewise_constant_schedule", "--schedule.init_value", "1",
             "--schedule.boundaries_and_scales", "10", "0.5", "20", "0.1"]  # fmt: skip
    own = own_arguments(parse_arguments("train", [config_path, *flags]).schedule)
    assert own == {"init_value": 1.0, "boundaries_and_scales": {10: 0.5, 20: 0.1}}


def test_one_cycle_is_trained_with_its_momentum_under_the_default_stage(config_path, tmp_path):
    flags = ["--schedule.name=OneCycle", "--schedule.cycle_min_lr=0.25", "--train.num_steps=4",
             "--schedule.cycle_max_lr=1", "--schedule.cycle_first_step_size=3",
             "--optimizer.name=sgd"]  # fmt: skip
    assert main(["train", config_path, *flags]) == 0
    rows = read_metrics(tmp_path / "out" / "metrics.jsonl")
    assert [row["lr"] for row in rows if "lr" in row] == [0.25, 0.5, 0.75, 1.0]


def test_an_optimizer_of_another_kind_brings_the_schedule_that_it_takes(config_path):
    config = parse_arguments("train", [config_path, "--optimizer.name", "polyak_sgd"])
    assert (config.schedule.name, config.optimizer.learning_rate) == ("none", None)


@pytest.mark.parametrize("name", sorted(optimizers()))
def test_help_has_the_flags_of_every_optimizer(config_path, capsys, name):
    assert main(["train", config_path, "--optimizer.name", name, "--help"]) == 0
    assert f"(default: {name})" in capsys.readouterr().out


SCHEDULES = sorted(schedules_by_name().keys() - {"join_schedules"})


@pytest.mark.parametrize("name", SCHEDULES)
def test_help_has_the_flags_of_every_schedule(config_path, capsys, name):
    assert main(["train", config_path, "--schedule.name", name, "--help"]) == 0
    out = capsys.readouterr().out
    assert f"(default: {name})" in out
    own = set(parameters(find_schedule(name))) - {"learning_rate", "num_steps"}
    assert all(f"--schedule.{key}" in out for key in own)


@pytest.fixture
def users_folder(tmp_path, monkeypatch) -> Path:
    """The current directory: mine.toml names a model of the user's beside it."""
    (tmp_path / "my_table_model.py").write_text(textwrap.dedent(USER_MODEL))
    (tmp_path / "text.txt").write_text("all work and no play " * 100)
    toml = '[model]\ntarget = "my_table_model:Table"\n[data]\npath = "text.txt"\nseq_len = 8\n'
    (tmp_path / "mine.toml").write_text(toml)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [entry for entry in sys.path if entry])
    return tmp_path


USERS_FLAGS = ["--model.rows", "256", "--train.num_steps", "2", "--train.micro_batch", "1"]


def test_a_model_of_the_users_is_trained_by_its_import_path(users_folder, capsys):
    assert main(["train", "mine.toml", *USERS_FLAGS]) == 0
    assert (users_folder / "runs" / "mine" / "metrics.jsonl").exists()
    assert main(["train", "mine.toml"]) == 2  # without the argument that has no default
    assert "--model.rows" in capsys.readouterr().err


FAILURES = [
    ([], "a command is missing"),
    (["trian"], "there is no command 'trian'; did you mean 'train'?"),
    (["train"], "CONFIG is missing; give the path of a TOML file"),
    (["train", "nowhere.toml"], "config 'nowhere.toml' does not exist; "),
    (["train", "{config}", "--zero.stge", "3"], "--zero.stge"),
    (["train", "{config}", "--zero.stage", "two"], "--zero.stage"),
    (["train", "{config}", "--zero.stage", "4"], "[zero] stage is 4; use 0, 1, 2 or 3."),
    (["train", "{config}", "--optimizer.name", "adm"], "did you mean 'adam"),
    (["train", "{config}", "--model.target", "nope:X"], "nope cannot be imported"),
    (["train", "{config}", "--data.path", "/nowhere"], "data path '/nowhere' does not exist"),
    (["train", "{config}", "--data.seq_len", "17"], "seq_len 17 is longer than the model's num_"),
    (["report", "{config}", "--mesh.data", "3"], "3 devices, but there are 8"),
    (["report", "{config}", "--train.train_batch_size", "20"],
     "train_batch_size 20 is no multiple of micro_batch 1 x 8 data shards; use 16 or 24."),
    (["train", "{config}", "--train.micro_batch", "100"], "takes 800 rows of 8 tokens, and the d"),
    (["report", "{config}", "--schedule.warmup_steps", "3"], "warmup_steps 3 is longer than the r"),
    (["report", "{config}", "--schedule.name", "cosin"], "no schedule; did you mean 'cosine'?"),
    (["report", "{config}", "--schedule.name", "constant_schedule"], "--schedule.value"),
    (["report", "{config}", "--schedule.name", "WarmupLR", "--schedule.warmup_num_steps", "2",
      "--optimizer.learning_rate", "1"], "learning_rate is 1.0; the schedule WarmupLR has its own"),
    (["report", "{config}", "--optimizer.name", "lbfgs"], "its line search calls the loss"),
]  # fmt: skip


@pytest.mark.parametrize(("words", "message"), FAILURES, ids=[" ".join(row[0]) for row in FAILURES])
def test_what_a_user_can_mend_is_one_message_on_stderr_and_exit_status_2(
    config_path, capsys, words, message
):
    assert main([config_path if word == "{config}" else word for word in words]) == 2
    out, err = capsys.readouterr()
    assert message in re.sub(r"\s*│\n│\s*", " ", err)
    assert "Traceback" not in err
    assert out == ""


@pytest.mark.usefixtures("users_folder")
def test_a_loss_that_is_not_finite_is_exit_status_1(capsys):
    flags = ["--optimizer.name", "sgd", "--optimizer.learning_rate", "1e30"]
    assert main(["train", "mine.toml", *USERS_FLAGS, *flags, "--train.num_steps", "4"]) == 1
    err = capsys.readouterr().err
    assert re.fullmatch(r"jzero train: step \d: the loss is nan; lower .*\n", err)


def test_a_bug_keeps_its_traceback(config_path, monkeypatch):
    def broken(*_):
        raise TypeError("a bug")

    monkeypatch.setattr("jzero.cli.prepare", broken)
    with pytest.raises(TypeError, match="a bug"):
        main(["train", config_path])


def test_an_error_shows_where_it_was_raised_when_asked(config_path, monkeypatch):
    monkeypatch.setenv("JZERO_TRACEBACK", "1")
    with pytest.raises(ValueError, match="does not exist"):
        main(["train", config_path, "--data.path", "/nowhere"])


SECTIONS = ("model", "optimizer", "schedule", "data", "precision", "zero", "mesh", "train")


def test_help_names_the_commands_and_the_sections(capsys):
    assert main(["--help"]) == 0
    out = capsys.readouterr().out
    assert all(word in out for word in ("train CONFIG", "report CONFIG", "--zero.stage 3"))
    assert all(f"[{section}]" in out for section in SECTIONS)


def test_help_of_a_command_lists_every_section_without_a_file(capsys):
    assert main(["train", "--help"]) == 0
    out = capsys.readouterr().out
    assert all(f"{section} options" in out for section in SECTIONS)
    assert "--zero.stage INT" in out


def test_help_with_a_file_has_the_arguments_of_its_model_and_its_values(config_path, capsys):
    assert main(["train", config_path, "--help"]) == 0
    out = capsys.readouterr().out
    assert "--model.embed_dim INT" in out
    assert "(default: 16)" in out


def test_help_without_config_works_where_the_default_model_is_not(monkeypatch, capsys):
    def refuse(*_, **__):
        raise ValueError("models.gpt2 cannot be imported")

    monkeypatch.setattr("jzero.arguments.parse_config", refuse)
    assert main(["train", "--help"]) == 0
    assert "CONFIG" in capsys.readouterr().out


def test_a_new_process_makes_the_virtual_devices_that_a_configuration_asks_for():
    env = {k: x for k, x in os.environ.items() if k not in ("XLA_FLAGS", "JAX_NUM_CPU_DEVICES")}
    words = ["report", "configs/gpt2_demo.toml", "--mesh.num_cpu_devices", "3"]
    command = [sys.executable, "-m", "jzero", *words]
    done = subprocess.run(command, cwd=ROOT, env=env, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "over 3 shards" in done.stdout
