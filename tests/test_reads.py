"""Parameters are gathered where they are read only where right; hostile losses stay right."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jzero
from jzero.ledger import collectives
from tests import toys

STAGES = pytest.mark.parametrize("stage", [1, 2, 3])
DIM = 8


def tree():
    rng = np.random.default_rng(0)
    draw = lambda *shape: rng.normal(size=shape) * 0.3
    return {
        "w": draw(DIM, 16),
        "v": draw(16, DIM),
        "stack": {"a": draw(3, DIM, DIM), "b": draw(3, DIM)},
    }


def rows(num_rows=16):
    return np.random.default_rng(1).normal(size=(num_rows, DIM))


def per_device(loss, params, batch, num_devices=8):
    """The mean of the loss over each device's rows: the claim for a loss that is no plain mean."""
    parts = np.split(batch, num_devices)
    return sum(loss(params, part) for part in parts) / num_devices


def assert_right(stage, loss, params=None, mesh=None):
    with jax.enable_x64(True):
        params = jax.tree.map(jnp.asarray, params or tree())
        zero = jzero.Zero(mesh or jzero.make_mesh(), stage, like=params)
        value, grads = zero.value_and_grad(loss)(zero.place(params), rows())
        reference = functools.partial(per_device, loss)
        want, want_grads = jax.value_and_grad(reference)(params, rows())
        assert float(value) == pytest.approx(float(want), rel=1e-12)
        assert toys.max_difference(zero.gather(grads), want_grads) <= 1e-12
    return zero


def read(params):
    return jzero.block_params(params)


@STAGES
def test_a_gradient_by_parameters_inside_the_loss_is_right(stage):
    def penalty(params, batch):
        inner = lambda p: jnp.mean((batch @ read(p)["w"]) ** 2)
        return sum(jnp.sum(g**2) for g in jax.tree.leaves(jax.grad(inner)(params)))

    assert_right(stage, penalty)


@STAGES
def test_a_gradient_by_an_input_inside_the_loss_is_right(stage):
    def score(params, batch):
        inner = lambda x: jnp.sum(jnp.tanh(x @ read(params)["w"]))
        return jnp.mean(jax.grad(inner)(batch) ** 2)

    assert_right(stage, score)


@STAGES
def test_second_order_through_the_lent_layer_loop_is_right(stage):
    def score(params, batch):
        layer = lambda w, x, key: x + jnp.tanh(x @ w["a"] + w["b"][None])
        inner = lambda x: jzero.run_layers(layer, params["stack"], x).sum()
        return jnp.mean(jax.grad(inner)(batch) ** 2)

    assert_right(stage, score)


@jax.custom_vjp
def halve_gradient(tree):
    return tree


halve_gradient.defvjp(lambda tree: (tree, None), lambda _, ct: (jax.tree.map(lambda g: g / 2, ct),))


NESTED = jax.jit(jax.checkpoint(jax.jit(lambda p: p)))


@STAGES
@pytest.mark.parametrize("identity", [jax.jit(lambda p: p), jax.checkpoint(lambda p: p), NESTED])
def test_parameters_that_pass_through_a_call_are_still_parameters(stage, identity):
    def decay(params, batch):
        params = identity(params)
        out = jnp.mean(batch @ params["w"])
        return out + sum(jnp.sum(x**2) for x in jax.tree.leaves(params))

    assert_right(stage, decay)


@STAGES
def test_a_custom_gradient_over_the_parameters_is_kept(stage):
    assert_right(stage, lambda p, x: jnp.mean((x @ halve_gradient(p)["w"]) ** 2))


@STAGES
def test_a_layer_may_close_over_what_is_differentiated(stage):
    def loss(params, batch):
        memory = jnp.tanh(batch @ params["w"])

        def layer(w, x, key):
            return x + jnp.tanh(x @ w["a"] + w["b"][None]) + memory @ params["v"]

        return jnp.mean(jzero.run_layers(layer, params["stack"], batch) ** 2)

    assert_right(stage, loss)


@STAGES
def test_one_stack_may_run_twice_and_its_state_be_read_in_a_scan(stage):
    def loss(params, batch):
        layer = lambda w, x, key: x + jnp.tanh(x @ w["a"] + w["b"][None])
        x = jzero.run_layers(layer, params["stack"], batch)
        return jnp.mean(jzero.run_layers(layer, params["stack"], x) ** 2)

    assert_right(stage, loss)


@STAGES
def test_a_vmapped_stack_that_shapes_do_not_tell_is_right(stage):
    def loss(params, batch):
        expert = lambda w: jnp.tanh(batch @ read(w)).mean()
        return jax.vmap(expert)(params["experts"]).sum()

    experts = {"experts": np.random.default_rng(0).normal(size=(8, DIM, 5))}
    assert_right(stage, loss, experts)


@STAGES
def test_reads_in_branches_and_loops_are_right(stage):
    def loss(params, batch):
        w = jax.lax.cond(batch.mean() > 0, lambda p: read(p)["w"], lambda p: 2 * p["w"], params)
        step = lambda i, x: x @ read(params)["w"] @ read(params)["v"]
        return jnp.mean(jax.lax.fori_loop(0, 2, step, batch) @ w)

    assert_right(stage, loss)


@STAGES
def test_parameters_may_be_returned_as_aux(stage):
    zero = jzero.Zero(jzero.make_mesh(), stage, like=tree())
    loss = lambda p, x: (jnp.mean(x @ read(p)["w"]), p["w"].sum())
    (_, total), _ = zero.value_and_grad(loss, has_aux=True)(zero.place(tree()), rows())
    assert float(total) == pytest.approx(tree()["w"].sum(), rel=1e-5)


def test_complex_gradients_keep_their_imaginary_part_under_a_real_reduce_dtype():
    params = {"c": (np.ones((8, 4)) + 1j).astype(np.complex64)}
    loss = lambda p, x: jnp.mean(jnp.abs(x @ p["c"] * (1 + 2j)) ** 2)
    batch = rows().astype(np.float32)
    for stage in (0, 1, 3):
        zero = jzero.Zero(jzero.make_mesh(), stage, like=params, reduce_dtype="float32")
        _, grads = zero.value_and_grad(loss)(zero.place(params), batch)
        want = jax.grad(loss)(params, batch)["c"]
        assert np.abs(np.asarray(zero.gather(grads)["c"]) - want).max() <= 1e-4


def test_frozen_parameters_in_a_branch_or_a_scan_are_gathered_before_it():
    class Net(nnx.Module):
        def __init__(self, rngs):
            self.frozen = nnx.Linear(DIM, DIM, rngs=rngs)
            self.head = nnx.Linear(DIM, 8, rngs=rngs)

    def loss(net, batch):
        step = lambda x, _: (jnp.tanh(x @ net.frozen.kernel[...]), None)
        x = jax.lax.scan(step, batch, None, length=3)[0]
        x = jax.lax.cond(x.mean() > 0, lambda x: x @ net.frozen.kernel[...], lambda x: x, x)
        norm = sum(jnp.sum(a**2) for a in jax.tree.leaves(nnx.state(net, nnx.Param)))
        return jnp.mean(net.head(x) ** 2) + norm

    net = Net(nnx.Rngs(0))
    is_head = lambda path, x: isinstance(x, nnx.Param) and "head" in path
    batch = rows().astype(np.float32)
    zero = jzero.Zero(jzero.make_mesh(), 3, like=net)
    value_and_grad, placed = zero.value_and_grad(loss, wrt=is_head), zero.place(net)
    value, _ = value_and_grad(placed, batch)
    want = np.mean([float(loss(net, part)) for part in np.split(batch, 8)])
    assert float(value) == pytest.approx(want, rel=1e-5)
    text = jax.jit(value_and_grad).lower(placed, batch).compile().as_text()
    gathers = [r for r in collectives(text, more_than=8).check() if r.kind == "all-gather"]
    assert sum(r.times for r in gathers if r.elements == DIM * DIM) <= 2  # frozen and head, once
    assert not any(r.in_loop for r in gathers)


def test_a_hyperparameter_may_be_set_by_hand():
    params = {"w": jnp.ones((16, 4))}
    tx = jzero.Zero(jzero.make_mesh(), 1).optimizer(optax.inject_hyperparams(optax.sgd)(0.1))
    state = tx.init(params)
    state.hyperparams["learning_rate"] = 0.5
    updates, _ = tx.update(params, state, params)
    assert float(updates["w"][0, 0]) == -0.5


@pytest.mark.parametrize("method", ["value_and_grad", "apply"])
def test_stage_3_refuses_parameters_that_were_not_placed(method):
    params = {"w": np.ones((13, 7), np.float32)}
    zero = jzero.Zero(jzero.make_mesh(), 3, like=params)
    fn = getattr(zero, method)(lambda p, x: (x @ p["w"]).mean())
    with pytest.raises(ValueError, match=r"w has its logical shape \(13, 7\).*zero\.place"):
        fn(params, np.ones((8, 13), np.float32))
