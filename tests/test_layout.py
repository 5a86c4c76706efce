"""The layout is a pure function of shapes, shards and stage."""

import jax
import numpy as np
import pytest
from flax import nnx

import jzero
from jzero.layout import (
    choose_dim,
    cut_leaf,
    find_stacked,
    make_layout,
    make_state_layout,
    mirrored_name,
    pad,
    unpad,
)
from jzero.trees import abstract_leaves
from models.gpt2 import GPT2

F32 = np.dtype("float32")


def leaf(shape, num_shards=8, **options):
    return cut_leaf("w", shape, F32, num_shards=num_shards, **options)


@pytest.mark.parametrize(
    ("shape", "num_shards", "is_stacked", "dim"),
    [
        ((50257, 768), 8, False, 1),  # a dim that divides exactly wins
        ((1024, 768), 8, False, 0),  # among equals the leading one
        ((48, 1600, 6400), 8, True, 1),  # never the stacked layer dim
        ((48, 1600, 6400), 8, False, 0),
        ((8,), 8, True, 0),  # unless there is no other
        ((13, 7), 8, False, 1),  # 1 of 7 rows is less waste than 3 of 13
        ((3, 5), 7, False, 1),  # dims smaller than N
        ((2, 3, 5), 7, True, 2),
    ],
)
def test_the_dim_that_wastes_least_is_cut(shape, num_shards, is_stacked, dim):
    assert choose_dim(shape, num_shards, is_stacked=is_stacked) == dim


@pytest.mark.parametrize("num_shards", [2, 3, 5, 7, 8, 100])
@pytest.mark.parametrize("shape", [(1,), (13,), (13, 7), (2, 3, 5)])
def test_every_leaf_with_a_dim_is_cut_into_even_shards(shape, num_shards):
    cut = leaf(shape, num_shards)
    assert cut.dim is not None
    assert cut.rest_shape[cut.dim] % num_shards == 0
    assert cut.padding < num_shards
    assert cut.shard_bytes * num_shards == 4 * cut.rest_size


@pytest.mark.parametrize(
    ("shape", "options", "why"),
    [
        ((), {}, "a scalar"),
        ((0, 3), {}, "empty"),
        ((3, 3), {"min_size": 10}, "9 elements, below min_size 10"),
        ((3, 3), {"num_shards": 1}, "one shard"),
    ],
)
def test_what_stays_whole_says_why(shape, options, why):
    whole = leaf(shape, **{"num_shards": 8, **options})
    assert whole.dim is None
    assert whole.why_whole == why
    assert whole.spec(("data",)) == jax.P()


def test_integers_and_keys_stay_whole():
    shapes = {
        "count": jax.ShapeDtypeStruct((64,), np.int32),
        "key": jax.eval_shape(lambda: jax.random.split(jax.random.key(0), 8)),
    }
    layout = make_layout(shapes, num_shards=8)
    assert layout["count"].why_whole == "an integer: not trained"
    assert layout["key"].why_whole == "a PRNG key"


def test_min_size_counts_elements():
    assert leaf((3, 3), min_size=9).dim == 1 or leaf((3, 3), min_size=9).dim == 0
    assert leaf((3, 3), min_size=10).dim is None


def test_pad_and_unpad_are_inverse_and_pad_with_zeros():
    cut = leaf((13, 7))
    x = np.arange(13 * 7, dtype=np.float32).reshape(13, 7) + 1
    padded = pad(jax.numpy.asarray(x), cut)
    assert padded.shape == cut.rest_shape == (13, 8)
    assert np.asarray(padded)[:, 7:].sum() == 0
    assert (np.asarray(unpad(padded, cut)) == x).all()


def test_a_stack_of_layers_is_told_from_an_ordinary_layer():
    shapes = {
        "h.up.kernel": (4, 8, 16),
        "h.up.bias": (4, 16),
        "h.norm.scale": (4, 8),
        "head.kernel": (8, 8),
        "head.bias": (8,),
        "conv.kernel": (3, 3, 8, 8),
        "conv.bias": (8,),
    }
    assert find_stacked(shapes) == {"h.up.kernel", "h.up.bias", "h.norm.scale"}


def stacks(num_layers):
    shapes = {"h.up": (num_layers, 16, 24), "h.bias": (num_layers, 24), "wte": (64, 16)}
    return {name: jax.ShapeDtypeStruct(shape, F32) for name, shape in shapes.items()}


def test_cut_layers_cuts_stacks_between_layers_and_nothing_else():
    layout = make_layout(stacks(16), num_shards=8, cut_layers=True)
    assert {name: leaf.dim for name, leaf in layout.items()} == {"h.up": 0, "h.bias": 0, "wte": 0}
    assert layout["h.up"].shard_shape == (2, 16, 24)
    assert make_layout(stacks(16), num_shards=8)["h.up"].dim == 1
    small = make_layout(stacks(16), num_shards=8, min_size=385, cut_layers=True)
    assert small["h.bias"].dim is None


def test_cut_layers_refuses_what_it_cannot_cut_evenly():
    with pytest.raises(ValueError, match=r"h.up of 12 layers, h.bias of 12 layers; leave it out"):
        make_layout(stacks(12), num_shards=8, cut_layers=True)
    flat = {"w": jax.ShapeDtypeStruct((8, 8), F32)}
    with pytest.raises(ValueError, match="no parameters are stacked layers .*; leave it out"):
        make_layout(flat, num_shards=8, cut_layers=True)


@pytest.mark.parametrize(("stage", "value"), [(0, True), (2, True), (3, True), (1, "yes")])
def test_cut_layers_is_for_stage_1_alone(stage, value):
    with pytest.raises(ValueError, match=rf"cut_layers is .* at stage {stage}; .*use stage 1"):
        jzero.Zero(jzero.make_mesh(), stage, like=stacks(8), cut_layers=value)


def test_state_that_mirrors_a_parameter_is_cut_as_it_is():
    params = make_layout(
        {
            "h.a": jax.ShapeDtypeStruct((8, 16, 24), F32),
            "h.b": jax.ShapeDtypeStruct((8, 16), F32),
        },
        num_shards=8,
    )
    shapes = {
        "0.mu.h.a": jax.ShapeDtypeStruct((8, 16, 24), np.dtype("float64")),
        "0.factor.h.a": jax.ShapeDtypeStruct((16,), F32),
        "0.count": jax.ShapeDtypeStruct((), np.int32),
    }
    state = make_state_layout(shapes, params, num_shards=8, min_size=0)
    assert params["h.a"].dim == 1
    assert state["0.mu.h.a"].dim == 1
    assert state["0.mu.h.a"].dtype == np.float64
    assert state["0.factor.h.a"].dim == 0
    assert state["0.count"].dim is None


def test_the_longest_mirrored_name_wins():
    assert mirrored_name("0.mu.a.w", {"w": 0, "a.w": 0}) == "a.w"
    assert mirrored_name("0.count", {"w": 0}) is None


@pytest.mark.parametrize(
    ("num_layers", "num_heads", "embed_dim"),
    [(12, 12, 768), (24, 16, 1024), (36, 20, 1280), (48, 25, 1600)],
)
def test_gpt2_of_every_size_is_cut_to_one_nth(num_layers, num_heads, embed_dim):
    sizes = dict(num_layers=num_layers, num_heads=num_heads, embed_dim=embed_dim)
    shapes = abstract_leaves(nnx.eval_shape(lambda: GPT2(**sizes, rngs=nnx.Rngs(0))))
    total = sum(int(np.prod(x.shape)) for x in shapes.values())
    bounds = {2: 1.01, 3: 1.01, 7: 1.01, 8: 1.01, 64: 1.01, 100: 1.02, 512: 1.07, 1024: 1.12}
    for num_shards, bound in bounds.items():
        layout = make_layout(shapes, num_shards=num_shards)
        per_device = sum(x.shard_bytes for x in layout.values()) / 4
        assert per_device <= bound * total / num_shards, num_shards
        assert all(x.dim is not None for x in layout.values())
        stacked = [name for name, x in layout.items() if x.is_stacked]
        assert sorted(stacked) == sorted(name for name in layout if name.startswith("h."))
        assert all(layout[name].dim != 0 for name in stacked)
