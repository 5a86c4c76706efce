"""The program that XLA compiles for GPUs, held to the law: dtypes, counts, bytes, what covers what.

CPU programs widen 16-bit collectives and start none ahead, so these are read from programs for
eight H100s that need not be here.
"""

import functools

import jax
import pytest

import jzero
from jzero.compile_step import abstract_step, memory_of
from jzero.config import parse_config
from jzero.recipe import make_setup
from jzero.target import library_path

pytestmark = [
    pytest.mark.skipif(
        library_path() is None, reason="compiling for GPUs needs pip install 'jzero[plan]'"
    ),
    pytest.mark.xdist_group("gpu_program"),  # one worker compiles each program once
]
NUM_GPUS, NUM_LAYERS, SCALARS = 8, 3, 64
FEW_LAYERS = 2  # half the compile, where nothing is said of the loops over layers
PROGRAMS = {}  # by GPU and text before XLA: stage 2 is stage 1's where there is one microbatch
RING = (NUM_GPUS - 1) / NUM_GPUS
MODEL = {
    "vocab_size": 1024,
    "num_positions": 64,
    "num_layers": NUM_LAYERS,
    "num_heads": 4,
    "embed_dim": 256,
    "attention": "blocked",
    "loss_chunk": 32,
}


def compiled(stage, policy="bfloat16", num_microbatches=1, gpu="h100-sxm", **zero):
    return _compiled(stage, policy, num_microbatches, gpu, tuple(zero.items()))


@functools.cache
def _compiled(stage, policy, num_microbatches, gpu, options):
    zero = dict(options)
    model = MODEL | {"num_layers": zero.pop("num_layers", NUM_LAYERS)}
    precision = {"policy": policy}
    if "reduce_dtype" in zero:
        precision["reduce_dtype"] = zero.pop("reduce_dtype")
    tables = {
        "model": model,
        "data": {"seq_len": 64},
        "precision": precision,
        "optimizer": {"clip_norm": 1.0},
        "zero": {"stage": stage, **zero},
        "train": {"micro_batch": 64, "num_microbatches": num_microbatches},
    }
    mesh = jzero.virtual_mesh(gpu, num_gpus=NUM_GPUS)
    setup = make_setup(parse_config(tables), mesh)
    state, step, others = abstract_step(setup)
    lowered = step.lower(state, *others)
    key = gpu, lowered.as_text()
    program = PROGRAMS[key] = PROGRAMS.get(key) or lowered.compile()
    memory = memory_of(setup, state, program.memory_analysis())
    return setup, memory, jzero.collectives(program, more_than=SCALARS).check()


def few(stage, num_microbatches=1):
    """As many layers as the tests of the loops have, where they share the program."""
    return {} if stage and num_microbatches == 1 else {"num_layers": FEW_LAYERS}


def passes(ledger, setup, kind):
    """Elements sent, in passes over all parameters."""
    return ledger.wire(kind) / setup.num_params / RING


def layer_share(setup):
    leaves = setup.zero.layout().values()
    layers = sum(leaf.rest_size for leaf in leaves if leaf.is_stacked)
    return layers / setup.num_params


@pytest.mark.parametrize(
    ("stage", "num_microbatches"), [(0, 1), (1, 1), (2, 1), (3, 1), (1, 3), (3, 3)]
)
def test_the_wire_carries_the_law_in_16_bits_over_data_and_nothing_else(stage, num_microbatches):
    setup, _, ledger = compiled(
        stage, num_microbatches=num_microbatches, **few(stage, num_microbatches)
    )
    g = num_microbatches
    gathers = (1 + layer_share(setup)) * g
    want = [
        {"all-reduce": 1},
        {"reduce-scatter": 1, "all-gather": 1},
        {"reduce-scatter": g, "all-gather": 1},
        {"reduce-scatter": g, "all-gather": gathers},
    ][stage]
    assert {row.kind for row in ledger} == set(want)
    assert {row.dtype for row in ledger} == {"bf16"}
    assert {row.axes for row in ledger} == {("data",)}
    for kind, number in want.items():
        found = passes(ledger, setup, kind)
        if stage == 3 and kind == "all-gather" and g > 1:
            # Tables and the layer that a loop starts with may be gathered once for all.
            assert found <= 1.01 * number
        else:
            assert found == pytest.approx(number, rel=0.01), kind


@pytest.mark.parametrize(
    ("stage", "whole", "cut"), [(0, 14, 0), (1, 2, 12), (2, 2, 12), (3, 0, 14)]
)
def test_bytes_at_rest_are_the_law_all_are_donated_and_the_peak_has_them(stage, whole, cut):
    setup, memory, _ = compiled(stage, **few(stage))
    held = memory["params"] + memory["master"] + memory["state"]
    assert held / setup.num_params == pytest.approx(whole + cut / NUM_GPUS, rel=0.01)
    assert memory["arguments"] == pytest.approx(held, rel=0.01)
    assert memory["alias"] == pytest.approx(held, rel=0.01)
    assert memory["peak"] >= memory["arguments"] + memory["temp"]


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_gradients_of_layers_are_reduced_in_the_backward_loop_one_collective_a_layer(stage):
    setup, _, ledger = compiled(stage)
    looped = [row for row in ledger if row.in_loop and row.kind == "reduce-scatter"]
    assert sum(row.times for row in looped) == NUM_LAYERS - 2  # XLA peels a turn off
    outside = [row for row in ledger if not row.in_loop and row.kind == "reduce-scatter"]
    layer = layer_share(setup) * setup.num_params / NUM_LAYERS
    assert sum(row.elements for row in outside) == pytest.approx(
        setup.num_params - (NUM_LAYERS - 2) * layer, rel=0.01
    )


def test_stage_3_gathers_one_layer_at_a_time_forward_and_backward():
    _, _, ledger = compiled(3)
    looped = [row for row in ledger if row.in_loop and row.kind == "all-gather"]
    assert sum(row.times for row in looped) == (NUM_LAYERS - 1) + (NUM_LAYERS - 2)


@pytest.mark.parametrize(
    ("stage", "policy", "gpu"),
    [
        (1, "bfloat16", "h100-sxm"),
        (2, "bfloat16", "h100-sxm"),
        (3, "bfloat16", "h100-sxm"),
        (3, "float16", "v100-sxm2-32gb"),  # XLA overlaps nothing there unless it is asked to
    ],
)
def test_what_travels_in_the_loops_is_started_ahead_and_wholly_covered(stage, policy, gpu):
    _, _, ledger = compiled(stage, policy, gpu=gpu)
    looped = [row for row in ledger if row.in_loop and row.payload_bytes > 1000]
    assert looped and all(row.is_async for row in looped)
    assert min(row.covered for row in looped) == pytest.approx(1.0)


def test_gradients_travel_in_the_dtype_that_is_asked_for():
    _, _, ledger = compiled(2, reduce_dtype="float32", num_layers=1)
    dtypes = {(row.kind, row.dtype) for row in ledger}
    assert dtypes == {("reduce-scatter", "f32"), ("all-gather", "bf16")}


def test_weights_that_are_kept_travel_once_a_step():
    setup, _, ledger = compiled(3, num_microbatches=3, keep_gathered=True, num_layers=FEW_LAYERS)
    assert passes(ledger, setup, "all-gather") == pytest.approx(1.0, rel=0.01)
    assert passes(ledger, setup, "reduce-scatter") == pytest.approx(3.0, rel=0.01)


def test_the_ledger_names_the_parameter_of_each_collective():
    setup, _, ledger = compiled(3)
    named = {name for row in ledger for name in row.parameter.split(", ")}
    cut = {name for name, leaf in setup.zero.layout().items() if leaf.dim is not None}
    assert named == cut


def test_a_float32_model_travels_in_float32_and_has_no_master():
    setup, memory, ledger = compiled(2, "float32", num_layers=1)
    assert {row.dtype for row in ledger} == {"f32"}
    assert memory["master"] == 0
    assert memory["params"] == 4 * setup.num_params


def test_the_mesh_is_of_gpus_that_cannot_run():
    mesh = jzero.virtual_mesh("h100-sxm", num_gpus=NUM_GPUS)
    assert jzero.compiler_options(mesh)
    assert jzero.compiler_options(jzero.make_mesh()) == {}
    assert mesh.devices.flat[0] not in jax.devices()
