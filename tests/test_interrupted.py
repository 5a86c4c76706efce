"""A run that is killed at any moment finds a complete checkpoint and goes on exactly."""

import signal
import time

import pytest

from jzero.checkpoint import damaged, open_step, steps_in
from jzero.metrics import read_metrics
from scripts.kill_and_resume import kill_and_resume, run
from tests.runs import assert_same, saved, write_text

CONFIG = """
[model]
num_positions = 16
num_layers = 1
num_heads = 2
embed_dim = 16
vocab_size = 256
dropout = 0.1
[data]
path = "{text}"
seq_len = 16
val_fraction = 0.2
[train]
num_steps = {num_steps}
micro_batch = 1
log_every = 1
eval_batches = 1
out_dir = "{out}"
[checkpoint]
every = 3
"""


def write_config(folder, num_steps):
    text, out = write_text(folder), folder / "run"
    path = folder / "run.toml"
    path.write_text(CONFIG.format(text=text, out=out, num_steps=num_steps))
    return path, out


@pytest.fixture(autouse=True)
def compiled_in_half_the_time(monkeypatch):
    monkeypatch.setenv("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")


def wait_for_step(process, out, step):
    metrics = out / "metrics.jsonl"
    while process.poll() is None:
        if metrics.exists() and any(row["step"] >= step for row in read_metrics(metrics)):
            return
        time.sleep(0.02)
    pytest.fail(process.communicate()[0])


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_a_signal_saves_the_step_at_hand_and_the_same_command_goes_on(tmp_path, number, status):
    path, out = write_config(tmp_path, 5000)
    process = run(path, out)
    wait_for_step(process, out, 2)
    process.send_signal(number)
    printed, _ = process.communicate(timeout=60)
    assert process.returncode == status, printed
    last = steps_in(out / "checkpoints")[-1]
    name = signal.Signals(number).name
    assert f"stopped by {name} after step {last}, which is saved" in printed
    assert damaged(open_step(out / "checkpoints")) == []
    losses = [row for row in read_metrics(out / "metrics.jsonl") if "loss" in row]
    assert losses[-1]["step"] == last


def test_a_second_interrupt_stops_at_once(tmp_path):
    path, out = write_config(tmp_path, 5000)
    process = run(path, out)
    wait_for_step(process, out, 2)
    # Between the two no step may end: the process does not run there.
    process.send_signal(signal.SIGSTOP)
    process.send_signal(signal.SIGINT)
    process.send_signal(signal.SIGCONT)
    time.sleep(0.001)
    process.send_signal(signal.SIGINT)
    printed, _ = process.communicate(timeout=60)
    assert process.returncode == 130, printed
    assert "Traceback" not in printed


def test_killed_at_random_moments_it_ends_as_if_it_never_was(tmp_path):
    path, out = write_config(tmp_path, 12)
    straight = tmp_path / "straight"
    done = run(path, straight)
    assert done.communicate()[0]
    assert done.returncode == 0
    kills = kill_and_resume(path, out, num_kills=2, seed=0)
    assert len(kills) == 2
    assert_same(saved(out)[1], saved(straight)[1])
    rows = [read_metrics(place / "metrics.jsonl") for place in (out, straight)]
    losses = [{row["step"]: row["loss"] for row in r if "loss" in row} for r in rows]
    assert losses[0] == losses[1]
    assert len(losses[0]) == 12
