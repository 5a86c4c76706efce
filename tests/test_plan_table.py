"""The table, the sentence it ends with and the JSON say what the plan holds, and where from."""

import dataclasses
import json
import math
import re

import jax.numpy as jnp
import numpy as np
import pytest

from jzero.plan_figures import FORMULA, KEYS, Figure, Plan, Sent, StagePlan
from jzero.plan_table import FLOPS_RULE, LEGEND, OF_THESE, conclusion, render, to_json
from tests.plans import GIB, KILLED, gpt2_plan, trillion_plan, with_failure

PLANS = {
    "fits": gpt2_plan(),
    "failed": with_failure(gpt2_plan(8, 31.7 * GIB), 1),
    "none fits": gpt2_plan(8, 2 * GIB),
    "formula": trillion_plan(),
    "axes": Plan(
        "two axes",
        (),
        (
            StagePlan(
                2,
                {"params_bytes": Figure(GIB)},
                (
                    Sent("reduce_scatter", "float32", "replica", 2, GIB),
                    Sent("all_gather", "bf16", "data", 2, 2 * GIB, source=FORMULA),
                ),
            ),
        ),
    ),
}
EVERY = pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)


def line(text, label):
    """The cells of the row with this label."""
    (row,) = [x for x in text.splitlines() if x.strip().startswith(f"{label} ")]
    return re.split(r"  +", row.strip())[1:]


def known(plan, stage, **values):
    """The plan's stage with these values in place of its own."""
    mine = next(x for x in plan.stages if x.stage == stage)
    kept = {k: f for k, f in mine.figures.items() if k not in ("margin_bytes", *values)}
    new = {k: Figure(v) for k, v in values.items() if v is not None}
    return dataclasses.replace(mine, figures={**kept, **new})


def alone(stage_plan):
    return Plan("one stage", (), (stage_plan,))


@EVERY
def test_the_table_fits_in_100_columns_and_a_pipe(plan, monkeypatch):
    for name in ("FORCE_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("COLUMNS", "40")
    text = render(plan)
    assert max(map(len, text.splitlines())) <= 100
    assert "\x1b" not in text and "…" not in text
    assert not any(row != row.rstrip() for row in text.splitlines())
    assert text.startswith(f"{plan.title}\n") and text.endswith(".\n")


def test_each_stage_is_a_column_that_says_what_it_cuts():
    text = render(gpt2_plan())
    assert re.search(r"stage 0 +stage 1 +stage 2 +stage 3\n", text)
    assert re.search(r"nothing cut +state cut +\+ gradients +\+ parameters\n", text)


def test_each_row_holds_the_figure_of_each_stage():
    text = render(gpt2_plan(8, 15.8 * GIB))
    assert line(text, "parameters") == ["2.9 GiB", "2.9 GiB", "2.9 GiB", "371.4 MiB"]
    assert line(text, "fp32 master") == ["5.8 GiB", "742.7 MiB", "742.7 MiB", "742.7 MiB"]
    fits = ["no, 11.6 GiB", "fits, 3.7 GiB", "fits, 6.2 GiB", "fits, 8.7 GiB"]
    assert line(text, "fits") == fits
    assert re.search(r"too much +to spare +to spare +to spare\n", text)
    assert line(text, "largest that fits") == ["0", "12", "18", "23"]
    assert line(text, "all_reduce bf16 over data") == ["5.1 GiB", "-", "-", "-"]
    assert line(text, "all of it") == ["5.1 GiB", "5.1 GiB", "5.1 GiB", "7.5 GiB"]


def test_what_fits_is_said_in_two_lines_where_four_stages_stand_side_by_side():
    text = render(gpt2_plan())
    fits = ["fits, 51.7 GiB", "fits, 68.9 GiB", "fits, 71.7 GiB", "fits, 74.6 GiB"]
    assert line(text, "fits") == fits
    formula = line(render(trillion_plan()), "fits")
    assert formula[0] == "no, ~14869.5 GiB" and formula[3] == "fits, ~17.1 GiB"


def test_figures_by_formula_are_marked_one_by_one_and_the_legend_says_so():
    plan = gpt2_plan(8)
    mixed = dataclasses.replace(plan.stages[1], figures={"params_bytes": Figure(GIB, FORMULA)})
    text = render(dataclasses.replace(plan, stages=(plan.stages[0], mixed)))
    assert line(text, "parameters") == ["2.9 GiB", "~1.0 GiB"]
    assert f"- {LEGEND}\n" in text
    compiled = alone(StagePlan(1, {"params_bytes": Figure(GIB)}))
    assert "~" not in render(compiled)


def test_gradients_and_logits_are_said_to_be_part_of_the_temporaries():
    text = render(gpt2_plan())
    assert text.index("temporaries") < text.index("of these, summed gradients")
    assert f"- {OF_THESE}\n" in text and f"- {FLOPS_RULE}\n" in text
    formula = render(trillion_plan())
    assert line(formula, "summed gradients")[3] == "~1.8 GiB"
    assert "of these" not in formula and "not counted twice" not in formula


def test_a_row_that_no_stage_has_is_left_out_and_one_that_some_have_is_not():
    plan = gpt2_plan(8)
    bare = StagePlan(3, {"hours": Figure(math.nan)})
    text = render(dataclasses.replace(plan, stages=(plan.stages[0], bare)))
    assert line(text, "parameters") == ["2.9 GiB", "-"]
    assert "hours" not in render(alone(bare)) and "nan" not in render(alone(bare))


def test_the_notes_are_printed_and_wrapped():
    plan = dataclasses.replace(gpt2_plan(), notes=("first " * 30, "[second] of them"))
    text = render(plan)
    assert "- first first" in text and "\n  first" in text and "- [second] of them\n" in text


def test_a_failure_stands_in_its_column_and_in_full_below():
    text = render(with_failure(gpt2_plan(8, 31.7 * GIB), 1))
    (short,) = line(text, "failed with")  # as wide as the column
    assert short.startswith("the compile")
    assert line(text, "parameters") == ["2.9 GiB", "-", "2.9 GiB", "371.4 MiB"]
    below = text[text.index("Stage 1 failed with:") :]
    assert all(f"  {x}\n" in below for x in KILLED.splitlines())


def test_the_failures_of_all_stages_are_told():
    plan = gpt2_plan(stages=(1, 2))
    text = render(with_failure(with_failure(plan, 1, "first\n\ncause [x]"), 2, "second"))
    assert (
        "Stage 1 failed with:\n  first\n\n  cause [x]\n\nStage 2 failed with:\n  second\n" in text
    )
    assert text.endswith("\nStages 1 and 2 could not be compiled.\n")


def test_the_conclusion_names_what_fits_and_the_fastest():
    sure = "Stages 1, 2 and 3 fit; stage 3 is the fastest by the estimate (212 ms a step)."
    assert conclusion(gpt2_plan(8, 15.8 * GIB)) == sure
    failed = with_failure(gpt2_plan(8, 15.8 * GIB), 2)
    assert conclusion(failed).startswith("Stage 2 could not be compiled. Stages 1 and 3 fit; ")
    assert conclusion(gpt2_plan(8, 8 * GIB)) == "Only stage 3 fits (212 ms a step by the estimate)."
    assert conclusion(gpt2_plan(stages=(2,))) == "Stage 2 fits (213 ms a step by the estimate)."


def test_the_conclusion_needs_no_estimate():
    assert conclusion(trillion_plan()) == "Only stage 3 fits."
    assert conclusion(trillion_plan(capacity_bytes=1e16)) == "Stages 0, 1, 2 and 3 fit."


def test_where_nothing_fits_the_nearest_is_named_with_what_can_help():
    want = "No stage fits: stage 3 misses by 5.1 GiB; use more GPUs or GPUs with more memory."
    assert conclusion(gpt2_plan(8, 2 * GIB)) == want
    failed = conclusion(with_failure(gpt2_plan(8, 2 * GIB), 3))
    assert failed.startswith("Stage 3 could not be compiled. No other stage fits: stage 2 misses")


def test_a_smaller_micro_batch_is_offered_only_where_it_can_help():
    plan = gpt2_plan(8, 4 * GIB, stages=(3,))
    say = lambda **values: conclusion(alone(known(plan, 3, **values)))
    assert "use more GPUs, a micro batch of at most 2 or GPUs" in say(max_micro_batch=2)
    assert "use more GPUs or GPUs" in say(max_micro_batch=0)
    assert "use more GPUs, a smaller micro batch or GPUs" in say(max_micro_batch=None)
    assert "use more GPUs or GPUs" in say(max_micro_batch=None, micro_batch=1)
    assert "use more GPUs or GPUs" in say(max_micro_batch=None, rest_bytes=4 * GIB)


def test_more_gpus_are_not_offered_to_stage_0_but_stage_3_is():
    text = conclusion(gpt2_plan(8, 2 * GIB, stages=(0,)))
    assert text.startswith("Stage 0 does not fit: it misses by ")
    assert text.endswith("; use stage 3 or GPUs with more memory.")


def test_without_a_peak_nothing_is_said_to_fit_or_not():
    text = conclusion(alone(StagePlan(1, {"capacity_bytes": Figure(GIB)})))
    assert text == "Stage 1: no peak to compare with a capacity."


@EVERY
def test_the_json_is_strict_and_holds_each_figure_with_its_source(plan):
    found = json.loads(json.dumps(to_json(plan), allow_nan=False))
    assert found["title"] == plan.title and found["conclusion"] == conclusion(plan)
    for stage, mine in zip(plan.stages, found["stages"], strict=True):
        assert (mine["stage"], mine["fits"]) == (stage.stage, stage.fits)
        assert mine["failure"] == stage.failure
        assert list(mine["figures"]) == [key for key in KEYS if key in stage.figures]
        for key, figure in stage.figures.items():
            assert mine["figures"][key] == {"value": figure.value, "source": figure.source}
        assert mine["sent"] == [dataclasses.asdict(sent) for sent in stage.sent]


def test_the_json_says_what_fits_and_what_is_best():
    found = to_json(PLANS["fits"])
    assert (found["fits_any"], found["best_stage"]) == (True, 3)
    found = to_json(PLANS["none fits"])
    assert (found["fits_any"], found["best_stage"]) == (False, None)


def test_what_json_cannot_hold_becomes_null_numbers_and_text():
    facts = {
        "num_gpus": np.int64(64),
        "loss": jnp.float32("nan"),
        "limits": (math.inf, -math.inf, 1.5, None, True),
        "dtype": np.dtype("float16"),
        "nested": {3: np.float64(2.5)},
    }
    stage = StagePlan(1, {"mfu": Figure(math.nan, FORMULA), "micro_batch": Figure(np.int64(8))})
    found = to_json(Plan("odd", (), (stage,), facts))
    assert json.loads(json.dumps(found, allow_nan=False))["facts"] == {
        "num_gpus": 64,
        "loss": None,
        "limits": [None, None, 1.5, None, True],
        "dtype": "float16",
        "nested": {"3": 2.5},
    }
    figures = found["stages"][0]["figures"]
    assert figures["mfu"] == {"value": None, "source": "formula"}
    assert figures["micro_batch"]["value"] == 8
