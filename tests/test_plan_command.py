"""`jzero plan` as a command: its check against published runs, its JSON, settings it cannot use."""

import json
import re

import pytest

from jzero import plan_command, plan_plot
from jzero.cli import main
from jzero.plan_figures import KEYS, SOURCES, Figure, Plan, StagePlan
from jzero.target import library_path

CONFIG = "configs/gpt2_124m.toml"
H100 = "--gpu h100-sxm --num-gpus 8"
FORMULA = f"--formula --params 1e9 {H100}"


@pytest.fixture(autouse=True)
def nothing_is_compiled(monkeypatch):
    def make_plan(*_):
        raise AssertionError("a compile was asked for")

    monkeypatch.setattr(plan_command, "make_plan", make_plan)


def refused(words, capsys):
    """What a command that exits with status 2 says."""
    assert main(["plan", *words.split()]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    return err


def test_check_prints_a_row_for_each_published_run_with_the_models_and_the_error(capsys):
    assert main(["plan", "--check"]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()[2:6]]
    assert [row[0] for row in rows] == ["1.5B", "4.0B", "8.0B", "20.0B"]
    assert [row[5] for row in rows] == ["1.18", "1.52", "1.77", "3.70"]
    for *_, published, model, error in rows:
        told = float(error.removesuffix("%")) / 100
        assert told == pytest.approx(float(model) / float(published) - 1, abs=0.01)


@pytest.mark.parametrize("words", ["--check --gpu h100-sxm", f"{CONFIG} --check"])
def test_check_takes_no_other_words(words, capsys):
    assert "--check stands alone; leave the other words out" in refused(words, capsys)


@pytest.mark.parametrize("words", [FORMULA, f"{CONFIG} --formula {H100} --num-tokens 1e9"])
def test_the_json_is_strict_and_has_a_source_for_each_figure(words, tmp_path, capsys):
    path = tmp_path / "plan.json"
    assert main(["plan", *words.split(), "--json", str(path)]) == 0

    def refuse(name):
        raise ValueError(name)

    found = json.loads(path.read_text(), parse_constant=refuse)
    assert [stage["stage"] for stage in found["stages"]] == [0, 1, 2, 3]
    for stage in found["stages"]:
        assert set(stage["figures"]) <= set(KEYS)
        assert {figure["source"] for figure in stage["figures"].values()} <= set(SOURCES)
        assert all(figure["value"] is not None for figure in stage["figures"].values())
        assert {sent["source"] for sent in stage["sent"]} == {"formula"}
        assert stage["figures"]["capacity_bytes"]["source"] == "given"
        assert ("hours" in stage["figures"]) == ("--num-tokens" in words)
    assert found["facts"]["num_gpus"] == 8
    assert found["title"] in capsys.readouterr().out


def test_stages_are_printed_in_the_order_asked_for_and_once(capsys):
    assert main(["plan", *FORMULA.split(), "--stage", "3", "2", "3"]) == 0
    head = capsys.readouterr().out.splitlines()[1]
    assert re.findall(r"stage \d", head) == ["stage 3", "stage 2"]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (f"{FORMULA} --train.micro_batch 4", "--train.micro_batch has no CONFIG before it"),
        (f"{H100} {CONFIG}", f"{CONFIG} has no CONFIG before it; CONFIG comes first, as in"),
        (f"{FORMULA} --num-tokens 1e9", "--num-tokens needs the batch of a CONFIG; give one"),
        (f"{CONFIG} {H100} --model-parallel 2", "--model-parallel is for --formula; add it, or"),
        (f"{CONFIG} --gpu h100_sxm --num-gpus 8", "did you mean 'h100-sxm'?"),
        (f"{CONFIG} --hardware mine.toml --num-gpus 8", "mine.toml cannot be read"),
        (f"configs/gpt2_124.toml {H100}", "config 'configs/gpt2_124.toml' does not exist"),
        (f"--formula --params -1 {H100}", "--params is -1; give a finite number above 0"),
        (f"--formula --params 0 {H100}", "--params is 0; give a finite number above 0"),
        (f"--formula --params nan {H100}", "--params is nan; give a finite number above 0"),
        (f"--params 1e9 {H100}", "--params is for --formula; add it, or leave it out"),
        (f"{CONFIG} {H100} --jobs 0", "--jobs is 0; give a finite number above 0"),
        (f"{CONFIG} {H100} --num-tokens 0", "--num-tokens is 0; give a finite number above 0"),
        (f"{CONFIG} {H100} --capacity inf", "--capacity is inf; give a finite number above 0"),
        (f"{CONFIG} {H100} --capacity nan", "--capacity is nan; give a finite number above 0"),
        (f"{FORMULA} --no-search", "--formula compiles nothing for --no-search; leave one of them"),
        (f"{FORMULA} --jobs 2", "--formula compiles nothing for --jobs; leave one of them out"),
        (f"{CONFIG} {H100} --zero.stage 4", "--zero.stage is '4'; use 0, 1, 2 or 3, or --stage"),
        (f"{CONFIG} {H100} --stage 2 3 --zero.stage 2", "--stage 2 3 and --zero.stage 2 both say"),
        (f"{CONFIG} {H100} --stage 2 --zero.keep_gathered True", "it is for stage 3, not 2:"),
        (f"{CONFIG} --formula {H100} --mesh.replica 2", "leave --formula out, or set both to 1"),
        (f"{CONFIG} {H100} --json configs", "--json configs is a folder; name a file in it"),
        (f"{CONFIG} {H100} --plot nowhere/plan.png", "'nowhere', which does not exist; make it"),
    ],
)
def test_a_setting_that_cannot_be_used_is_refused_with_the_mend(words, told, capsys):
    assert told in refused(words, capsys)


def test_without_matplotlib_the_extra_to_install_is_named(monkeypatch, capsys):
    def import_extra(module, extra):
        raise ImportError(f"{module} cannot be imported; run: pip install 'jzero[{extra}]'")

    monkeypatch.setattr(plan_plot, "import_extra", import_extra)
    told = refused(f"{CONFIG} {H100} --plot plan.png", capsys)
    assert "pip install 'jzero[plot]', or leave --plot out" in told


# What is refused before anything is compiled, and how; what reaches the request


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
        (f"{CONFIG} {H100} --hardware x.toml", "--gpu and --hardware both say what the GPUs are"),
        (f"{CONFIG} --gpu h100sxm --num-gpus 8", "h100-sxm"),
        (f"{CONFIG} --gpu h100-sxm --num-gpus 12", "num_gpus 12 is not a multiple of the 8 GPUs"),
        (
            f"{CONFIG} --gpu h100-sxm --num-gpus -8",
            "--num-gpus is -8; give a finite number",
        ),
        (f"{CONFIG} {H100} --capacity 0", "--capacity is 0; give a finite number above 0"),
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


@needs_plugin
@pytest.mark.parametrize(
    ("words", "stages", "own"),
    [
        ("", (0, 1, 2, 3), {}),
        ("--zero.stage 3", (3,), {}),
        ("--zero.stage=1", (1,), {}),
        ("--stage 2 --zero.stage 2", (2,), {}),
        ("--stage 3 --zero.keep_gathered True", (3,), {"stage": 3, "keep_gathered": True}),
        ("--zero.keep-gathered=True", (0, 1, 2, 3), {"stage": 3, "keep_gathered": True}),
        ("--zero.cut_layers True --stage 1 2", (1, 2), {"stage": 1, "cut_layers": True}),
        ("--zero.keep_gathered False --stage 1", (1,), {"keep_gathered": False}),
    ],
)
def test_the_stage_of_the_configuration_is_the_stage_that_is_planned(planned, words, stages, own):
    assert main(["plan", CONFIG, *H100.split(), *words.split()]) == 0
    (request,) = planned
    assert request.stages == stages
    assert {key: getattr(request.config.zero, key) for key in own} == own


@pytest.mark.parametrize(
    ("failures", "peaks", "status"),
    [
        (("", "killed"), (1.0, None), 0),
        (("", "killed"), (3.0, None), 1),
        (("killed", "killed"), (None, None), 2),
    ],
)
def test_the_exit_status_tells_what_does_not_fit_from_what_does_not_compile(
    monkeypatch, failures, peaks, status
):
    def make_plan(*_):
        stages = [
            StagePlan(i, {"peak_bytes": Figure(p), "capacity_bytes": Figure(2.0)}, failure=failure)
            for i, (failure, p) in enumerate(zip(failures, peaks, strict=True))
        ]
        return Plan("a plan", (), tuple(stages))

    monkeypatch.setattr(plan_command, "make_plan", make_plan)
    monkeypatch.setattr(plan_command, "check_cluster", lambda *_, **__: None)
    assert main(["plan", CONFIG, *H100.split()]) == status


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
