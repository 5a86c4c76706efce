"""The lent layer loop equals the model's own, for every remat, with keys, outputs and state."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jzero
from jzero.ledger import collectives
from models.layers import run_layers as plain_run_layers
from tests import toys

DIM = 8


class Layer(nnx.Module):
    """A layer with dropout by key, an output of its own, a count and a small weight left whole."""

    def __init__(self, rngs):
        self.w = nnx.Param(jax.random.normal(rngs.params(), (DIM, DIM)) * 0.3)
        self.gain = nnx.Param(jnp.ones(3))
        self.calls = nnx.BatchStat(jnp.zeros(()))


class Model(nnx.Module):
    def __init__(self, rngs, num_layers):
        make = nnx.split_rngs(splits=num_layers)(nnx.vmap(Layer, in_axes=(0,), out_axes=0))
        self.layers = make(rngs)
        self.head = nnx.Param(jax.random.normal(rngs.params(), (DIM, 5)))


def block(layer, x, key):
    layer.calls[...] += 1
    kept = jax.random.bernoulli(key, 0.8, x.shape) if key is not None else 1
    x = x + jnp.tanh(x @ layer.w[...]) * kept * layer.gain[...].mean()
    return x, (x**2).mean()


def loss_with(run_layers, remat, with_keys):
    def loss(model, batch, key):
        keys = jax.random.split(key, NUM_LAYERS) if with_keys else None
        x, outs = run_layers(block, model.layers, batch, remat=remat, keys=keys, has_aux=True)
        return ((x @ model.head[...]) ** 2).mean() + outs.sum()

    return loss


NUM_LAYERS = 3


def rows():
    return np.random.default_rng(0).normal(size=(16, DIM)).astype(np.float32)


def grads_of(stage, remat, *, lend, with_keys=True, min_size=4):
    model = Model(nnx.Rngs(0), NUM_LAYERS)
    zero = jzero.Zero(jzero.make_mesh(), stage, like=model, min_size=min_size)
    loss = loss_with(zero.run_layers if lend else plain_run_layers, remat, with_keys)
    placed = zero.place(model)
    value, grads = zero.value_and_grad(loss)(placed, rows(), jax.random.key(7))
    return value, zero.gather(grads), placed


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("remat", ["none", "full", "dots"])
def test_the_lent_loop_equals_the_models_own(stage, remat):
    value, grads, placed = grads_of(stage, remat, lend=True)
    want, want_grads, _ = grads_of(0, "none", lend=False)
    assert float(value) == pytest.approx(float(want), rel=1e-6)
    assert toys.max_difference(grads, want_grads) <= 1e-6
    assert (np.asarray(placed.layers.calls[...]) == 1).all()


@pytest.mark.parametrize("stage", [2, 3])
def test_the_own_loop_of_a_model_equals_stage_0(stage):
    value, grads, _ = grads_of(stage, "full", lend=False)
    want, want_grads, _ = grads_of(0, "none", lend=False)
    assert float(value) == pytest.approx(float(want), rel=1e-6)
    assert toys.max_difference(grads, want_grads) <= 1e-6


def test_keys_reach_the_layers():
    with_keys, _, _ = grads_of(3, "full", lend=True)
    without, _, _ = grads_of(3, "full", lend=True, with_keys=False)
    assert float(with_keys) != float(without)


@pytest.mark.parametrize("num_layers", [1, 2])
def test_few_layers_work(num_layers):
    model = Model(nnx.Rngs(0), num_layers)
    layer = lambda l, x, key: block(l, x, key)[0]
    loss = lambda run: lambda m, b: (run(layer, m.layers, b) ** 2).mean()
    want = jzero.Zero(jzero.make_mesh(), 0, like=model)
    want_value, want_grads = want.value_and_grad(loss(plain_run_layers))(want.place(model), rows())
    zero = jzero.Zero(jzero.make_mesh(), 3, like=model)
    value, grads = zero.value_and_grad(loss(zero.run_layers))(zero.place(model), rows())
    assert float(value) == pytest.approx(float(want_value), rel=1e-6)
    assert toys.max_difference(zero.gather(grads), want.gather(want_grads)) <= 1e-6


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_plain_tree_of_stacked_arrays_works(stage):
    rng = np.random.default_rng(0)
    draw = lambda *shape: rng.normal(size=shape).astype(np.float32) * 0.3
    tree = {"stack": {"a": draw(4, 8, 8), "b": draw(4, 8)}, "head": draw(8, 3)}
    zero = jzero.Zero(jzero.make_mesh(), stage, like=tree)

    def loss(params, batch):
        layer = lambda w, x, key: x + jnp.tanh(x @ w["a"] + w["b"][None])
        return (zero.run_layers(layer, params["stack"], batch) @ params["head"]).mean()

    _, grads = zero.value_and_grad(loss)(zero.place(tree), rows())
    assert toys.max_difference(zero.gather(grads), jax.grad(loss)(tree, rows())) <= 1e-6
    if stage == 3:
        assert zero.report(tree).reads == {"stack.a": True, "stack.b": True, "head": False}


def test_apply_runs_the_lent_loop_without_gradients():
    model = Model(nnx.Rngs(0), NUM_LAYERS)
    zero = jzero.Zero(jzero.make_mesh(), 3, like=model)
    loss = lambda run: lambda m, b: run(block, m.layers, b, has_aux=True)[1].sum()
    got = zero.apply(loss(zero.run_layers))(zero.place(model), rows())
    assert float(got) == pytest.approx(float(loss(plain_run_layers)(model, rows())), rel=1e-6)


@pytest.mark.parametrize(("stage", "in_loop"), [(2, 0), (3, 2)])
def test_the_loop_gathers_ahead_and_reduces_behind(stage, in_loop):
    model = Model(nnx.Rngs(0), 5)
    zero = jzero.Zero(jzero.make_mesh(), stage, like=model)
    layer = lambda l, x, key: x @ l.w[...]
    loss = lambda m, b: (zero.run_layers(layer, m.layers, b) ** 2).mean()
    placed = zero.place(model)
    text = jax.jit(zero.value_and_grad(loss)).lower(placed, rows()).compile().as_text()
    rows_ = [r for r in collectives(text).check() if r.elements == DIM * DIM]
    gathers = [r for r in rows_ if r.kind == "all-gather"]
    reduces = [r for r in rows_ if r.kind == "reduce-scatter"]
    assert sum(r.times for r in gathers) == (10 if stage == 3 else 0)
    assert len([r for r in gathers if r.in_loop]) == in_loop
    assert sum(r.times for r in reduces) == 5
    assert sum(r.times for r in reduces if r.in_loop) == 4


def test_unknown_remat_and_unstacked_layers_are_refused():
    with pytest.raises(
        ValueError, match="remat 'some' is unknown; use one of 'none', 'full', 'dots'"
    ):
        jzero.run_layers(block, {"w": jnp.ones((2, 3))}, 1.0, remat="some")
    with pytest.raises(
        ValueError, match="one leading layer dim, but dim 0 .* build them with nnx.vmap"
    ):
        jzero.run_layers(block, {"w": jnp.ones((2, 3)), "v": jnp.ones((4, 3))}, 1.0)


def test_block_params_is_the_identity_on_arrays():
    tree = {"w": jnp.arange(3.0)}
    assert (jzero.block_params(tree)["w"] == tree["w"]).all()


def test_an_evaluation_at_stage_1_is_the_program_of_stage_0():
    """Nothing is reduced there, so the lent loop buffers nothing and gathers nothing ahead."""
    model = nnx.eval_shape(lambda: toys.Toy(jax.random.key(0)))
    batch = jax.ShapeDtypeStruct((16, toys.TIME), jnp.int32)

    def program(stage):
        zero = jzero.Zero(toys.data_mesh(8), stage, like=model)
        graphdef, params = nnx.split(zero.abstract(model))
        evaluate = zero.apply(lambda m, b: m(b, zero.run_layers).mean())
        return str(jax.make_jaxpr(lambda p, b: evaluate(nnx.merge(graphdef, p), b))(params, batch))

    assert program(1) == program(0)
    assert program(2) != program(0)
