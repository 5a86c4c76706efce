"""Microbatches and weights: the mean over what counts, summed wide, reduced once, scaled safely."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jzero
from tests import toys

STAGES = pytest.mark.parametrize("stage", [0, 1, 2, 3])
TOLERANCE = 1e-12  # float64


def params(dtype=np.float64):
    rng = np.random.default_rng(0)
    return {"w": rng.normal(size=(13, 7)).astype(dtype), "b": rng.normal(size=5).astype(dtype)}


def masked_batch(num_rows=48, time=5):
    """Rows with uneven masks: the first sixteen count for nothing at all."""
    rng = np.random.default_rng(1)
    keep = rng.random((num_rows, time)) < np.linspace(0, 1, num_rows)[:, None]
    keep[:16] = False
    return {"x": rng.normal(size=(num_rows, time, 13)), "keep": keep}


def summed(params, batch):
    """(sum, weight) over the positions that count."""
    losses = ((batch["x"] @ params["w"]) ** 2).sum(-1) + (params["b"] ** 2).sum()
    return (losses * batch["keep"]).sum(), batch["keep"].sum()


def mean_of_kept(params, batch):
    total, weight = summed(params, batch)
    return total / weight


def make(stage, num_devices=8, like=None, **options):
    return jzero.Zero(
        toys.data_mesh(num_devices), stage, like=params() if like is None else like, **options
    )


@STAGES
@pytest.mark.parametrize(("num_devices", "num_microbatches"), [(8, 1), (8, 2), (3, 4)])
def test_a_weighted_loss_is_the_mean_over_what_counts(stage, num_devices, num_microbatches):
    with jax.enable_x64(True):
        zero = make(stage, num_devices)
        fn = zero.value_and_grad(summed, num_microbatches=num_microbatches)
        loss, grads = fn(zero.place(params()), masked_batch())
        want, want_grads = jax.value_and_grad(mean_of_kept)(params(), masked_batch())
        assert abs(float(loss) - float(want)) <= TOLERANCE * float(want)
        assert toys.max_difference(zero.gather(grads), want_grads) <= TOLERANCE * 10
        evaluated = zero.apply(summed, has_weight=True)(zero.place(params()), masked_batch())
        assert abs(float(evaluated) - float(want)) <= TOLERANCE * float(want)


def test_a_mean_of_means_is_not_the_mean_over_what_counts():
    with jax.enable_x64(True):
        batch = jax.tree.map(lambda x: x[16:], masked_batch())
        zero = make(1)
        placed = zero.place(params())
        means, _ = zero.value_and_grad(mean_of_kept)(placed, batch)
        loss, _ = zero.value_and_grad(summed)(placed, batch)
        want = float(mean_of_kept(params(), batch))
        assert float(loss) == pytest.approx(want, rel=TOLERANCE)
        assert abs(float(means) - want) > 1e-3 * want


@STAGES
def test_a_weight_goes_along_with_an_auxiliary_output(stage):
    with jax.enable_x64(True):
        zero = make(stage)
        fn = zero.value_and_grad(lambda p, b: (summed(p, b), b["keep"].sum(1)), has_aux=True)
        (loss, counts), _ = fn(zero.place(params()), masked_batch())
        assert float(loss) == pytest.approx(float(mean_of_kept(params(), masked_batch())))
        assert (np.asarray(counts) == masked_batch()["keep"].sum(1)).all()


def test_nothing_is_sent_within_the_microbatches_below_stage_2():
    for stage in (0, 1):
        zero = make(stage, like=params(np.float32))
        fn = zero.value_and_grad(summed, num_microbatches=2)
        batch = {"x": jnp.ones((16, 5, 13)), "keep": jnp.ones((16, 5), bool)}
        text = jax.jit(fn).lower(zero.place(params(np.float32)), batch).as_text()
        loop = text[text.index("stablehlo.while") : text.index("stablehlo.return")]
        assert "all_reduce" not in loop
        assert "reduce_scatter" not in loop


# The accumulator.


def steps_of_gradient(sizes):
    """A loss whose gradient in microbatch i is sizes[i] everywhere, and a batch for 8 devices."""
    batch = np.tile(np.asarray(sizes, np.float32), 8)[:, None]
    return lambda p, b: (p["w"].astype(jnp.float32) * b.mean()).sum(), batch


@STAGES
def test_16_bit_gradients_of_microbatches_are_summed_in_float32(stage):
    sizes = [256.0, *[1.0] * 15]  # in bfloat16 256 + 1 is 256
    like = {"w": jnp.ones((13, 7), jnp.bfloat16)}
    zero = make(stage, like=like)
    loss_fn, batch = steps_of_gradient(sizes)
    options = {"num_microbatches": 16}
    _, grads = zero.value_and_grad(loss_fn, **options)(zero.place(like), batch)
    grads = zero.gather(grads)
    assert grads["w"].dtype == jnp.float32
    mean = jnp.float32(sum(sizes) / 16)
    sent = mean if stage >= 2 else mean.astype(jnp.bfloat16)  # at stages 0 and 1 the sum travels
    assert (np.asarray(grads["w"]) == np.float32(sent)).all()
    named = zero.value_and_grad(loss_fn, accumulator_dtype="bfloat16", **options)
    _, grads = named(zero.place(like), batch)
    assert grads["w"].dtype == jnp.bfloat16
    assert float(zero.gather(grads)["w"][0, 0]) == 16  # lost, as asked for


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_gradients_travel_in_the_parameters_dtype_however_they_are_summed(stage):
    like = {"w": jnp.ones((16, 8), jnp.bfloat16)}
    zero = make(stage, like=like)
    loss_fn, batch = steps_of_gradient([1.0, 2.0])
    fn = jax.jit(zero.value_and_grad(loss_fn, num_microbatches=2))
    text = fn.lower(zero.place(like), batch).as_text()
    kind = "reduce_scatter" if stage else "all_reduce"
    types = [x for x in text.split(f'"stablehlo.{kind}"')[1:] if "tensor<16x8x" in x[:900]]
    assert types
    assert all("tensor<16x8xbf16>" in x[:900] for x in types)


@STAGES
def test_sums_of_16_bits_do_not_overflow_where_the_mean_does_not(stage):
    like = {"w": jnp.ones((16, 8), jnp.float16)}
    zero = make(stage, like=like)
    loss_fn, batch = steps_of_gradient([20_000.0, 30_000.0])  # 8 devices: 200,000 in all
    for count in (1, 2):
        fn = zero.value_and_grad(loss_fn, num_microbatches=count)
        _, grads = fn(zero.place(like), batch)
        assert float(zero.gather(grads)["w"].max()) == pytest.approx(25_000, rel=1e-3)


@STAGES
def test_loss_scale_multiplies_the_gradients_and_not_the_loss(stage):
    zero = make(stage, like=params(np.float32))
    placed = zero.place(params(np.float32))
    batch = {"x": np.ones((16, 5, 13), np.float32), "keep": np.ones((16, 5), bool)}
    for count in (1, 2):
        fn = zero.value_and_grad(summed, num_microbatches=count)
        loss, grads = fn(placed, batch)
        scaled_loss, scaled = fn(placed, batch, loss_scale=jnp.float32(1024))
        assert float(loss) == float(scaled_loss)
        for a, b in zip(jax.tree.leaves(grads), jax.tree.leaves(scaled), strict=True):
            assert (1024 * np.asarray(a) == np.asarray(b)).all()  # a power of two: exact


def test_options_that_cannot_be_honoured_are_refused():
    zero = make(1)
    with pytest.raises(ValueError, match=r"keep_gathered has no effect at stage 1.*use stage 3"):
        zero.value_and_grad(summed, keep_gathered=True)
    with pytest.raises(ValueError, match="accumulator_dtype 'int32' is no dtype to compute in"):
        zero.value_and_grad(summed, accumulator_dtype="int32")
    with pytest.raises(ValueError, match=r"reduce_dtype 'flaot32' is no dtype.*mean 'float32'"):
        make(1, reduce_dtype="flaot32")
    with pytest.raises(ValueError, match="reduce_dtype float64 is switched off in jax"):
        make(1, reduce_dtype="float64")
    narrow = zero.value_and_grad(summed, num_microbatches=2, accumulator_dtype="float16")
    with pytest.raises(ValueError, match=r"accumulator_dtype float16 cannot hold .* use float32"):
        narrow(params(), masked_batch())
    with pytest.raises(ValueError, match=r"loss_scale has shape \(2,\); give one number"):
        zero.value_and_grad(summed)(params(), masked_batch(), loss_scale=jnp.ones(2))


def test_a_weight_that_depends_on_the_parameters_is_refused():
    def gated(params, batch):
        gate = jax.nn.sigmoid(batch["x"] @ params["w"]).mean()
        return gate * (params["b"] ** 2).sum(), gate

    def constant(params, batch):
        total, gate = gated(params, batch)
        return total, jax.lax.stop_gradient(gate)

    for stage in (1, 2):
        zero = make(stage)
        with pytest.raises(ValueError, match="depends on the parameters.*put jax.lax.stop_g"):
            zero.value_and_grad(gated)(params(), masked_batch())
        zero.value_and_grad(constant)(params(), masked_batch())


# Gathered once a step.


@pytest.mark.parametrize("lend", [False, True])
def test_gathered_weights_that_are_kept_give_the_same_gradients(lend):
    with jax.enable_x64(True):
        model = toys.Toy(jax.random.key(0), jnp.float64)
        zero = jzero.Zero(jzero.make_mesh(), 3, like=model)
        batch = toys.toy_batches(1, 32)[0]
        lent = zero.run_layers if lend else None
        loss_fn = lambda m, b: toys.toy_loss(m, b, lent)
        results = []
        for keep in (False, True):
            fn = zero.value_and_grad(loss_fn, num_microbatches=4, keep_gathered=keep)
            loss, grads = fn(zero.place(model), batch)
            results.append((loss, zero.gather(grads)))
        assert toys.max_difference(*results) <= TOLERANCE


# What goes through: state, keys, clipping.


class Normed(nn.Module):
    """Batch statistics with as many features as a device has rows."""

    @nn.compact
    def __call__(self, x, train=True):
        x = nn.BatchNorm(use_running_average=not train, momentum=0.5)(x)
        return nn.Dense(1)(x)


@STAGES
@pytest.mark.parametrize("num_microbatches", [1, 2])
def test_linen_batch_stats_come_back_averaged(stage, num_microbatches):
    model, x = Normed(), np.random.default_rng(0).normal(size=(32, 4)).astype(np.float32)
    variables = model.init(jax.random.key(0), x)
    like, stats = variables["params"], variables["batch_stats"]

    def loss_fn(params, batch, stats):
        given = {"params": params, "batch_stats": stats}
        out, new = model.apply(given, batch, mutable=["batch_stats"])
        return (out**2).mean(), new["batch_stats"]

    zero = make(stage, like=like)
    fn = zero.value_and_grad(loss_fn, has_aux=True, num_microbatches=num_microbatches)
    (_, new), _ = fn(zero.place(like), x, stats)
    assert jax.tree.map(jnp.shape, new) == jax.tree.map(jnp.shape, stats)
    want = 0.5 * x.reshape(8, 4, 4).mean(1).mean(0)
    assert np.allclose(new["BatchNorm_0"]["mean"], want, atol=1e-6)


def test_names_of_an_argument_may_be_given_with_or_without_what_is_around_them():
    stats = {"mean": np.ones(2, np.float32)}

    def loss_fn(params, batch, state):
        return (params["b"] ** 2).sum() * batch.mean(), {"mean": state["stats"]["mean"] + 1}

    zero = make(1, like=params(np.float32))
    fn = zero.value_and_grad(loss_fn, has_aux=True)
    (_, new), _ = fn(params(np.float32), np.ones((16, 3), np.float32), {"stats": stats})
    assert np.asarray(new["mean"]).tolist() == [2, 2]  # two rows a device, and yet no rows

    def rows(params, batch, pair):
        return (params["b"] ** 2).sum() * batch.mean(), (batch[:, 0], batch[:, 1])

    fn = zero.value_and_grad(rows, has_aux=True)
    pair = (np.zeros(2, np.float32), np.ones(2, np.float32))
    (_, new), _ = fn(params(np.float32), np.ones((16, 3), np.float32), pair)
    assert new[0].shape == (16,)  # the names "0" and "1" say nothing


def test_counts_that_would_differ_by_device_are_refused_or_summed_wide():
    def histogram(params, batch, state):
        counts = state["seen"] + jnp.ones(3, jnp.int32)
        return (params["b"] ** 2).sum() * batch.mean(), {"seen": counts}

    def small(params, batch):
        return (params["b"] ** 2).sum() * batch.mean(), (batch > 0).sum().astype(jnp.int8)

    zero, batch = make(1, like=params(np.float32)), np.ones((512, 3), np.float32)
    fn = zero.value_and_grad(histogram, has_aux=True)
    with pytest.raises(ValueError, match="seen, integers, as new values of a replicated argument"):
        fn(params(np.float32), batch, {"seen": np.zeros(3, np.int32)})
    for count in (1, 16):
        fn = zero.value_and_grad(small, has_aux=True, num_microbatches=count)
        (_, total), _ = fn(params(np.float32), batch[:, :1])
        assert int(total) == 512


class Counting(nnx.Module):
    """Counts calls, and what it is asked to count of the rows."""

    def __init__(self, of_rows: bool):
        self.w = nnx.Param(jnp.ones((16, 2)))
        self.calls, self.seen = nnx.Variable(jnp.int32(0)), nnx.Variable(jnp.int32(0))
        self.of_rows = of_rows

    def __call__(self, x):
        self.calls[...] += 1
        self.seen[...] += (x > 0).sum() if self.of_rows else 1
        return (x @ self.w[...]).mean()


@STAGES
def test_a_variable_of_integers_may_count_calls_but_not_rows(stage):
    zero, x = make(stage, like=nnx.eval_shape(lambda: Counting(True))), jnp.ones((8, 16))
    fn = zero.value_and_grad(lambda m, b: m(b))
    model = zero.place(Counting(False))
    fn(model, x)
    assert int(model.calls[...]) == 1
    with pytest.raises(ValueError, match=r"sets seen, Variables of integers, .*has_aux=True"):
        fn(zero.place(Counting(True)), x)


def test_a_raw_key_among_the_arguments_is_warned_of():
    zero = make(1, like=params(np.float32))
    fn = zero.value_and_grad(lambda p, b, key: (p["b"] ** 2).sum() * b.mean())
    with pytest.warns(UserWarning, match="looks like a raw PRNG key.*pass a typed one"):
        fn(params(np.float32), np.ones((8, 3), np.float32), jax.random.PRNGKey(0))


def test_modules_in_a_plain_tree_are_refused():
    modules = {"a": nnx.Linear(3, 3, rngs=nnx.Rngs(0))}
    with pytest.raises(ValueError, match=r"a dict with an nnx.Module in it; put the modules into"):
        jzero.Zero(jzero.make_mesh(), 1).value_and_grad(lambda m, b: b.mean())(modules, np.ones(8))


def test_keys_of_the_rows_make_dropout_independent_of_the_number_of_devices():
    def loss_fn(params, batch):
        keep = jax.vmap(lambda key: jax.random.bernoulli(key, 0.5, (13,)))(batch["key"])
        return ((batch["x"] * keep) @ params["w"]).sum(-1).mean()

    batch = {
        "x": np.random.default_rng(0).normal(size=(24, 13)).astype(np.float32),
        "key": jax.random.split(jax.random.key(7), 24),
    }
    tree = {"w": params(np.float32)["w"]}
    want = float(loss_fn(tree, batch))
    for num_devices, num_microbatches in ((8, 1), (3, 4)):
        zero = make(2, num_devices, like=tree)
        fn = zero.value_and_grad(loss_fn, num_microbatches=num_microbatches)
        loss, _ = fn(zero.place(tree), batch)
        assert float(loss) == pytest.approx(want, rel=1e-5)


@STAGES
def test_clipping_acts_once_on_the_whole_gradient(stage):
    with jax.enable_x64(True):
        tx = optax.chain(optax.clip_by_global_norm(0.1), optax.sgd(1.0))
        zero = make(stage)
        placed, mine = zero.place(params()), zero.optimizer(tx)
        _, grads = zero.value_and_grad(summed, num_microbatches=3)(placed, masked_batch())
        updates, _ = mine.update(grads, mine.init(placed), placed)
        plain = jax.grad(mean_of_kept)(params(), masked_batch())
        want, _ = tx.update(plain, tx.init(params()), params())
        assert toys.max_difference(zero.gather(updates), want) <= TOLERANCE
