"""The picture shows each class of bytes against the capacity, what is sent, and what is wrong."""

import dataclasses
import sys

import numpy as np
import pytest

from jzero import plan_plot
from jzero.plan_figures import Figure, Plan, Sent, StagePlan
from jzero.plan_plot import check_plot_path, memory_classes, plot
from tests.plans import GIB, gpt2_plan, trillion_plan, with_failure

CLASSES = ["parameters", "fp32 master", "other optimizer state", "gradients", "logits"]


@pytest.fixture
def draw(monkeypatch, tmp_path):
    """Draws a plan, and returns the two panels."""
    pytest.importorskip("matplotlib")

    def panels(plan):
        kept = []
        decorate = plan_plot._decorate
        keep = lambda axes, *args: kept.append(axes) or decorate(axes, *args)
        monkeypatch.setattr(plan_plot, "_decorate", keep)
        plot(plan, tmp_path / "plan.svg")
        monkeypatch.undo()
        return kept

    return panels


def labels(axes):
    return axes.get_legend_handles_labels()[1]


def heights(axes):
    """Heights of the bars in GiB, by label."""
    bars = zip(axes.containers, labels(axes), strict=True)
    return {label: [bar.get_height() for bar in container] for container, label in bars}


def in_gib(plan, key):
    return [(stage.value(key) or 0) / GIB for stage in plan.stages]


def texts(axes):
    return [text.get_text() for text in axes.texts]


@pytest.mark.parametrize(
    ("ending", "magic"), [("png", b"\x89PNG"), ("svg", b"<?xml"), ("pdf", b"%PDF")]
)
def test_the_ending_says_the_format(tmp_path, ending, magic):
    pytest.importorskip("matplotlib")
    path = tmp_path / f"plan.{ending.upper()}"
    plot(gpt2_plan(8), path)
    assert path.read_bytes().startswith(magic)


def test_the_png_shows_every_class_in_its_color(tmp_path):
    image = pytest.importorskip("matplotlib.image")
    plot(gpt2_plan(8), tmp_path / "plan.png")
    pixels = image.imread(tmp_path / "plan.png")[..., :3]
    height, width, _ = pixels.shape
    assert (height, width) == pytest.approx((840, 1650), rel=0.05)
    for name in (*CLASSES, "activations and the rest"):
        color = plan_plot.CLASS_COLORS[name]
        rgb = np.array([int(color[i : i + 2], 16) for i in (1, 3, 5)]) / 255
        assert (np.abs(pixels - rgb.reshape(1, 1, 3)).max(-1) < 0.01).sum() > 500, name


def test_a_long_legend_and_a_long_title_are_not_cut_off(tmp_path):
    image = pytest.importorskip("matplotlib.image")
    kinds = ("all_gather", "collective_permute", "reduce_scatter")
    sent = tuple(Sent(kind, "bf16+f32", "replica x data x model", 1, GIB) for kind in kinds)
    stage = StagePlan(2, gpt2_plan().stages[2].figures, sent)
    plot(Plan("G" * 150, (), (stage,)), tmp_path / "plan.png")
    pixels = image.imread(tmp_path / "plan.png")[..., :3]
    edges = (pixels[:, :3], pixels[:, -3:], pixels[:3], pixels[-3:])
    assert all((edge == 1).all() for edge in edges)
    assert pixels.shape[1] > 150 * 20  # pixels; the title is 150 letters of 20 or more


def test_the_bars_of_memory_stack_up_to_the_peak_in_gib(draw):
    plan = gpt2_plan(8)
    memory, _ = draw(plan)
    found = heights(memory)
    assert list(found) == [*CLASSES, "activations and the rest"]
    assert found["parameters"] == in_gib(plan, "params_bytes")
    peaks = in_gib(plan, "peak_bytes")
    assert np.sum(list(found.values()), 0) == pytest.approx(peaks)
    top = memory.containers[-1][0]
    assert top.get_y() + top.get_height() == pytest.approx(peaks[0])
    assert texts(memory)[:4] == ["27.4 GiB", "12.1 GiB", "9.6 GiB", "7.1 GiB"]


def test_a_part_that_is_not_alive_at_the_peak_does_not_raise_the_bar():
    stage = StagePlan(
        1,
        {
            "params_bytes": Figure(2.0),
            "state_bytes": Figure(3.0),
            "peak_bytes": Figure(12.0),
            "grads_bytes": Figure(4.0),
            "logits_bytes": Figure(9.0),
        },
    )
    found = memory_classes(stage)
    assert list(found.values()) == [2.0, 0.0, 3.0, 0.0, 4.0, 3.0, 0.0]


def test_without_a_peak_the_temporaries_are_the_rest_and_without_classes_the_states_are_one():
    found = memory_classes(StagePlan(1, {"rest_bytes": Figure(5.0), "temp_bytes": Figure(2.0)}))
    assert found["model states"] == 5.0 and found["activations and the rest"] == 2.0
    assert sum(found.values()) == 7.0


def test_the_capacity_is_a_dashed_line_in_the_picture(draw):
    memory, wire = draw(gpt2_plan(8, 79.1 * GIB))
    (line,) = [x for x in memory.lines if x.get_linestyle() == "--"]
    assert list(line.get_ydata()) == pytest.approx([79.1, 79.1])
    assert memory.get_ylim()[1] > 79.1
    assert "capacity\n79.1 GiB" in texts(memory)
    assert not wire.lines


def test_a_bar_far_above_the_capacity_is_cut_off_with_its_height_in_words(draw):
    memory, _ = draw(trillion_plan(capacity_bytes=31.7 * GIB))
    assert memory.get_ylim()[1] < 3 * 31.7
    assert "~14901.2 GiB ↑" in texts(memory) and "~14.6 GiB" in texts(memory)


def test_the_wire_is_stacked_by_kind_without_what_is_too_small_to_see(draw):
    plan = gpt2_plan(8)
    _, wire = draw(plan)
    found = heights(wire)
    kinds = ["all_reduce", "reduce_scatter", "all_gather"]
    assert list(found) == [f"{kind} bf16 over data" for kind in kinds]  # not the 8 bytes in f32
    totals = in_gib(plan, "wire_bytes")
    assert np.sum(list(found.values()), 0) == pytest.approx(totals)
    assert texts(wire) == ["5.1 GiB", "5.1 GiB", "5.1 GiB", "7.5 GiB"]


def test_bytes_of_no_named_collective_are_drawn_too(draw):
    _, wire = draw(trillion_plan())
    assert heights(wire) == {"all collectives": in_gib(trillion_plan(), "wire_bytes")}


def test_what_does_not_fit_what_failed_and_the_fastest_are_marked(draw):
    panels = draw(with_failure(gpt2_plan(8, 15.8 * GIB), 1))
    for axes in panels:
        ticks = axes.get_xticklabels()
        words = ["does not fit", "not compiled", "fits", "fits, fastest"]
        assert [x.get_text() for x in ticks] == [f"stage {i}\n{w}" for i, w in enumerate(words)]
        colors = [plan_plot.BAD, plan_plot.QUIET, plan_plot.GOOD, plan_plot.GOOD]
        assert [x.get_color() for x in ticks] == colors
        assert "failed" in texts(axes)
    (above,) = [x for x in panels[0].texts if x.get_text() == "27.4 GiB"]
    assert above.get_color() == plan_plot.BAD


def test_a_plan_of_which_nothing_is_known_is_still_drawn(draw):
    memory, wire = draw(Plan("nothing", (), (StagePlan(2, {}, failure="killed"),)))
    assert not labels(memory) and not labels(wire)
    assert list(memory.get_yticks()) == list(wire.get_yticks()) == []


def test_only_one_stage_that_fits_is_not_called_the_fastest(draw):
    memory, _ = draw(gpt2_plan(stages=(2,)))
    assert [x.get_text() for x in memory.get_xticklabels()] == ["stage 2\nfits"]


@pytest.mark.parametrize("name", ["plan", "plan.jpg", "plan.png.gz"])
def test_another_ending_is_refused_before_anything_is_drawn(tmp_path, name):
    with pytest.raises(ValueError, match=rf"'.*{name}' does not end in .png, .svg or .pdf; use"):
        check_plot_path(tmp_path / name)
    with pytest.raises(ValueError, match=r"does not end in"):
        plot(gpt2_plan(), tmp_path / name)


def test_a_missing_folder_is_refused_before_anything_is_drawn(tmp_path):
    with pytest.raises(ValueError, match=r"is in folder '.*/none', which does not exist; make it"):
        check_plot_path(tmp_path / "none" / "plan.png")


def test_a_path_that_can_be_written_comes_back_as_one(tmp_path):
    pytest.importorskip("matplotlib")
    assert check_plot_path(str(tmp_path / "plan.png")) == tmp_path / "plan.png"


def test_a_missing_matplotlib_is_named_before_anything_is_drawn(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"matplotlib cannot .*pip install 'jzero\[plot\]'"):
        check_plot_path(tmp_path / "plan.png")


def test_the_title_stands_over_both_panels(tmp_path):
    pytest.importorskip("matplotlib")
    plan = dataclasses.replace(gpt2_plan(8), title="GPT2 on 8 x h100-sxm")
    plot(plan, tmp_path / "plan.svg")
    assert "GPT2 on 8 x h100-sxm" in (tmp_path / "plan.svg").read_text()
