"""What `jzero plan` compiles, searches and survives."""

import dataclasses
import json
import shlex
import sys
import types

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from jzero import plan
from jzero.compile_step import (
    choose_attention,
    compile_step,
    gpu_of,
    peak_of,
    stride_of,
    with_key,
)
from jzero.config import load_config, parse_config
from jzero.gpus import find_gpu
from jzero.mesh import make_mesh
from jzero.plan import CompileError, Request, config_tables, largest_micro_batch, make_plan
from jzero.plan_figures import CAPACITY_NOTE, format_figure
from jzero.target import library_path

TABLES = {
    "model": {
        "vocab_size": 256,
        "num_positions": 32,
        "num_layers": 1,
        "num_heads": 2,
        "embed_dim": 64,
        "loss_chunk": 16,
    },
    "data": {"seq_len": 32},
    "precision": {"policy": "bfloat16"},
    "train": {"micro_batch": 2},
}
H100 = find_gpu("h100-sxm")


class Plain(nnx.Module):
    """A model that has no choice of attention."""

    def __init__(self, size: int = 4):
        self.size = size


class Table(nnx.Module):
    """As small as a model can be; it calls back to Python where it is told to."""

    def __init__(self, calls_back: bool = False, *, rngs: nnx.Rngs):
        self.table, self.calls_back = (
            nnx.Param(jax.random.normal(rngs.params(), (16, 8))),
            calls_back,
        )

    def loss(self, tokens: jax.Array) -> jax.Array:
        rows = self.table[...][tokens]
        if self.calls_back:
            jax.debug.print("{}", rows.sum())
        return jnp.mean(rows**2)


def table_job(num_gpus, **model):
    tables = {"model": {"target": "tests.test_plan:Table", **model}, "data": {"seq_len": 4}}
    return {"config": tables, "gpu": dataclasses.asdict(H100), "num_gpus": num_gpus}


needs_plugin = pytest.mark.skipif(
    library_path() is None, reason="compiling for GPUs needs pip install 'jzero[plan]'"
)


def request(**options):
    return Request(parse_config(TABLES), H100, 8, **options)


def found(size=2, peak=1000, **changes):
    """What a child finds, made up."""
    memory = {"params": 10, "master": 20, "state": 40, "temp": peak - 70, "peak": peak}
    return {
        "memory": memory | {"grads": 5, "logits": 3, "arguments": 70, "alias": 70},
        "sent": [],
        "unread": [],
        "compute_s": 0.5,
        "comm_s": 0.4,
        "exposed_s": 0.1,
        "covered": 0.75,
        "attention": "blocked",
        "num_params": 5,
        "flops": 8 * 989.4e12 * 0.3,
        "tokens": 6000,
        "batch": {"train_batch_size": 16, "micro_batch": size, "num_microbatches": 1},
        "compute_dtype": "bfloat16",
        "cpu_s": 1.0,
        "host_bytes": 2**30,
    } | changes


# The search


@pytest.mark.parametrize("start", [1, 3, 8, 500])
@pytest.mark.parametrize("slope", [1, 7, 90])
def test_the_largest_micro_batch_fits_and_the_next_does_not(start, slope):
    asked = []

    def peak_of(size):
        asked.append(size)
        return 100 + slope * size + 3 * (size % 2)  # not quite a line

    best = largest_micro_batch(peak_of, 1000, start=start)
    assert peak_of(best) <= 1000 < peak_of(best + 1)
    assert {best, best + 1} <= set(asked[:-2])
    assert len(set(asked)) == len(asked) - 2 <= 8


def test_the_search_ends_at_none_and_at_its_limit():
    assert largest_micro_batch(lambda size: 2000 + size, 1000, start=4) == 0
    assert largest_micro_batch(lambda size: 5, 1000, start=4, limit=64) == 64


def test_a_peak_that_does_not_grow_evenly_is_bisected_still():
    peaks = lambda size: 100 if size < 37 else 5000
    assert largest_micro_batch(peaks, 1000, start=8) == 36


def test_a_peak_that_is_flat_at_first_is_not_extrapolated_beyond_reason():
    asked = []

    def peak_of(size):
        asked.append(size)
        return max(100 + size / 100, 10 * size)  # the update's peak, then the activations'

    assert largest_micro_batch(peak_of, 300, start=1) == 30
    assert max(asked) <= 64 and len(asked) <= 9


def test_the_search_finds_the_same_again(monkeypatch):
    def child(job):
        size = job["config"]["train"]["micro_batch"]
        return found(size, peak=int(1e9 * (3 + size)))

    monkeypatch.setattr(plan, "run_child", child)
    plans = [make_plan(request(stages=(2,), capacity_bytes=20e9)) for _ in range(2)]
    assert [p.stages[0].value("max_micro_batch") for p in plans] == [17, 17]


# What is said of a stage


def test_the_figures_follow_from_what_was_compiled(monkeypatch):
    monkeypatch.setattr(plan, "run_child", lambda job: found())
    made = make_plan(
        request(stages=(1,), finds_largest=False, capacity_bytes=1200, num_tokens=36e6)
    )
    (stage,) = made.stages
    assert stage.value("rest_bytes") == 70
    assert (stage.value("margin_bytes"), stage.fits) == (200, True)
    assert stage.value("step_s") == pytest.approx(0.6)
    assert stage.value("tokens_per_s") == pytest.approx(10_000)
    assert stage.value("mfu") == pytest.approx(0.5)
    assert stage.value("hours") == pytest.approx(1.0)
    sources = {key: figure.source for key, figure in stage.figures.items()}
    assert (sources["peak_bytes"], sources["step_s"]) == ("compiled", "formula")
    assert sources["grads_bytes"] == sources["covered"] == "formula"
    assert sources["capacity_bytes"] == sources["micro_batch"] == "given"
    assert "max_micro_batch" not in sources


def test_a_share_of_the_memory_is_kept_free_unless_a_capacity_is_given():
    assert request().capacity == pytest.approx(0.94 * H100.memory_bytes)
    assert request(capacity_bytes=5.0).capacity == 5.0


def test_the_note_on_what_is_kept_free_is_for_the_capacity_that_keeps_it_free(monkeypatch):
    monkeypatch.setattr(plan, "run_child", lambda job: found())
    options = {"stages": (1,), "finds_largest": False}
    assert CAPACITY_NOTE in make_plan(request(**options)).notes
    assert CAPACITY_NOTE not in make_plan(request(**options, capacity_bytes=5e9)).notes


def test_what_is_not_known_for_sure_of_the_wire_is_told_with_its_stage(monkeypatch):
    monkeypatch.setattr(plan, "run_child", lambda job: found(unread=["a loop has no end"]))
    notes = make_plan(request(stages=(2,), finds_largest=False)).notes
    assert "Stage 2: what is sent may be wrong: a loop has no end" in notes


def test_where_nothing_is_sent_nothing_is_said_to_be_covered(monkeypatch):
    alone = {"comm_s": 0.0, "exposed_s": 0.0, "covered": None}
    monkeypatch.setattr(plan, "run_child", lambda job: found(**alone))
    (stage,) = make_plan(request(stages=(1,), finds_largest=False)).stages
    assert format_figure("share", stage.figures["covered"]) == "-"


@pytest.mark.parametrize(("told", "peak"), [(70, 95), (95, 95), (130, 130)])
def test_the_peak_is_never_below_what_rests_and_all_temporaries(told, peak):
    sizes = {"argument": 50, "temp": 40, "output": 35, "alias": 30}
    memory = types.SimpleNamespace(
        peak_memory_in_bytes=told, **{f"{name}_size_in_bytes": n for name, n in sizes.items()}
    )
    assert peak_of(memory) == peak


def test_each_stage_is_compiled_without_options_of_other_stages(monkeypatch):
    jobs = []
    monkeypatch.setattr(plan, "run_child", lambda job: jobs.append(job) or found())
    tables = {**TABLES, "zero": {"stage": 3, "keep_gathered": True}}
    config = parse_config(tables)
    make_plan(Request(config, H100, 8, finds_largest=False, num_jobs=1))
    zeros = [job["config"]["zero"] for job in jobs]
    assert [zero["stage"] for zero in zeros] == [0, 1, 2, 3]
    assert [zero.get("keep_gathered", False) for zero in zeros] == [False, False, False, True]
    assert all(parse_config(job["config"]) for job in jobs)


def test_a_configuration_survives_the_way_to_the_child():
    for path in ("configs/gpt2_demo.toml", "configs/zero_100b.toml"):
        config = load_config(path)
        again = parse_config(json.loads(json.dumps(config_tables(config))))
        assert dataclasses.asdict(again) == dataclasses.asdict(config)


# Children that fail


def test_a_stage_that_fails_is_named_and_the_others_go_on(monkeypatch):
    def child(job):
        if job["config"]["zero"]["stage"] == 1:
            raise CompileError("the compile ended with signal 6 (SIGABRT)")
        return found()

    monkeypatch.setattr(plan, "run_child", child)
    told = []
    made = make_plan(request(finds_largest=False), told.append)
    assert [bool(stage.failure) for stage in made.stages] == [False, True, False, False]
    assert "SIGABRT" in made.stages[1].failure
    assert "stage 1: the compile failed" in told


def test_a_search_that_fails_keeps_the_figures_of_its_stage(monkeypatch):
    def child(job):
        if job["config"]["train"]["micro_batch"] != 2:
            raise CompileError("out of luck")
        return found()

    monkeypatch.setattr(plan, "run_child", child)
    made = make_plan(request(stages=(3,), capacity_bytes=1e12))
    assert made.stages[0].value("peak_bytes") == 1000
    assert any("search for the largest micro batch ended: out of luck" in n for n in made.notes)


def test_what_no_stage_can_honour_is_an_error(monkeypatch):
    def child(job):
        raise CompileError("ValueError: h100-sxm does not like it; use another")

    monkeypatch.setattr(plan, "run_child", child)
    told = []
    with pytest.raises(ValueError, match="^h100-sxm does not like it; use another$"):
        make_plan(request(), told.append)
    assert sorted(told) == [f"stage {stage}: cannot work" for stage in range(4)]


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", r"signal 9 \(SIGKILL\)"),
        ("import sys; sys.exit('no such luck')", "(?s)exit status 1.*no such luck"),
        (
            "def f():\n    raise TypeError('two floats')\nimport jax, jax.numpy; jax.jit(f)()",
            r"(?s)^TypeError: two floats; .* exit status 1; .*\nTypeError: two floats$",
        ),
        ('print(); print(\'{"error": "12 is odd; use 13"}\')', "ValueError: 12 is odd; use 13"),
    ],
)
def test_how_a_child_ended_is_told_with_its_last_words(monkeypatch, tmp_path, code, words):
    script = tmp_path / "child"
    script.write_text(f"#!/bin/sh\nexec {sys.executable} -c {shlex.quote(code)}\n")
    script.chmod(0o755)
    monkeypatch.setattr(plan.sys, "executable", str(script))
    with pytest.raises(CompileError, match=words):
        plan.run_child({})


# The child itself


@needs_plugin
@pytest.mark.xdist_group("gpu_program")
def test_a_child_measures_the_step_of_the_configuration():
    job = {"config": TABLES, "gpu": dataclasses.asdict(H100), "num_gpus": 8}
    result = plan.run_child(job)
    memory, num_params = result["memory"], result["num_params"]
    held = memory["params"] + memory["master"] + memory["state"]
    assert held / num_params == pytest.approx(2 + 12 / 8, rel=0.02)
    assert memory["arguments"] == pytest.approx(held, rel=0.02)
    assert memory["peak"] > memory["arguments"]
    assert {sent["kind"] for sent in result["sent"]} == {"reduce_scatter", "all_gather"}
    assert result["unread"] == [] and result["attention"] == "blocked"
    assert result["tokens"] == 8 * 2 * 32


def test_a_child_refuses_what_the_gpu_cannot_do():
    v100 = dataclasses.asdict(find_gpu("v100-sxm2-16gb"))
    with pytest.raises(ValueError, match="num_gpus 24 is not a multiple of the 16 GPUs"):
        compile_step({"config": TABLES, "gpu": v100, "num_gpus": 24})


@needs_plugin
@pytest.mark.xdist_group("gpu_program")
def test_a_model_that_calls_back_to_python_is_refused_with_the_mend():
    with pytest.raises(ValueError, match=r"jax\.debug\.print.* leave the call out of the model"):
        compile_step(table_job(2, calls_back=True))


@needs_plugin
@pytest.mark.xdist_group("gpu_program")
def test_one_gpu_sends_nothing_that_could_be_covered():
    result = compile_step(table_job(1))
    assert (result["sent"], result["comm_s"], result["covered"]) == ([], 0, None)


def test_a_gpu_survives_the_way_to_the_child():
    assert gpu_of(json.loads(json.dumps(dataclasses.asdict(H100)))) == H100


def test_attention_is_chosen_only_where_the_model_leaves_it_open():
    config, full = parse_config(TABLES), with_key(TABLES, "model", "attention", "full")
    assert choose_attention(config, H100) in ("blocked", "cudnn")
    assert choose_attention(config, find_gpu("v100-sxm2-32gb")) == "blocked"
    assert choose_attention(parse_config(full), H100) == ""
    plain = parse_config({"model": {"target": "tests.test_plan:Plain"}})
    assert choose_attention(plain, H100) == ""


def test_neighbours_in_a_group_are_as_far_apart_as_the_axes_after_theirs():
    mesh = make_mesh(replica=2, data=2, model=2)
    axes = [("model",), ("data",), ("replica",), ("data", "model"), None]
    assert [stride_of(mesh, a) for a in axes] == [1, 2, 4, 1, 1]
