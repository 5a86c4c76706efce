"""A plan's figures carry their source, follow from each other, and say what fits."""

import dataclasses
import math

import pytest

from jzero.plan_figures import (
    COMPILED,
    FIGURES,
    FORMATS,
    FORMULA,
    GIVEN,
    KEYS,
    Figure,
    Plan,
    Sent,
    StagePlan,
    best_stage,
    fits_any,
    format_figure,
    sent_by_kind,
    total,
)
from tests.plans import GIB, gpt2_plan, trillion_plan, with_failure


def stage_plan(stage=1, **values):
    return StagePlan(stage, {key: Figure(value) for key, value in values.items()})


def plan_of(*stages):
    return Plan("a plan", (), stages)


def fitting(stage, **values):
    return stage_plan(stage, peak_bytes=1.0, capacity_bytes=2.0, **values)


def test_every_figure_has_one_row_and_a_format():
    assert len(set(KEYS)) == len(FIGURES)
    assert {row.unit for row in FIGURES} == {*FORMATS, "fits"}
    groups = [row.group for row in FIGURES]
    assert groups == sorted(groups, key=list(dict.fromkeys(groups)).index)  # each in one piece


def test_what_follows_from_other_figures_is_filled_in():
    figures = {
        "params_bytes": Figure(2.0),
        "master_bytes": Figure(4.0),
        "state_bytes": Figure(8.0, FORMULA),
        "peak_bytes": Figure(20.0),
        "capacity_bytes": Figure(50.0, GIVEN),
    }
    sent = (Sent("all_gather", "bf16", "data", 3, 7.0), Sent("all_reduce", "f32", "data", 1, 4.0))
    found = StagePlan(1, figures, sent).figures
    assert found["rest_bytes"] == Figure(14.0, FORMULA)
    assert found["margin_bytes"] == Figure(30.0, COMPILED)
    assert found["wire_bytes"] == Figure(11.0, COMPILED)


def test_a_figure_that_is_given_is_not_replaced():
    found = stage_plan(params_bytes=1.0, state_bytes=2.0, rest_bytes=5.0)
    assert found.value("rest_bytes") == 5.0


@pytest.mark.parametrize("unknown", [None, math.nan, math.inf])
def test_nothing_follows_from_what_is_not_known(unknown):
    found = stage_plan(
        params_bytes=1.0, state_bytes=unknown, peak_bytes=unknown, capacity_bytes=3.0
    )
    assert found.value("state_bytes") is None
    assert not {"rest_bytes", "margin_bytes", "wire_bytes"} & set(found.figures)
    assert found.fits is None


def test_parameters_alone_are_not_all_that_is_at_rest():
    assert stage_plan(params_bytes=1.0).value("rest_bytes") is None


def test_a_sum_is_as_sure_as_its_least_sure_part():
    assert total([Figure(1.0, GIVEN), Figure(2.0, COMPILED)]) == Figure(3.0, COMPILED)
    assert total([Figure(1.0, COMPILED), Figure(2.0, FORMULA)]) == Figure(3.0, FORMULA)
    assert total([Figure(1.0, GIVEN)]) == Figure(1.0, GIVEN)
    assert total([Figure(1.0), Figure(None)]) is None
    assert total([]) is None


def test_a_stage_fits_up_to_the_last_byte():
    assert stage_plan(peak_bytes=8.0, capacity_bytes=8.0).fits is True
    assert stage_plan(peak_bytes=9.0, capacity_bytes=8.0).fits is False


def test_a_stage_that_failed_does_not_count_as_fitting():
    plan = with_failure(plan_of(fitting(2)), 2)
    assert plan.stages[0].fits is None
    kept = dataclasses.replace(fitting(2), failure="killed")
    assert kept.fits is None and not fits_any(plan_of(kept)) and best_stage(plan_of(kept)) is None


def test_the_best_stage_is_the_fastest_of_those_that_fit():
    slow, fast = fitting(1, step_s=0.5), fitting(3, step_s=0.4)
    faster = stage_plan(0, peak_bytes=3.0, capacity_bytes=2.0, step_s=0.1)  # does not fit
    assert best_stage(plan_of(faster, slow, fast)) is fast
    assert fits_any(plan_of(faster, slow)) and not fits_any(plan_of(faster))


def test_between_equal_steps_exposed_communication_decides_then_the_lower_stage():
    exposed, hidden = fitting(1, step_s=0.4, exposed_s=0.2), fitting(2, step_s=0.4, exposed_s=0.1)
    assert best_stage(plan_of(exposed, hidden)) is hidden
    third, second = fitting(3), fitting(2)
    assert best_stage(plan_of(third, second)) is second
    assert best_stage(plan_of(second, fitting(3, step_s=9.0))).stage == 3


def test_the_wire_has_a_line_for_each_kind_dtype_and_axis():
    table = sent_by_kind(gpt2_plan(8))
    assert list(table) == [
        "all_reduce bf16 over data",
        "all_reduce f32 over data",
        "reduce_scatter bf16 over data",
        "all_gather bf16 over data",
    ]
    assert [figure is None for figure in table["all_gather bf16 over data"]] == [True, *[False] * 3]


def test_entries_of_the_same_line_are_added():
    twice = (
        Sent("all_gather", "bf16", "data", 1, 5.0),
        Sent("all_gather", "bf16", "data", 1, 6.0, source=FORMULA),
        Sent("all_gather", "bf16", "replica", 1, 7.0),
    )
    table = sent_by_kind(plan_of(StagePlan(1, {}, twice)))
    assert table["all_gather bf16 over data"] == [Figure(11.0, FORMULA)]
    assert table["all_gather bf16 over replica"] == [Figure(7.0)]


@pytest.mark.parametrize(
    ("unit", "value", "text"),
    [
        ("bytes", 3 * GIB, "3.0 GiB"),
        ("count", 12.0, "12"),
        ("flops", 5.39e15, "5.4 PFLOP"),
        ("flops", 999.96e12, "1.0 PFLOP"),
        ("flops", 3e25, "30000.0 ZFLOP"),
        ("seconds", 8.04e-5, "80 us"),
        ("seconds", 3.2e-6, "3.2 us"),
        ("seconds", 0.0, "0 ms"),
        ("seconds", 0.01804, "18.0 ms"),
        ("seconds", 0.4123, "412 ms"),
        ("seconds", 0.9996, "1.0 s"),
        ("seconds", 83.21, "83.2 s"),
        ("share", 0.9567, "95.7%"),
        ("rate", 2_449_000, "2.4M"),
        ("hours", 11.27, "11.3"),
        ("hours", 12345.6, "12,346"),
        ("fits", 3 * GIB, "fits, 3.0 GiB\nto spare"),
        ("fits", -3 * GIB, "no, 3.0 GiB\ntoo much"),
    ],
)
def test_a_figure_is_written_in_its_unit(unit, value, text):
    assert format_figure(unit, Figure(value)) == text
    words = text.split(", ", 1)
    marked = f"{words[0]}, ~{words[1]}" if unit == "fits" else f"~{text}"
    assert format_figure(unit, Figure(value, FORMULA)) == marked
    assert format_figure(unit, Figure(value, GIVEN)) == text


@pytest.mark.parametrize("figure", [None, Figure(None), Figure(math.nan), Figure(math.inf)])
def test_what_is_not_known_is_a_dash(figure):
    assert {format_figure(unit, figure) for unit in [*FORMATS, "fits"]} == {"-"}


def test_a_trillion_parameters_fit_at_stage_3_alone():
    assert [stage.fits for stage in trillion_plan().stages] == [False, False, False, True]


def test_a_figure_that_does_not_exist_is_refused_with_those_that_do():
    with pytest.raises(ValueError, match=r"no figure 'peak'; use one of params_bytes, .*hours\."):
        stage_plan(peak=1.0)


def test_a_source_that_does_not_exist_is_refused_with_those_that_do():
    mend = r"has source 'guess'; use one of compiled, formula, given\."
    with pytest.raises(ValueError, match=f"peak_bytes {mend}"):
        StagePlan(1, {"peak_bytes": Figure(1.0, "guess")})
    with pytest.raises(ValueError, match=f"all_gather over data {mend}"):
        Sent("all_gather", "bf16", "data", 1, 1.0, source="guess")


def test_a_stage_that_does_not_exist_and_a_plan_of_none_are_refused():
    with pytest.raises(ValueError, match=r"stage 4 is not one of ZeRO's; use 0, 1, 2 or 3\."):
        stage_plan(4)
    with pytest.raises(ValueError, match=r"stages \(\) is empty; plan at least one"):
        plan_of()
