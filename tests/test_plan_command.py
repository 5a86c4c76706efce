"""`jzero plan` as a command: its check against published runs, its JSON, settings it cannot use."""

import json
import re

import pytest

from jzero import plan_command, plan_plot
from jzero.cli import main
from jzero.plan_figures import KEYS, SOURCES

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
        (f"--formula --params -1 {H100}", "--params is -1; give a number above 0"),
        (f"--formula --params nan {H100}", "--params is nan; give a number above 0"),
        (f"{CONFIG} {H100} --jobs 0", "--jobs is 0; give a number above 0"),
        (f"{CONFIG} {H100} --num-tokens 0", "--num-tokens is 0; give a number above 0"),
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
