"""Plans by formula: bytes by precision and optimizer, the law on the wire, times where known."""

import dataclasses

import pytest

from jzero.config import parse_config
from jzero.formula import ClassBytes
from jzero.gpus import find_gpu
from jzero.plan import Request
from jzero.plan_figures import CAPACITY_NOTE
from jzero.plan_formula import Formula, formula_plan, of_config
from jzero.recipe import make_setup, trace_loss
from jzero.timing import REMAT

EXACT = 1e-12  # rounding of float64 alone
H100 = find_gpu("h100-sxm")
REQUEST = Formula(1.0, H100, 64, capacity_bytes=80e9)
TIMES = {"flops", "compute_s", "comm_s", "exposed_s", "step_s", "tokens_per_s", "mfu", "hours"}
# Eight devices, as here, would have to pad the state of 66 elements.
MODEL = {
    "vocab_size": 255,
    "num_positions": 32,
    "num_layers": 2,
    "num_heads": 2,
    "embed_dim": 66,
}


def config(policy="bfloat16", **sections):
    tables = {
        "model": MODEL,
        "data": {"seq_len": 32},
        "precision": {"policy": policy},
        "schedule": {"warmup_steps": 1},
        "train": {"micro_batch": 2},
    }
    return parse_config({**tables, **sections})


def request(policy="bfloat16", given=REQUEST, **sections):
    return of_config(config(policy, **sections), given)


def value(plan, stage, key):
    found = plan.stages[stage].value(key)
    assert found is not None
    return found


# Bytes


@pytest.mark.parametrize(
    ("precision", "num_microbatches", "each", "master", "reduce"),
    [
        ({"policy": "float32"}, 1, (4, 4, 8), 0, 4),
        ({"policy": "float32"}, 4, (4, 4, 8), 0, 4),
        ({"policy": "bfloat16"}, 1, (2, 2, 12), 4, 2),
        ({"policy": "bfloat16"}, 4, (2, 4, 12), 4, 2),
        ({"policy": "float16"}, 1, (2, 2, 12), 4, 2),
        ({"policy": "bfloat16", "accumulator_dtype": "bfloat16"}, 4, (2, 2, 12), 4, 2),
        ({"policy": "bfloat16", "state_dtype": "bfloat16"}, 1, (2, 2, 8), 4, 2),
        ({"policy": "float32", "state_dtype": "bfloat16"}, 1, (4, 4, 4), 0, 4),
        ({"policy": "bfloat16", "master_dtype": "none"}, 1, (2, 2, 8), 0, 2),
        ({"policy": "bfloat16", "reduce_dtype": "float32"}, 1, (2, 2, 12), 4, 4),
        ({"policy": "bfloat16", "param_dtype": "float32"}, 1, (4, 4, 8), 0, 4),
    ],
)
def test_bytes_are_counted_by_the_precision(precision, num_microbatches, each, master, reduce):
    train = {"micro_batch": 2, "num_microbatches": num_microbatches}
    found = request(precision=precision, train=train)
    assert found.bytes_each == ClassBytes(*each)
    assert (found.master_bytes, found.reduce_bytes) == (master, reduce)
    assert found.dtype == precision["policy"]
    rest = formula_plan(found).stages[1].figures
    assert rest["master_bytes"].value == found.num_params * master / 64
    held = rest["master_bytes"].value + rest["state_bytes"].value
    assert held == pytest.approx(found.num_params * each[2] / 64, rel=EXACT)


@pytest.mark.parametrize(
    ("optimizer", "policy", "state"),
    [
        ({"name": "lion"}, "float32", 4),
        ({"name": "lion"}, "bfloat16", 8),
        ({"name": "sgd"}, "float32", 0),
        ({"name": "sgd"}, "bfloat16", 4),
        ({"name": "sgd", "momentum": 0.9}, "float32", 4),
    ],
)
def test_the_state_is_that_of_the_optimizer(optimizer, policy, state):
    found = request(policy, optimizer=optimizer)
    assert found.bytes_each.optimizer == state
    assert value(formula_plan(found), 0, "rest_bytes") == pytest.approx(
        found.num_params * (found.bytes_each.params + state), rel=EXACT
    )


def test_the_peak_is_what_rests_and_the_gradients():
    plan = formula_plan(request())
    for stage in plan.stages:
        rest, grads = stage.value("rest_bytes"), stage.value("grads_bytes")
        assert stage.value("peak_bytes") == pytest.approx(rest + grads, rel=EXACT)


def test_a_trillion_parameters_fit_at_stage_3_alone():
    plan = formula_plan(Formula(1e12, H100, 1024, capacity_bytes=H100.memory_bytes))
    assert [stage.fits for stage in plan.stages] == [False, False, False, True]
    assert value(plan, 3, "peak_bytes") == 16e12 / 1024
    assert "1.0T parameters on 1024 x h100-sxm, by formula" in plan.title


def test_stages_are_columns_in_the_order_asked_for():
    plan = formula_plan(dataclasses.replace(REQUEST, stages=(3, 1)))
    assert [stage.stage for stage in plan.stages] == [3, 1]


# The wire


@pytest.mark.parametrize(("num_microbatches", "passes"), [(1, (2, 2, 2, 3)), (4, (2, 2, 5, 12))])
@pytest.mark.parametrize("model_parallel", [1, 4])
def test_the_wire_is_the_law(num_microbatches, passes, model_parallel):
    given = Formula(
        1e9,
        H100,
        64,
        model_parallel=model_parallel,
        num_microbatches=num_microbatches,
        capacity_bytes=1,
    )
    num_shards = 64 // model_parallel
    unit = 2 * 1e9 / model_parallel * (num_shards - 1) / num_shards
    found = [stage.value("wire_bytes") for stage in formula_plan(given).stages]
    assert found == pytest.approx([unit * x for x in passes], rel=EXACT)


def test_gradients_travel_in_the_dtype_asked_for_and_parameters_in_their_own():
    plan = formula_plan(request(precision={"policy": "bfloat16", "reduce_dtype": "float32"}))
    sent = {row.kind: row.wire_bytes for row in plan.stages[2].sent}
    assert sent["reduce_scatter"] == pytest.approx(2 * sent["all_gather"], rel=EXACT)


def test_weights_that_are_kept_travel_once_a_step_and_are_whole_in_the_peak():
    zero = {"stage": 3, "keep_gathered": True}
    found = request(zero=zero, train={"micro_batch": 2, "num_microbatches": 4})
    kept, freed = (
        formula_plan(dataclasses.replace(found, keep_gathered=is_kept)) for is_kept in (True, False)
    )
    assert formula_plan(found) == kept
    unit = 2 * found.num_params * 63 / 64
    assert value(kept, 3, "wire_bytes") == pytest.approx(5 * unit, rel=EXACT)
    assert value(freed, 3, "wire_bytes") == pytest.approx(12 * unit, rel=EXACT)
    more = value(kept, 3, "peak_bytes") - value(freed, 3, "peak_bytes")
    assert more == pytest.approx(2 * found.num_params, rel=EXACT)
    largest = value(kept, 3, "largest_params") / found.num_params
    assert largest == pytest.approx(80e9 / value(kept, 3, "peak_bytes"), rel=EXACT)
    assert [stage.figures for stage in kept.stages[:3]] == [x.figures for x in freed.stages[:3]]
    assert any("kept whole" in note for note in kept.notes)
    assert not any("kept whole" in note for note in freed.notes)


@pytest.mark.parametrize(
    ("num_microbatches", "zero"),
    [(1, {}), (2, {}), (1, {"cut_layers": True}), (1, {"min_size": 3000})],
)
def test_gradients_of_stage_1_are_held_as_the_step_holds_them(num_microbatches, zero):
    sections = {
        "model": {**MODEL, "vocab_size": 256, "num_layers": 8, "embed_dim": 64},
        "zero": {"stage": 1, **zero},
        "train": {"micro_batch": 2, "num_microbatches": num_microbatches},
    }
    setup = make_setup(config(**sections))  # of the eight devices here, without padding
    trace_loss(setup)
    found = request(given=dataclasses.replace(REQUEST, num_gpus=8), **sections)
    plan = formula_plan(found)
    wanted = setup.zero.report(setup.abstract).grads_bytes
    assert value(plan, 1, "grads_bytes") == pytest.approx(wanted, rel=EXACT)
    parts = ("params_bytes", "master_bytes", "state_bytes", "grads_bytes")
    peak = sum(value(plan, 1, key) for key in parts)
    assert value(plan, 1, "peak_bytes") == pytest.approx(peak, rel=EXACT)


def test_the_capacity_is_that_of_a_compiled_plan():
    plan = formula_plan(dataclasses.replace(REQUEST, capacity_bytes=None))
    assert value(plan, 0, "capacity_bytes") == Request(config(), H100, 64).capacity
    assert CAPACITY_NOTE in plan.notes and CAPACITY_NOTE not in formula_plan(REQUEST).notes


# Times


def test_times_are_told_only_where_batch_and_flops_are_known():
    for unknown in ({"tokens": 64}, {"flops_per_token": 6e9}, {}):
        plan = formula_plan(dataclasses.replace(REQUEST, **unknown))
        assert not TIMES & set(plan.stages[0].figures)
    known = dataclasses.replace(REQUEST, tokens=64, flops_per_token=6e9, num_tokens=1e9)
    assert set(formula_plan(known).stages[0].figures) >= TIMES
    without = dataclasses.replace(known, num_tokens=None)
    assert set(formula_plan(without).stages[0].figures) & TIMES == TIMES - {"hours"}


@pytest.mark.parametrize("more", [{}, {"num_microbatches": 4}])
def test_the_batch_is_split_over_the_gpus_of_the_plan_not_the_devices_at_hand(more):
    found = request(train={"train_batch_size": 512, "micro_batch": 2, **more})
    assert (found.num_microbatches, found.tokens) == (4, 8 * 32)
    plan = formula_plan(found)
    rate, seconds = value(plan, 0, "tokens_per_s"), value(plan, 0, "step_s")
    assert rate * seconds == pytest.approx(512 * 32)
    assert value(plan, 0, "flops") == pytest.approx(512 * 32 * found.flops_per_token)


def test_a_batch_that_the_gpus_do_not_divide_is_refused():
    with pytest.raises(ValueError, match="no multiple of micro_batch 2 x 64 data shards; use 128"):
        request(train={"train_batch_size": 100, "micro_batch": 2})


@pytest.mark.parametrize(("remat", "more"), [("full", REMAT), ("none", 1)])
def test_the_forward_pass_counts_again_only_where_it_is_computed_again(remat, more):
    plan = formula_plan(request(model={**MODEL, "remat": remat}))
    once = value(plan, 0, "flops") / 64 / (H100.efficiency * H100.peak_flops("bfloat16"))
    assert value(plan, 0, "compute_s") == pytest.approx(more * once)


# What is refused


@pytest.mark.parametrize("model_parallel", [0, 3, 128])
def test_gpus_that_copies_do_not_divide_are_refused(model_parallel):
    with pytest.raises(ValueError, match=f"num_gpus 64 .* {model_parallel}; make it one"):
        Formula(1e9, H100, 64, model_parallel=model_parallel)


@pytest.mark.parametrize(
    ("mesh", "told"),
    [
        ({"replica": 2}, "replica 2 and model 1, which the formulas do not know; leave --formula"),
        ({"model": 4}, "replica 1 and model 4, which the formulas do not know; leave --formula"),
        ({"data": 8}, "data is 8, but there are 64 data-parallel GPUs; leave it out"),
    ],
)
def test_a_mesh_that_the_formulas_do_not_know_is_refused(mesh, told):
    with pytest.raises(ValueError, match=told):
        request(mesh=mesh)


def test_a_mesh_as_large_as_the_plan_is_not_held_to_the_devices_at_hand():
    assert request(mesh={"data": 64}) == request()


def test_a_gpu_that_does_not_multiply_so_is_refused():
    volta = Formula(1.0, find_gpu("v100-sxm2-32gb"), 64, capacity_bytes=32e9)
    with pytest.raises(ValueError, match="does not multiply in bfloat16; use float32 or float16"):
        formula_plan(request(given=volta))
