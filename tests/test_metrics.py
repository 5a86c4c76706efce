"""Claims about metrics.jsonl, the optional writers and the loss curve."""

import json
import math
import sys
import types

import jax.numpy as jnp
import numpy as np
import pytest

from jzero import metrics
from jzero.metrics import MetricsWriter, plot_loss, read_metrics


def write_curve(out_dir, num_steps=50):
    with MetricsWriter(out_dir) as writer:
        for step in range(num_steps):
            writer.write(step, loss=math.log(2) * (2 + math.exp(-step / 10)))
        writer.write(num_steps, val_loss=math.log(2) * 2.25)
    return out_dir / "metrics.jsonl"


def test_rows_come_back_as_they_were_written_nan_and_inf_included(tmp_path):
    with MetricsWriter(tmp_path / "made" / "on_the_way") as writer:
        writer.write(1, loss=2.5, tokens=7)
        writer.write(2, loss=math.nan, grad_norm=math.inf, delta=-math.inf)
    first, second = read_metrics(writer.path)
    assert first == {"step": 1, "loss": 2.5, "tokens": 7}
    assert math.isnan(second.pop("loss"))
    assert second == {"step": 2, "grad_norm": math.inf, "delta": -math.inf}


def test_the_file_stays_strict_json_with_non_finite_numbers(tmp_path):
    with MetricsWriter(tmp_path) as writer:
        writer.write(3, loss=np.float32("nan"), grad_norm=jnp.inf, delta=-math.inf)
    text = writer.path.read_text()
    assert text == '{"step": 3, "loss": "nan", "grad_norm": "inf", "delta": "-inf"}\n'

    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    json.loads(text, parse_constant=refuse)


def test_each_line_is_on_disk_before_the_writer_is_closed(tmp_path):
    writer = MetricsWriter(tmp_path)
    writer.write(1, loss=0.5)
    assert read_metrics(writer.path) == [{"step": 1, "loss": 0.5}]
    writer.close()
    writer.close()


def test_numbers_of_numpy_and_jax_are_written_as_numbers(tmp_path):
    with MetricsWriter(tmp_path) as writer:
        writer.write(np.int64(1), a=jnp.float32(0.5), b=np.ones(1), c=jnp.int32(3), d=True)
    assert read_metrics(writer.path) == [{"step": 1, "a": 0.5, "b": 1.0, "c": 3, "d": True}]


@pytest.mark.parametrize(
    ("value", "found"), [(np.ones(3), r"shape \(3,\)"), ("high", "str"), (None, "NoneType")]
)
def test_a_value_that_is_not_one_number_is_refused_by_name_before_it_is_written(
    tmp_path, value, found
):
    writer = MetricsWriter(tmp_path)
    with writer, pytest.raises(ValueError, match=f"'loss' is not one number but {found}.*mean"):
        writer.write(1, lr=0.1, loss=value)
    assert writer.path.read_text() == ""


def test_a_resumed_run_appends_and_drops_the_line_a_killed_run_left_unfinished(tmp_path):
    path = write_curve(tmp_path, num_steps=2)
    with path.open("a") as file:
        file.write('{"step": 3, "lo')
    assert [row["step"] for row in read_metrics(path)] == [0, 1, 2]
    with MetricsWriter(tmp_path) as writer:
        writer.write(3, loss=1.0)
    assert [row["step"] for row in read_metrics(path)] == [0, 1, 2, 3]


def test_a_file_of_one_unfinished_line_starts_anew(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step"')
    with MetricsWriter(tmp_path) as writer:
        writer.write(1)
    assert read_metrics(writer.path) == [{"step": 1}]


@pytest.mark.parametrize("line", ["loss 1.0", "[1, 2]", '"step"', '{"loss": 1.0}'])
def test_a_foreign_line_is_named_with_its_file_and_number(tmp_path, line):
    path = tmp_path / "m.jsonl"
    path.write_text('{"step": 1}\n' + line + "\n")
    with pytest.raises(ValueError, match=r"m\.jsonl:2 is .*; remove that line"):
        read_metrics(path)


@pytest.mark.parametrize(
    ("module", "asked", "extra"),
    [
        ("tensorboardX", {"tensorboard": True}, r"pip install 'jzero\[tensorboard\]'"),
        ("wandb", {"wandb": {"project": "p"}}, r"pip install 'jzero\[wandb\]'"),
    ],
)
def test_a_missing_extra_is_named_and_nothing_is_created(
    tmp_path, monkeypatch, module, asked, extra
):
    monkeypatch.setitem(sys.modules, module, None)
    MetricsWriter(tmp_path / "without").close()
    with pytest.raises(ImportError, match=f"{module} cannot be imported .*{extra}"):
        MetricsWriter(tmp_path / "with", **asked)
    assert not (tmp_path / "with").exists()


def test_a_missing_matplotlib_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"matplotlib cannot .*pip install 'jzero\[plot\]'"):
        plot_loss(write_curve(tmp_path), tmp_path / "loss.png")


class Recorder:
    """Stands for a wandb run and for a tensorboardX writer."""

    def __init__(self):
        self.calls = []

    def __getattr__(self, name):
        return lambda *args, **kwargs: self.calls.append((name, args, kwargs))


def test_wandb_gets_its_arguments_each_row_and_an_end(tmp_path, monkeypatch):
    run, started = Recorder(), {}
    fake = types.ModuleType("wandb")
    monkeypatch.setattr(fake, "init", lambda **kwargs: started.update(kwargs) or run, raising=False)
    monkeypatch.setitem(sys.modules, "wandb", fake)
    with MetricsWriter(tmp_path, wandb={"project": "gpt2"}) as writer:
        writer.write(4, loss=jnp.float32(0.5))
    writer.close()
    assert started == {"dir": str(tmp_path), "project": "gpt2"}
    assert run.calls == [("log", ({"loss": 0.5},), {"step": 4}), ("finish", (), {})]


def test_tensorboard_gets_each_scalar_with_its_step_and_an_end(tmp_path, monkeypatch):
    events, places = Recorder(), []
    fake = types.ModuleType("tensorboardX")

    def create(place):
        places.append(place)
        return events

    monkeypatch.setattr(fake, "SummaryWriter", create, raising=False)
    monkeypatch.setitem(sys.modules, "tensorboardX", fake)
    with MetricsWriter(tmp_path, tensorboard=True) as writer:
        writer.write(4, loss=0.5, lr=0.1)
    assert places == [str(tmp_path / "tensorboard")]
    assert events.calls == [
        ("add_scalar", ("loss", 0.5, 4), {}),
        ("add_scalar", ("lr", 0.1, 4), {}),
        ("close", (), {}),
    ]


def test_real_tensorboard_events_are_written_where_it_is_installed(tmp_path):
    pytest.importorskip("tensorboardX")
    with MetricsWriter(tmp_path, tensorboard=True) as writer:
        writer.write(1, loss=0.5)
    (events,) = (tmp_path / "tensorboard").iterdir()
    assert b"loss" in events.read_bytes()


def test_the_curve_is_a_png_with_more_than_an_empty_frame(tmp_path):
    image = pytest.importorskip("matplotlib.image")
    path = write_curve(tmp_path)
    plot_loss(path, tmp_path / "loss.png", baseline=3.5, baseline_label="bigram")
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG\r\n")
    pixels = image.imread(tmp_path / "loss.png")[..., :3]
    assert pixels.shape == (720, 1200, 3)
    for color in (metrics.TRAIN_COLOR, metrics.VALIDATION_COLOR, metrics.BASELINE_COLOR):
        rgb = np.array([int(color[i : i + 2], 16) for i in (1, 3, 5)]) / 255
        assert (np.abs(pixels - rgb.reshape(1, 1, 3)).max(-1) < 0.01).sum() > 50, color


def drawn_axes(monkeypatch, path, png, **kwargs):
    kept = []
    decorate = metrics._decorate
    monkeypatch.setattr(metrics, "_decorate", lambda axes: kept.append(axes) or decorate(axes))
    plot_loss(path, png, **kwargs)
    return kept[0]


def test_the_curve_is_in_bits_with_units_legend_and_baseline(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    path, png = write_curve(tmp_path), tmp_path / "loss.png"
    axes = drawn_axes(monkeypatch, path, png, baseline=3.5, baseline_label="bigram")
    train, validation, baseline = axes.lines
    assert train.get_ydata()[0] == pytest.approx(3.0)
    assert list(validation.get_xdata()) == [50] and validation.get_ydata()[0] == 2.25
    assert list(baseline.get_ydata()) == [3.5, 3.5] and baseline.get_linestyle() == "--"
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("optimizer step", "loss (bits per token)")
    labels = [text.get_text() for text in axes.get_legend().get_texts()]
    assert labels == ["training", "validation (last 2.250)", "bigram (3.500)"]


def test_the_curve_leaves_out_non_finite_losses_and_keeps_the_last_of_a_repeated_step(
    tmp_path, monkeypatch
):
    pytest.importorskip("matplotlib")
    with MetricsWriter(tmp_path) as writer:
        for step, loss in [(1, 4.0), (3, 3.0), (2, math.nan), (2, 2.0), (4, math.inf)]:
            writer.write(step, loss=loss * math.log(2))
    axes = drawn_axes(monkeypatch, writer.path, tmp_path / "loss.png")
    (train,) = axes.lines
    assert list(train.get_xdata()) == [1, 2, 3] and list(train.get_ydata()) == [4.0, 2.0, 3.0]


def test_a_file_without_a_finite_loss_is_refused(tmp_path):
    with MetricsWriter(tmp_path) as writer:
        writer.write(1, loss=math.nan, lr=0.1)
    with pytest.raises(ValueError, match=r"no finite 'loss' or 'val_loss'; write them with"):
        plot_loss(writer.path, tmp_path / "loss.png")
