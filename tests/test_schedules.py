"""Schedules: DeepSpeed's five to the letter, ours, and what a run makes of [schedule]."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jzero.config import parse_config
from jzero.mesh import make_mesh
from jzero.rates import make_momentum, make_optimizer, make_schedule
from jzero.recipe import Setup, check_rows, make_setup, resolve_batch
from jzero.schedules import (
    DEEPSPEED,
    constant,
    cosine,
    linear,
    lr_range_test,
    one_cycle,
    one_cycle_momentum,
    warmup_cosine_lr,
    warmup_decay_lr,
    warmup_lr,
)

CASES = json.loads((Path(__file__).parent / "data" / "lr_schedules.json").read_text())["cases"]
RTOL = 1e-7  # of DeepSpeed's own values, in float64
FLOAT32 = 1e-5  # a handful of roundings, and 1 + cos near the end of a cosine

OURS = [
    lambda: cosine(0.3, 20, warmup_steps=4, min_ratio=0.1),
    lambda: linear(0.3, 20, warmup_steps=4, min_ratio=0.1),
    lambda: constant(0.3, 20, warmup_steps=4),
]
THEIRS = [
    lambda: warmup_lr(warmup_num_steps=7),
    lambda: warmup_decay_lr(20, warmup_num_steps=7, warmup_type="linear"),
    lambda: warmup_cosine_lr(0.3, 20, warmup_num_steps=7, warmup_min_ratio=0.2),
    lambda: one_cycle(
        0.1, 1.0, cycle_first_step_size=5, cycle_second_step_size=7, cycle_second_stair_count=3,
        decay_lr_rate=0.5, decay_step_size=4,
    ),
    lambda: one_cycle_momentum(cycle_first_step_size=5, decay_mom_rate=0.01, decay_step_size=4),
    lambda: lr_range_test(lr_range_test_step_size=7),
    lambda: lr_range_test(lr_range_test_step_size=7, lr_range_test_staircase=True),
]  # fmt: skip


def table(schedule: optax.Schedule, counts: Any) -> list[float]:
    return [float(schedule(count)) for count in counts]


@pytest.mark.parametrize("name", CASES)
def test_values_are_deepspeeds(name):
    spec, expected = CASES[name]["spec"], CASES[name]["lr"]
    make, arguments = DEEPSPEED[spec["type"]], dict(spec["params"])
    if make is warmup_cosine_lr:
        arguments["learning_rate"] = spec["optimizer_lr"]
    with jax.enable_x64(True):
        schedule = make(**arguments)
        found = [schedule(int(count)) for count in expected]
    assert {x.dtype for x in found} == {np.dtype(np.float64)}
    np.testing.assert_allclose(np.asarray(found), list(expected.values()), rtol=RTOL, atol=0)


def test_the_cases_have_all_five_schedules():
    assert {case["spec"]["type"] for case in CASES.values()} == set(DEEPSPEED)


def test_a_warmup_of_one_step_is_one_of_two_as_deepspeed_has_it():
    counts = range(6)
    for kind in ("log", "linear"):
        rates = [warmup_lr(warmup_num_steps=n, warmup_type=kind) for n in (1, 2)]
        assert table(rates[0], counts) == table(rates[1], counts)
        assert 0 < float(rates[0](2)) <= float(rates[0](3)) == pytest.approx(0.001)


@pytest.mark.parametrize("make", OURS + THEIRS)
def test_every_kind_of_count_gives_the_same_rate_in_the_float_of_the_mode(make):
    for x64 in (False, True):
        with jax.enable_x64(x64):
            schedule = make()
            compiled = jax.jit(schedule)
            for count in (0, 1, 4, 7, 12, 13, 19, 40):
                rates = [schedule(count), schedule(np.int64(count)), schedule(jnp.int32(count)),
                         compiled(jnp.int32(count))]  # fmt: skip
                assert {rate.dtype for rate in rates} == {np.dtype("float64" if x64 else "float32")}
                np.testing.assert_allclose(rates, rates[0], rtol=1e-12 if x64 else FLOAT32)
            assert compiled._cache_size() == 1


MOMENTA = [  # max 0.9 at the ends, min 0.8 in the middle; update 0 has DeepSpeed's initial one
    ({}, {0: 0.8, 1: 0.88, 2: 0.86, 5: 0.8, 6: 0.82, 9: 0.88, 10: 0.9, 11: 0.9, 99: 0.9}),
    ({"decay_mom_rate": 0.1, "decay_step_size": 10}, {10: 0.9, 11: 0.909, 12: 0.918, 15: 0.945}),
    ({"cycle_second_step_size": 10}, {5: 0.8, 6: 0.81, 10: 0.85, 15: 0.9, 16: 0.9}),
    ({"cycle_first_stair_count": 2}, {1: 0.9, 2: 0.9, 3: 0.85, 4: 0.85, 5: 0.8, 6: 0.85, 8: 0.9}),
]


@pytest.mark.parametrize(("arguments", "expected"), MOMENTA, ids=[str(row[0]) for row in MOMENTA])
def test_the_momentum_of_one_cycle_is_that_of_a_table_by_hand(arguments, expected):
    with jax.enable_x64(True):
        schedule = one_cycle_momentum(cycle_first_step_size=5, **arguments)
        found = table(schedule, expected)
    np.testing.assert_allclose(found, list(expected.values()), rtol=1e-12)


def test_the_stairs_of_one_cycle_reach_the_peak_and_the_end():
    with jax.enable_x64(True):
        schedule = one_cycle(
            0.0, 1.0, cycle_first_step_size=6, cycle_second_step_size=4,
            cycle_first_stair_count=3, cycle_second_stair_count=2,
        )  # fmt: skip
        found = table(schedule, range(12))
    third = 1 / 3
    expected = [0, 0, third, third, 2 * third, 2 * third, 1, 0.5, 0.5, 0, 0, 0]
    np.testing.assert_allclose(found, expected, rtol=1e-12)


def test_an_optimizer_follows_rate_and_momentum_through_inject_hyperparams():
    arguments = {"cycle_first_step_size": 3, "cycle_second_step_size": 2}
    rate, momentum = one_cycle(0.01, 0.1, **arguments), one_cycle_momentum(**arguments)
    tx = optax.inject_hyperparams(optax.adam)(learning_rate=rate, b1=momentum)
    params = {"w": jnp.arange(3.0)}
    state, step = tx.init(params), jax.jit(tx.update)
    mu, nu = np.zeros(3), np.zeros(3)
    for count in range(7):
        grads = np.array([1.0, -2.0, 0.5]) * (count + 1)
        updates, state = jax.block_until_ready(step({"w": jnp.asarray(grads)}, state, params))
        b1, b2 = float(momentum(count)), 0.999
        assert float(state.hyperparams["b1"]) == pytest.approx(b1)
        assert float(state.hyperparams["learning_rate"]) == pytest.approx(float(rate(count)))
        mu, nu = b1 * mu + (1 - b1) * grads, b2 * nu + (1 - b2) * grads**2
        hats = mu / (1 - b1 ** (count + 1)), nu / (1 - b2 ** (count + 1))
        expected = -float(rate(count)) * hats[0] / (np.sqrt(hats[1]) + 1e-8)
        np.testing.assert_allclose(updates["w"], expected, rtol=1e-4)  # float32 against float64
    assert step._cache_size() == 1


@pytest.mark.parametrize(("make", "last"), [(cosine, 0.1), (linear, 0.1), (constant, 1.0)])
def test_a_schedule_of_ours_rises_evenly_to_its_peak_and_ends_at_its_ratio(make, last):
    ratio = {} if make is constant else {"min_ratio": 0.1}
    rates = table(make(1.0, 20, warmup_steps=4, **ratio), range(22))
    np.testing.assert_allclose(rates[:5], [0.25, 0.5, 0.75, 1.0, 1.0], rtol=FLOAT32)
    assert rates[20] == rates[21] == pytest.approx(last, rel=FLOAT32)
    assert sorted(rates[4:], reverse=True) == rates[4:]
    assert (rates[12] == 1.0) == (make is constant)


@pytest.mark.parametrize("warmup", [0, 1, 20])
def test_a_schedule_of_ours_has_a_rate_from_the_first_step_to_the_last(warmup):
    for make in (cosine, linear, constant):
        assert min(table(make(1.0, 20, warmup_steps=warmup), range(20))) > 0


def test_our_decays_are_optaxs():
    counts = range(25)
    found = [table(cosine(0.3, 20, min_ratio=0.1), counts), table(linear(0.3, 20), counts)]
    expected = [table(optax.cosine_decay_schedule(0.3, 20, 0.1), counts),
                table(optax.linear_schedule(0.3, 0.0, 20), counts)]  # fmt: skip
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-8)


REFUSED = [
    (warmup_lr, {"warmup_num_steps": None}, "warmup_num_steps is None; use an integer of 1 or"),
    (warmup_lr, {"warmup_num_steps": 0}, "warmup_num_steps is 0; use an integer of 1 or more"),
    (warmup_lr, {"warmup_num_steps": -5}, "warmup_num_steps is -5; use an integer of 1 or more"),
    (warmup_lr, {"warmup_num_steps": 2.5}, "warmup_num_steps is 2.5; use an integer of 1 or"),
    (warmup_lr, {"warmup_num_steps": True}, "warmup_num_steps is True; use an integer"),
    (warmup_lr, {"warmup_type": "exp"}, "warmup_type is 'exp'; use 'log' or 'linear'."),
    (warmup_lr, {"warmup_min_lr": 0.1}, "warmup_min_lr 0.1 is above warmup_max_lr 0.001; use 0.00"),
    (warmup_lr, {"warmup_min_lr": -0.1}, "warmup_min_lr is -0.1; use 0 or more."),
    (warmup_decay_lr, {"total_num_steps": 0}, "total_num_steps is 0; use an integer of 1 or more"),
    (warmup_decay_lr, {"total_num_steps": 9, "warmup_num_steps": None}, "warmup_num_steps is None"),
    (warmup_decay_lr, {"total_num_steps": 9}, "warmup_num_steps 1000 is longer than total_num_steps"
     " 9; use 1 to 9, or more"),
    (warmup_cosine_lr, {"learning_rate": 0.0, "total_num_steps": 9}, "learning_rate is 0.0; use a"),
    (warmup_cosine_lr, {"learning_rate": 1, "total_num_steps": 9}, "warmup_num_steps 1000 is"),
    (warmup_cosine_lr, {"learning_rate": 1, "total_num_steps": 9, "warmup_num_steps": 0},
     "warmup_num_steps is 0"),
    (warmup_cosine_lr, {"learning_rate": 1, "total_num_steps": 2000, "cos_min_ratio": 2},
     "cos_min_ratio is 2; use a share from 0 to 1."),
    (warmup_cosine_lr, {"learning_rate": 1, "total_num_steps": 2000, "warmup_min_ratio": -1},
     "warmup_min_ratio is -1; use a share from 0 to 1."),
    (one_cycle, {"cycle_min_lr": 2, "cycle_max_lr": 1}, "cycle_min_lr 2 is above cycle_max_lr 1;"),
    (one_cycle, {"cycle_min_lr": 0, "cycle_max_lr": 1, "cycle_first_step_size": 0},
     "cycle_first_step_size is 0; use an integer of 1"),
    (one_cycle, {"cycle_min_lr": 0, "cycle_max_lr": 1, "cycle_second_step_size": -1},
     "cycle_second_step_size is -1; use an integer of 1"),
    (one_cycle, {"cycle_min_lr": 0, "cycle_max_lr": 1, "cycle_first_stair_count": -1},
     "cycle_first_stair_count is -1; use an integer of 0"),
    (one_cycle, {"cycle_min_lr": 0, "cycle_max_lr": 1, "decay_step_size": -1},
     "decay_step_size is -1; use an integer of 0"),
    (one_cycle, {"cycle_min_lr": 0, "cycle_max_lr": 1, "decay_lr_rate": 0.1},
     "decay_lr_rate 0.1 has no effect with decay_step_size 0; set decay_step_size"),
    (one_cycle_momentum, {"cycle_max_mom": 1.0}, "cycle_max_mom is 1.0; use a number below 1."),
    (one_cycle_momentum, {"cycle_min_mom": 0.95}, "cycle_min_mom 0.95 is above cycle_max_mom 0.9;"),
    (one_cycle_momentum, {"decay_mom_rate": -1.0}, "decay_mom_rate is -1.0; use 0 or more."),
    (lr_range_test, {"lr_range_test_step_size": 0}, "lr_range_test_step_size is 0; use an integer"),
    (lr_range_test, {"lr_range_test_min_lr": 0}, "lr_range_test_min_lr is 0; use a number above"),
    (lr_range_test, {"lr_range_test_step_rate": -1}, "lr_range_test_step_rate is -1; use 0 or mo"),
    (cosine, {"learning_rate": 1, "num_steps": 9, "warmup_steps": 10},
     "warmup_steps 10 is longer than num_steps 9; use 0 to 9, or more num_steps."),
    (linear, {"learning_rate": 1, "num_steps": 9, "min_ratio": 1.5}, "min_ratio is 1.5; use a sh"),
    (constant, {"learning_rate": 1, "num_steps": 0}, "num_steps is 0; use an integer of 1"),
    (constant, {"learning_rate": 1, "num_steps": 9, "warmup_steps": -1}, "warmup_steps is -1; use"),
]  # fmt: skip


@pytest.mark.parametrize(("make", "arguments", "message"), REFUSED)
def test_arguments_that_make_no_sense_are_refused_with_value_and_mend(make, arguments, message):
    with pytest.raises(ValueError, match="^" + message.replace(".", r"\.")):
        make(**arguments)


# [schedule], then [optimizer]; num_steps is 100.
ONE_CYCLE = {"name": "OneCycle", "cycle_min_lr": 0.1, "cycle_max_lr": 1, "cycle_first_step_size": 9}
WRONG_TOGETHER = [
    ({"name": "WarmupLR", "warmup_num_steps": 9}, {"learning_rate": 0.1},
     r"\[optimizer\] learning_rate is 0.1; the schedule WarmupLR has its own rates: leave it out"),
    ({"name": "constant_schedule", "value": 1}, {"learning_rate": 0.1}, "has its own rates"),
    ({"warmup_steps": 101}, {}, r"warmup_steps 101 is longer than the run: \[train\] num_steps is "
     "100; use 100 or less, or more num_steps"),
    ({"name": "WarmupLR"}, {}, r"warmup_num_steps 1000 is longer than the run: .* is 100"),
    (ONE_CYCLE | {"cycle_first_step_size": 200}, {}, "cycle_first_step_size 200 is longer"),
    ({"name": "WarmupDecayLR", "total_num_steps": 9, "warmup_num_steps": 10}, {},
     r"\[schedule\] WarmupDecayLR: warmup_num_steps 10 is longer than total_num_steps 9"),
    ({"name": "WarmupDecayLR", "total_num_steps": -9, "warmup_num_steps": 10}, {},
     r"\[schedule\] WarmupDecayLR: total_num_steps is -9; use an integer of 1"),
    ({"name": "cosine_decay_schedule", "init_value": 1, "decay_steps": 0}, {},
     r"\[schedule\] decay_steps is 0; use 1 or more"),
    ({"name": "linear_schedule", "init_value": 1, "end_value": 0, "transition_steps": -1}, {},
     r"\[schedule\] transition_steps is -1; use 1 or more"),
    ({"name": "warmup_cosine_decay_schedule", "init_value": 0, "peak_value": 1,
      "warmup_steps": 9, "decay_steps": 8}, {}, r"\[schedule\] warmup_cosine_decay_schedule: "),
    ({"name": "constant_schedule", "value": -1}, {}, r"\[schedule\] value is -1.0; use 0 or more"),
    ({"name": "exponential_decay", "init_value": 1, "transition_steps": 9, "decay_rate": 0}, {},
     r"\[schedule\] decay_rate is 0.0; use a number above 0"),
    ({"name": "warmup_constant_schedule", "init_value": 0, "peak_value": 1, "warmup_steps": 0}, {},
     r"\[schedule\] warmup_steps is 0; use 1 or more"),
    ({"name": "sgdr_schedule", "cosine_kwargs": []}, {}, r"\[schedule\] cosine_kwargs is empty; "),
    ({"name": "sgdr_schedule", "cosine_kwargs": [{"init": 1}]}, {}, "unexpected .* 'init'"),
    ({"min_ratio": 2}, {}, r"\[schedule\] cosine: min_ratio is 2.0; use a share from 0 to 1"),
    ({"name": "cosine"}, {"name": "polyak_sgd"}, r"\[schedule\] name is 'cosine'; polyak_sgd takes "
     "no learning rate: use 'none', or leave it out"),
    ({}, {"name": "polyak_sgd", "learning_rate": 0.1}, r"\[optimizer\] learning_rate is 0.1; "
     "polyak_sgd takes none: leave it out"),
    ({"name": "none"}, {}, r"\[schedule\] name is 'none'; adamw takes a learning rate: use anoth"),
    ({"name": "cosine"}, {"name": "rprop"}, r"\[schedule\] cosine: rprop takes a number as learn"),
    ({"warmup_steps": 3}, {"name": "rprop"}, "constant with warmup_steps 3: rprop takes a number"),
]  # fmt: skip


def config_of(schedule: dict, optimizer: dict, **train: Any) -> Any:
    tables = {"schedule": schedule, "optimizer": optimizer, "train": {"num_steps": 100} | train}
    return parse_config(tables)


@pytest.mark.parametrize(("schedule", "optimizer", "message"), WRONG_TOGETHER)
def test_a_schedule_that_does_not_go_with_the_rest_is_refused(schedule, optimizer, message):
    config = config_of(schedule, optimizer)
    with pytest.raises(ValueError, match=message):
        make_setup(config)


def test_what_the_run_knows_is_filled_in():
    found = make_schedule(config_of({}, {"learning_rate": 0.5}))
    assert table(found, (0, 50, 100)) == table(cosine(0.5, 100), (0, 50, 100))
    own = {"name": "WarmupCosineLR", "warmup_num_steps": 10}
    found = make_schedule(config_of(own, {"learning_rate": 0.5}))
    expected = warmup_cosine_lr(0.5, 100, warmup_num_steps=10)
    assert table(found, (0, 5, 60, 100)) == table(expected, (0, 5, 60, 100))
    own = {"name": "WarmupDecayLR", "warmup_num_steps": 10, "total_num_steps": 200}
    expected = warmup_decay_lr(200, warmup_num_steps=10)
    assert float(make_schedule(config_of(own, {}))(99)) == float(expected(99))


@pytest.mark.parametrize(
    ("optimizer", "rate"), [("adamw", 1e-3), ("prodigy", 1.0), ("momo_adam", 0.01), ("sm3", 1e-3)]
)
def test_a_learning_rate_left_out_is_the_optimizers_own_or_one_thousandth(optimizer, rate):
    assert float(make_schedule(config_of({}, {"name": optimizer}))(0)) == pytest.approx(rate)


def test_an_optimizer_that_takes_a_number_is_given_the_one_of_the_configuration():
    config = config_of({}, {"name": "rprop", "learning_rate": 0.25})
    tx = make_optimizer(config.optimizer, make_schedule(config))
    np.testing.assert_array_equal(optax.tree.get(tx.init(jnp.ones(2)), "step_sizes"), 0.25)


@pytest.mark.parametrize(
    ("optimizer", "argument"),
    [("adamw", "b1"), ("sgd", "momentum"), ("lion", "b1"), ("rmsprop", "momentum"),
     ("lamb", "b1"), ("adafactor", "momentum"), ("radam", "b1"), ("momo_adam", "b1")],
)  # fmt: skip
def test_one_cycle_moves_the_momentum_of_the_optimizer_with_its_rate(optimizer, argument):
    config = config_of(ONE_CYCLE | {"cycle_max_mom": 0.95}, {"name": optimizer, "clip_norm": 1.0})
    schedule, momentum = make_schedule(config), make_momentum(config)
    assert momentum is not None
    assert momentum[0] == argument
    tx = optax.with_extra_args_support(make_optimizer(config.optimizer, schedule, momentum))
    params = {"fc": {"weight": jnp.ones((3, 2))}}
    state, step = tx.init(params), jax.jit(tx.update)
    for count in range(3):
        _, state = jax.block_until_ready(step(params, state, params, value=1.0))
        held: Any = optax.tree.get(state, "hyperparams")
        assert held.keys() == {"learning_rate", argument}
        expected = [0.8, 0.95 - 0.15 / 9, 0.95 - 0.3 / 9][count]
        assert float(held[argument]) == pytest.approx(expected)
        assert float(held["learning_rate"]) == pytest.approx(0.1 + 0.1 * count)
    assert step._cache_size() == 1


def test_one_cycle_without_momentum_and_other_schedules_leave_the_optimizer_as_it_is():
    for own in (ONE_CYCLE | {"cycle_momentum": False}, {"warmup_steps": 3}):
        assert make_momentum(config_of(own, {"b1": 0.5})) is None
    assert make_momentum(config_of({}, {"name": "polyak_sgd"})) is None


WRONG_MOMENTUM = [
    ({}, {"name": "sign_sgd"}, r"cycle_momentum is true, but sign_sgd has no b1 or momentum; set "
     "cycle_momentum = false"),
    ({"cycle_momentum": False, "cycle_min_mom": 0.8}, {}, r"\[schedule\] cycle_min_mom is 0.8; has "
     "no effect with cycle_momentum = false"),
    ({}, {"b1": 0.5}, r"\[optimizer\] b1 is 0.5; the schedule sets b1 at each step: leave it out"),
    ({}, {"name": "sgd", "momentum": 0.9}, r"\[optimizer\] momentum is 0.9; the schedule sets mo"),
    ({"cycle_max_mom": 1}, {}, r"\[schedule\] OneCycle: cycle_max_mom is 1.0; use a number below"),
    ({"decay_mom_rate": 0.1, "decay_step_size": 10}, {}, r"decay_mom_rate is 0.1; b1 would grow to "
     "1.64 at the last step: lower it"),
]  # fmt: skip


@pytest.mark.parametrize(("own", "optimizer", "message"), WRONG_MOMENTUM)
def test_a_momentum_that_cannot_follow_is_refused(own, optimizer, message):
    config = config_of(ONE_CYCLE | own, optimizer)
    with pytest.raises(ValueError, match=message):
        make_setup(config)


def test_a_decay_mask_of_another_name_spares_norms_too():
    params = {"ln": {"weight": jnp.ones((2, 3))}, "fc": {"weight": jnp.ones((2, 3))}}
    for name in ("adamw", "lars", "muon", "galore"):
        config = config_of({}, {"name": name, "weight_decay": 0.1, "learning_rate": 0.1})
        tx = make_optimizer(config.optimizer, make_schedule(config))
        zeros = jax.tree.map(jnp.zeros_like, params)
        updates: Any = tx.update(zeros, tx.init(params), params)[0]
        assert not np.any(updates["ln"]["weight"]), name
        assert np.all(updates["fc"]["weight"]), name


BATCHES = [  # train_batch_size, micro_batch, num_microbatches on 8 data shards; what it comes to
    ((None, None, None), (64, 8, 1)),
    ((None, 4, None), (32, 4, 1)),
    ((None, None, 3), (192, 8, 3)),
    ((None, 4, 3), (96, 4, 3)),
    ((96, None, None), (96, 12, 1)),
    ((96, 4, None), (96, 4, 3)),
    ((96, None, 3), (96, 4, 3)),
    ((96, 4, 3), (96, 4, 3)),
]


def resolved(given: tuple, shards: int) -> Any:
    names = ("train_batch_size", "micro_batch", "num_microbatches")
    return resolve_batch(shards, **dict(zip(names, given, strict=True)))


@pytest.mark.parametrize(("given", "expected"), BATCHES)
def test_any_two_numbers_of_a_batch_give_the_third(given, expected):
    assert tuple(resolved(given, 8)) == expected


WRONG_BATCHES = [
    ((100, None, None), "train_batch_size 100 is no multiple of 8 data shards; use 96 or 104."),
    ((5, None, None), "train_batch_size 5 is no multiple of 8 data shards; use 8."),
    ((100, 4, None), "100 is no multiple of micro_batch 4 x 8 data shards; use 96 or 128."),
    ((100, None, 3), "100 is no multiple of num_microbatches 3 x 8 data shards; use 96 or 120."),
    ((100, 4, 3), "train_batch_size 100 is not micro_batch 4 x num_microbatches 3 x 8 data shards "
     "= 96; use 96, or leave one of them out."),
]  # fmt: skip


@pytest.mark.parametrize(("given", "message"), WRONG_BATCHES)
def test_numbers_of_a_batch_that_do_not_multiply_are_refused_with_the_nearest(given, message):
    with pytest.raises(ValueError, match=message.replace(".", r"\.")):
        resolved(given, 8)


TINY = {
    "model": {"vocab_size": 16, "num_positions": 8, "num_layers": 1, "num_heads": 1,
              "embed_dim": 4},
    "mesh": {"replica": 2},
}  # fmt: skip


def test_a_setup_has_the_numbers_that_its_mesh_and_configuration_give():
    train = {"train_batch_size": 48, "num_microbatches": 3}
    setup = make_setup(parse_config(TINY | {"train": train}))
    assert setup.batch == (48, 2, 3)
    assert setup.rows == 16
    with pytest.raises(ValueError, match="50 is no multiple of num_microbatches 3 x 8 data shards"):
        make_setup(parse_config(TINY | {"train": train | {"train_batch_size": 50}}))


def test_replica_and_data_axes_count_in_a_batch_and_a_model_axis_does_not():
    config: Any = parse_config({"train": {"micro_batch": 5}})
    zero: Any = SimpleNamespace(mesh=make_mesh(replica=2, data=2, model=2), axes=("data",))
    nothing: Any = None
    tx, schedule = optax.identity(), optax.constant_schedule(1.0)
    setup = Setup(config, zero, nothing, nothing, tx, tx, schedule, nothing)
    assert setup.batch == (20, 5, 1)


def test_a_batch_larger_than_the_data_is_refused():
    check_rows(19, num_tokens=200, seq_len=10)
    with pytest.raises(ValueError, match="takes 20 rows of 10 tokens, and the data has 19; use"):
        check_rows(20, num_tokens=200, seq_len=10)


def test_stairs_do_not_overflow_on_long_cycles():
    schedule = one_cycle(0.1, 1.0, cycle_first_step_size=500_000, cycle_first_stair_count=5_000)
    assert float(jax.jit(schedule)(jnp.int32(450_000))) == pytest.approx(0.91, rel=1e-6)
    assert float(jax.jit(schedule)(jnp.int32(500_000))) == pytest.approx(1.0, rel=1e-6)


def test_a_schedule_that_is_over_before_the_run_is_refused():
    schedule = {"name": "WarmupDecayLR", "warmup_num_steps": 2, "total_num_steps": 5}
    with pytest.raises(ValueError, match="the learning rate of the last step, 100, is 0; let the"):
        make_schedule(config_of(schedule, {}))


def test_numbers_that_are_not_finite_are_refused():
    with pytest.raises(ValueError, match="learning_rate is inf; give a finite number"):
        config_of({}, {"learning_rate": float("inf")})
    with pytest.raises(ValueError, match="warmup_max_lr is inf"):
        warmup_lr(warmup_max_lr=float("inf"))
    with pytest.raises(ValueError, match="learning_rate is None"):
        cosine(None, 10)  # type: ignore
    with pytest.raises(ValueError, match="micro_batch is 0; use 1 or more"):
        resolve_batch(8, micro_batch=0)
    assert float(cosine(1.0, np.int64(10))(0)) == 1.0  # type: ignore
