"""What `jzero plan` refuses before anything is compiled, and how."""

import pytest

from jzero import plan_command
from jzero.cli import main
from jzero.plan_figures import Figure, Plan, StagePlan
from jzero.target import library_path

CONFIG = "configs/gpt2_124m.toml"
H100 = "--gpu h100-sxm --num-gpus 8"


@pytest.fixture
def planned(monkeypatch):
    """The requests that would have been compiled."""
    requests = []

    def make_plan(request, say):
        requests.append(request)
        peak = {"peak_bytes": Figure(1.0), "capacity_bytes": Figure(2.0)}
        return Plan("a plan", (), (StagePlan(0, peak),))

    monkeypatch.setattr(plan_command, "make_plan", make_plan)
    return requests


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("", "CONFIG is missing; give the path of a TOML file"),
        (H100, "CONFIG is missing; give the path of a TOML file"),
        (CONFIG, "--num-gpus and one of --gpu and --hardware are needed, as in --gpu h100-sxm"),
        (f"{CONFIG} --gpu h100-sxm", "--num-gpus and one of --gpu and --hardware are needed"),
        (f"{CONFIG} {H100} --hardware x.toml", "one of --gpu and --hardware are needed"),
        (f"{CONFIG} --gpu h100sxm --num-gpus 8", "h100-sxm"),
        (f"{CONFIG} --gpu h100-sxm --num-gpus 12", "num_gpus 12 is not a multiple of the 8 GPUs"),
        (f"{CONFIG} --gpu h100-sxm --num-gpus -8", "--num-gpus is -8; give a number above 0"),
        (f"{CONFIG} {H100} --capacity 0", "--capacity is 0; give a number above 0"),
        (f"{CONFIG} {H100} --params 1e9", "--params is for --formula; add it, or leave it out"),
        (f"{CONFIG} {H100} --formula --params 1e9", "both say how large the model is; leave one"),
        (f"{CONFIG} {H100} --plot plan.jpg", "does not end in .png, .svg or .pdf"),
        (f"{CONFIG} {H100} --json nowhere/plan.json", "the folder does not exist; make it first"),
        (f"{CONFIG} {H100} --precision.policy bfloat16x", "bfloat16x"),
        (f"--formula --params 1e9 {H100} --model-parallel 3", "num_gpus 8 is not a multiple of"),
    ],
)
def test_bad_words_are_refused_with_the_mend_before_any_compile(planned, words, message, capsys):
    assert main(["plan", *words.split()]) == 2
    assert message in capsys.readouterr().err
    assert planned == []


@pytest.mark.parametrize("words", ["--stage 4", "--nonsense", "--num-gpus many"])
def test_flags_that_are_none_are_usage_errors(planned, words, capsys):
    assert main(["plan", CONFIG, *H100.split(), *words.split()]) == 2
    assert "jzero plan: error" in capsys.readouterr().err
    assert planned == []


needs_plugin = pytest.mark.skipif(library_path() is None, reason="needs pip install 'jzero[plan]'")


@needs_plugin
def test_the_words_reach_the_request(planned, capsys):
    words = f"{CONFIG} {H100} --stage 3 2 3 --no-search --capacity 7e9 --num-tokens 1e9 --jobs 1"
    assert main(["plan", *words.split(), "--train.micro_batch", "5", "--zero.min_size", "9"]) == 0
    (request,) = planned
    assert (request.stages, request.finds_largest, request.capacity) == ((3, 2), False, 7e9)
    assert (request.num_tokens, request.num_jobs, request.num_gpus) == (1e9, 1, 8)
    assert (request.config.train.micro_batch, request.config.zero.min_size) == (5, 9)
    assert "a plan" in capsys.readouterr().out


def test_without_the_plugin_the_extra_to_install_is_named(planned, monkeypatch, capsys):
    monkeypatch.setattr("jzero.virtual.library_path", lambda: None)
    assert main(["plan", CONFIG, *H100.split()]) == 2
    assert "pip install 'jzero[plan]'" in capsys.readouterr().err
    assert planned == []


def test_help_names_every_flag(capsys):
    assert main(["plan", "--help"]) == 0
    out = capsys.readouterr().out
    flags = (
        "gpu hardware num-gpus stage num-tokens capacity no-search jobs json plot formula params"
    )
    assert all(f"--{flag}" in out for flag in [*flags.split(), "model-parallel", "check"])


def test_a_formula_plan_of_a_configuration_counts_by_its_precision(capsys):
    words = f"{CONFIG} {H100} --formula --train.num_microbatches 1".split()
    assert main(["plan", *words, "--stage", "0"]) == 0
    assert "fp32 master" in capsys.readouterr().out
    assert main(["plan", *words, "--stage", "0", "--precision.policy", "float32"]) == 0
