"""Losses and gradients per device: averaging, microbatches, keys, auxiliary outputs, refusals."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jzero
from tests import toys

STAGES = pytest.mark.parametrize("stage", [0, 1, 2, 3])


def params():
    rng = np.random.default_rng(0)
    return {"w": rng.normal(size=(13, 7)).astype(np.float32), "b": np.ones(5, np.float32)}


def rows(num_rows=16):
    return np.random.default_rng(1).normal(size=(num_rows, 13)).astype(np.float32)


def loss_fn(params, batch):
    return ((batch @ params["w"]) ** 2).mean() + (params["b"] ** 2).sum()


def make(stage, like=None, mesh=None, **options):
    return jzero.Zero(mesh or jzero.make_mesh(), stage, like=like or params(), **options)


@STAGES
@pytest.mark.parametrize("num_microbatches", [1, 2])
def test_loss_and_gradients_are_the_means_over_the_global_batch(stage, num_microbatches):
    zero = make(stage)
    value_and_grad = zero.value_and_grad(loss_fn, num_microbatches=num_microbatches)
    loss, grads = value_and_grad(zero.place(params()), rows())
    want, want_grads = jax.value_and_grad(loss_fn)(params(), rows())
    assert float(loss) == pytest.approx(float(want), rel=1e-6)
    assert toys.max_difference(zero.gather(grads), want_grads) <= 1e-5


@STAGES
def test_a_replica_axis_splits_the_batch_and_partitions_nothing(stage):
    zero = make(stage, mesh=jzero.make_mesh(replica=2))
    loss, grads = zero.value_and_grad(loss_fn)(zero.place(params()), rows())
    want, want_grads = jax.value_and_grad(loss_fn)(params(), rows())
    assert float(loss) == pytest.approx(float(want), rel=1e-6)
    assert toys.max_difference(zero.gather(grads), want_grads) <= 1e-5
    assert zero.num_shards == 4
    if stage:
        assert {s.data.shape for s in grads["w"].addressable_shards} == {(13, 2)}


@STAGES
def test_partition_over_two_axes_at_once(stage):
    mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(4, 2), ("a", "b"))
    zero = make(stage, mesh=mesh, axes=("a", "b"))
    _, grads = zero.value_and_grad(loss_fn)(zero.place(params()), rows())
    assert zero.num_shards == 8
    assert toys.max_difference(zero.gather(grads), jax.grad(loss_fn)(params(), rows())) <= 1e-5


@STAGES
def test_small_leaves_kept_whole_have_the_same_gradient(stage):
    zero = make(stage, min_size=6)
    _, grads = zero.value_and_grad(loss_fn)(zero.place(params()), rows())
    assert grads["b"].sharding.is_fully_replicated
    assert toys.max_difference(zero.gather(grads), jax.grad(loss_fn)(params(), rows())) <= 1e-5


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_reduce_dtype_is_what_travels(stage):
    zero = make(stage, reduce_dtype="float16")
    placed = zero.place(params())
    text = jax.jit(zero.value_and_grad(loss_fn)).lower(placed, rows()).as_text()
    reduces = [line for line in text.splitlines() if "reduce_scatter" in line]
    assert reduces
    types = [line for line in text.splitlines() if "tensor<13x8xf16>" in line]
    assert any("-> tensor<13x1xf16>" in line for line in types)
    _, grads = zero.value_and_grad(loss_fn)(placed, rows())
    assert grads["w"].dtype == jnp.float32
    assert toys.max_difference(zero.gather(grads), jax.grad(loss_fn)(params(), rows())) <= 1e-2


def test_16_bit_gradients_of_several_microbatches_are_summed_in_float32():
    like = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params())
    for stage in range(4):
        zero = make(stage, like=like)
        placed = zero.place(like)
        for num_microbatches, dtype in ((1, jnp.bfloat16), (2, jnp.float32)):
            value_and_grad = zero.value_and_grad(loss_fn, num_microbatches=num_microbatches)
            _, grads = value_and_grad(placed, rows())
            assert grads["w"].dtype == dtype


# Keys and auxiliary outputs.


def test_keys_differ_by_device_and_microbatch_and_repeat_by_step():
    zero = make(1)

    def noise(params, batch, key):
        drawn = jax.random.normal(key, (batch.shape[0],))
        return loss_fn(params, batch), drawn

    value_and_grad = zero.value_and_grad(noise, num_microbatches=2, has_aux=True)
    draw = lambda seed: np.asarray(value_and_grad(params(), rows(), jax.random.key(seed))[0][1])
    first = draw(0)
    assert first.shape == (16,)
    assert len(set(first.tolist())) == 16
    assert (draw(0) == first).all()
    assert (draw(1) != first).all()


@STAGES
@pytest.mark.parametrize("num_microbatches", [1, 2])
def test_aux_scalars_are_averaged_integers_summed_rows_kept_in_order(stage, num_microbatches):
    def with_aux(params, batch):
        aux = {"mean": batch.mean(), "count": jnp.int32(batch.shape[0]), "rows": batch[:, 0]}
        return loss_fn(params, batch), aux

    zero = make(stage)
    fn = zero.value_and_grad(with_aux, has_aux=True, num_microbatches=num_microbatches)
    (_, aux), _ = fn(zero.place(params()), rows())
    assert float(aux["mean"]) == pytest.approx(float(rows().mean()), rel=1e-5)
    assert int(aux["count"]) == 16
    assert (np.asarray(aux["rows"]) == rows()[:, 0]).all()


@STAGES
@pytest.mark.parametrize("is_explicit", [False, True])
def test_apply_gives_the_same_without_gradients(stage, is_explicit):
    zero = make(stage, mesh=jax.make_mesh((8,), ("data",)) if is_explicit else None)
    placed = zero.place(params())
    assert float(zero.apply(loss_fn)(placed, rows())) == pytest.approx(
        float(loss_fn(params(), rows())), rel=1e-6
    )
    out = zero.apply(lambda p, batch: batch @ p["w"])(placed, rows())
    assert toys.max_difference(out, rows() @ params()["w"]) <= 1e-5


def test_apply_refuses_arrays_that_are_neither_scalars_nor_rows():
    with pytest.raises(
        ValueError, match=r"returned arrays of shapes an array \(13, 7\).*2 batch rows"
    ):
        make(1).apply(lambda p, batch: p["w"])(params(), rows())


@pytest.mark.parametrize("argnums", [(1, 2), (2, 1)])
def test_several_arguments_may_hold_the_batch(argnums):
    zero = make(2)
    fn = zero.value_and_grad(lambda p, a, b: loss_fn(p, a + b), batch_argnums=argnums)
    loss, _ = fn(zero.place(params()), rows(), rows())
    assert float(loss) == pytest.approx(float(loss_fn(params(), 2 * rows())), rel=1e-6)


# Modules with more than parameters.


class Net(nnx.Module):
    def __init__(self, rngs):
        self.linear = nnx.Linear(13, 6, rngs=rngs)
        self.norm = nnx.BatchNorm(6, rngs=rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return self.drop(self.norm(self.linear(x)))


def net_loss(net, batch):
    return (net(batch) ** 2).mean()


@STAGES
@pytest.mark.parametrize("num_microbatches", [1, 2])
def test_other_variables_of_a_module_come_back_updated(stage, num_microbatches):
    net = Net(nnx.Rngs(0))
    zero = make(stage, like=net)
    placed = zero.place(net)
    key = np.asarray(jax.random.key_data(placed.drop.rngs.key[...]))
    fn = zero.value_and_grad(net_loss, num_microbatches=num_microbatches)
    batch = rows(64)
    first, _ = fn(placed, batch)
    hidden = batch @ np.asarray(net.linear.kernel[...]) + np.asarray(net.linear.bias[...])
    share = 1 - 0.99**num_microbatches
    tolerance = 1e-5 if num_microbatches == 1 else 3e-4  # halves of a batch, decayed in turn
    assert np.asarray(placed.norm.mean[...]) == pytest.approx(hidden.mean(0) * share, abs=tolerance)
    assert np.abs(np.asarray(placed.norm.mean[...])).max() > 0
    assert int(placed.drop.rngs.count[...]) == num_microbatches
    assert (np.asarray(jax.random.key_data(placed.drop.rngs.key[...])) == key).all()
    second, _ = fn(placed, batch)
    assert float(first) != float(second)


@STAGES
def test_frozen_parameters_get_no_gradient_and_are_read_right(stage):
    model = toys.Toy(jax.random.key(0))
    zero = make(stage, like=model)
    placed, tokens = zero.place(model), toys.toy_batches(1, 16)[0]
    is_table = lambda path, x: isinstance(x, nnx.Param) and path[-1] == "table"
    loss, grads = zero.value_and_grad(toys.toy_loss, wrt=is_table)(placed, tokens)
    assert list(nnx.to_pure_dict(grads)) == ["table"]
    assert float(loss) == pytest.approx(float(toys.toy_loss(model, tokens)), rel=1e-6)
    graphdef, params, rest = nnx.split(model, is_table, ...)
    fresh = lambda: jax.tree.map(lambda x: x, rest)
    want = jax.grad(lambda p: toys.toy_loss(nnx.merge(graphdef, p, fresh()), tokens))(params)
    assert toys.max_difference(zero.gather(grads), want) <= 1e-6
    tx = zero.optimizer(optax.adam(1e-3))
    state = tx.init(nnx.state(placed, is_table))
    assert list(nnx.to_pure_dict(state[0].mu)) == ["table"]


@STAGES
def test_integer_leaves_are_kept_and_never_trained(stage):
    tree = {**params(), "count": np.arange(3)}
    zero = make(stage, like=tree)
    placed = zero.place(tree)
    _, grads = zero.value_and_grad(lambda p, b: loss_fn(p, b) * p["count"].sum())(placed, rows())
    tx = zero.optimizer(optax.adamw(1e-3))
    updates, _ = tx.update(grads, tx.init(placed), placed)
    after = optax.apply_updates(placed, updates)
    assert after["count"].dtype == placed["count"].dtype
    assert (np.asarray(after["count"]) == np.arange(3)).all()
    assert toys.max_difference(zero.gather(after)["w"], params()["w"]) > 0


@STAGES
def test_empty_arrays_and_unused_parameters_work(stage):
    tree = {**params(), "empty": np.zeros((0, 4), np.float32), "unused": np.ones(9, np.float32)}
    zero = make(stage, like=tree)
    _, grads = zero.value_and_grad(loss_fn)(zero.place(tree), rows())
    grads = zero.gather(grads)
    assert grads["empty"].shape == (0, 4)
    assert (np.asarray(grads["unused"]) == 0).all()


# What is refused.


def test_a_batch_that_cannot_be_split_says_the_nearest_that_can():
    fn = make(1).value_and_grad(loss_fn, num_microbatches=2)
    with pytest.raises(
        ValueError, match=r"argument 1 has 100 rows, not divisible by 8 .* 2 .* = 16; use 96 or 112"
    ):
        fn(params(), rows(100))
    with pytest.raises(ValueError, match=r"has 3 rows.*; use 16\."):
        fn(params(), rows(3))
    with pytest.raises(ValueError, match="has no dim to split"):
        fn(params(), np.float32(1))


@pytest.mark.parametrize("value", [0, -1, 1.5, "2"])
def test_num_microbatches_is_a_positive_integer(value):
    with pytest.raises(ValueError, match="num_microbatches is .*; give an integer of at least 1"):
        make(1).value_and_grad(loss_fn, num_microbatches=value)


def test_batch_argnums_name_arguments_that_are_there():
    with pytest.raises(ValueError, match="batch_argnums is 0; give positions of at least 1"):
        make(1).value_and_grad(loss_fn, batch_argnums=0)
    with pytest.raises(ValueError, match="names argument 3, but the function was called with 2"):
        make(1).value_and_grad(loss_fn, batch_argnums=3)(params(), rows())


@pytest.mark.parametrize(
    "bad",
    [
        lambda p, b: (b @ p["w"]).mean(0),
        lambda p, b: 1,
        lambda p, b: (p["b"].sum(), b[:, 0]),
        lambda p, b: (p["b"].sum(), 2, 3),
        lambda p, b: (p["b"].sum(),),
        lambda p, b: p["b"].sum() * 1j,
        lambda p, b: (p["b"].sum(), 1j),
    ],
)
def test_a_loss_that_is_no_floating_scalar_is_refused(bad):
    with pytest.raises(
        ValueError, match=r"loss must be a floating-point scalar, or a pair .* but loss_fn returned"
    ):
        make(1).value_and_grad(bad)(params(), rows())


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("is_explicit", [False, True])
def test_a_constraint_that_names_a_partition_axis_is_refused(stage, is_explicit):
    mesh = jax.make_mesh((8,), ("data",)) if is_explicit else jzero.make_mesh()
    zero = make(stage, mesh=mesh)

    def constrained(params, batch):
        batch = jax.lax.with_sharding_constraint(batch, NamedSharding(mesh, P("data")))
        return loss_fn(params, batch)

    with pytest.raises(
        ValueError, match=r"names mesh axis 'data'.*drop the constraint, or use stage 1"
    ):
        zero.value_and_grad(constrained)(zero.place(params()), rows())


@pytest.mark.parametrize("stage", [2, 3])
def test_a_parameter_scanned_over_its_cut_dim_is_read_whole_first(stage):
    tree = {"stack": np.ones((16, 3), np.float32)}
    zero = make(stage, like=tree)
    assert zero.layout()["stack"].dim == 0

    def scanned(params, batch):
        step = lambda x, w: (x + jzero.block_params(w).sum(), None)
        return jax.lax.scan(step, batch.mean(), params["stack"])[0]

    loss, _ = zero.value_and_grad(scanned)(zero.place(tree), rows())
    assert float(loss) == pytest.approx(float(rows().mean()) + 48, rel=1e-6)
