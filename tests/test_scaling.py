"""Loss scales follow the recorded traces; an overflow anywhere changes nothing anywhere."""

import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

import jzero
from jzero.precision import master_weights, with_state_dtype
from jzero.scaling import (
    LossScaleState,
    dynamic_loss_scale,
    skip_not_finite,
    static_loss_scale,
)
from jzero.skips import (
    check_skip_counts,
    check_skips,
    find_loss_scale_state,
    loss_scale,
    skip_counts,
    was_skipped,
)
from jzero.trees import named_leaves
from tests.test_precision import bitwise, cast, draw, dtypes, jitted

pytestmark = pytest.mark.filterwarnings("ignore:stage . with gradients")

TRACES = json.loads((pathlib.Path(__file__).parent / "data/loss_scale.json").read_text())["cases"]
TREE = {
    "layer": {"bias": jnp.ones(2), "count": jnp.int32(0), "kernel": jnp.ones(2)},
    "s": jnp.ones(()),
}
NAMES = ["layer.bias", "layer.kernel", "s"]
WRAPPERS = {
    "dynamic": dynamic_loss_scale,
    "static": lambda tx: static_loss_scale(tx, 128.0),
    "skip": skip_not_finite,
}


def scaled_by_trace(tx, case):
    is_stage0 = case["kind"] == "stage0"
    return dynamic_loss_scale(
        tx,
        initial_scale_power=case["initial_scale_power"],
        loss_scale_window=case["loss_scale_window"],
        hysteresis=1 if is_stage0 else case["hysteresis"],
        consecutive_hysteresis=case["consecutive_hysteresis"],
        min_loss_scale=case["min_loss_scale"],
        at_minimum="stay" if is_stage0 else "raise",
    )


@pytest.mark.parametrize("name", TRACES)
def test_the_scale_follows_the_recorded_trace_and_stops_at_its_step(name):
    case = TRACES[name]
    params = jnp.ones(3, jnp.float16)
    tx = scaled_by_trace(optax.sgd(0.1), case)
    state, update = tx.init(params), jax.jit(tx.update)
    scales = []
    for step, kind in enumerate(case["grads"]):
        grads = jnp.asarray([1.0, np.inf if kind == "B" else 1.0, 1.0], jnp.float16)
        _, state = update(grads, state, params)
        if step == case["raises_at_step"]:
            where = f"step {step}: the gradient of w overflows at the minimum"
            with pytest.raises(FloatingPointError, match=where):
                check_skips(state, {"w": jnp.ones(3)})
            break
        check_skips(state, {"w": jnp.ones(3)})
        scales.append(float(loss_scale(state)))
    assert scales == case["scale_after_each_step"]
    seen = case["grads"][: state.step]
    assert int(state.skipped_steps) == seen.count("B")
    assert int(state.last_overflow_step) == seen.rfind("B")


def with_overflow(grads, where, value=np.inf):
    grads = jax.tree.map(np.array, grads)
    leaf = grads["layer"][where]
    leaf[(-1,) * leaf.ndim] = value
    return jax.tree.map(jnp.asarray, grads)


SCHEDULE = optax.linear_schedule(1e-2, 0.0, 10)
CHAINS = {
    "adamw with a schedule": lambda: optax.adamw(SCHEDULE),
    "clipped master": lambda: optax.chain(
        optax.clip_by_global_norm(1.0), master_weights(optax.adamw(SCHEDULE))
    ),
    "noise with its key": lambda: optax.chain(
        optax.add_noise(0.1, 0.5, jax.random.key(0)), optax.sgd(0.1, momentum=0.9)
    ),
    "hyperparams": lambda: optax.inject_hyperparams(optax.adam)(SCHEDULE),
    "state in bfloat16": lambda: with_state_dtype(optax.adamw(SCHEDULE), jnp.bfloat16),
}


def key_data(tree):
    is_key = lambda x: jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)
    return jax.tree.map(lambda x: jax.random.key_data(x) if is_key(x) else x, tree)


@pytest.mark.parametrize(
    ("chain", "dtype", "value"),
    [
        ("adamw with a schedule", jnp.float32, np.inf),
        ("adamw with a schedule", jnp.bfloat16, np.nan),
        ("clipped master", jnp.float16, -np.inf),
        ("clipped master", jnp.bfloat16, np.inf),
        ("noise with its key", jnp.float32, np.nan),
        ("hyperparams", jnp.float16, np.inf),
        ("state in bfloat16", jnp.bfloat16, np.nan),
    ],
)
def test_a_skip_leaves_parameters_moments_counts_and_schedules_bit_identical(chain, dtype, value):
    params = jax.tree.map(lambda x: x.at[(0,) * x.ndim].set(-0.0), draw(0, dtype))
    for wrap in (dynamic_loss_scale, skip_not_finite):
        tx = wrap(CHAINS[chain]())
        p, state, step = params, tx.init(params), jitted(tx)
        for i in range(2):
            p, state = step(p, state, draw(i + 1, dtype))
        p = jax.tree.map(lambda x: x.at[(0,) * x.ndim].set(-0.0), p)
        after, skipped = step(p, state, with_overflow(draw(3, dtype), "kernel", value))
        assert bitwise(after, p)
        assert bitwise(key_data(skipped.inner), key_data(state.inner))
        assert int(skipped.skipped_steps) == 1
        assert int(skipped.nonfinite_leaf) == 1
        assert int(skipped.last_overflow_step) == 2
        again, _ = step(after, skipped, draw(4, dtype))
        assert not bitwise(again, after)
        assert step._cache_size() == 1


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_the_state_keeps_its_tree_and_dtypes_and_survives_donation(wrapper):
    params = draw(0, jnp.bfloat16)
    tx = WRAPPERS[wrapper](optax.chain(optax.trace(0.9), optax.adamw(1e-2)))
    state = tx.init(params)
    abstract = jax.eval_shape(tx.init, params)
    update = jax.jit(lambda g, s, p: tx.update(g, s, p)[1], donate_argnums=1)
    for i in range(3):
        grads = draw(i, jnp.bfloat16)
        state = update(with_overflow(grads, "bias") if i == 1 else grads, state, params)
    assert dtypes(state) == dtypes(abstract)
    assert jax.tree.structure(state) == jax.tree.structure(abstract)
    assert update._cache_size() == 1
    back = jax.tree.unflatten(jax.tree.structure(state), jax.tree.leaves(jax.device_get(state)))
    assert isinstance(back, LossScaleState)
    update(draw(5, jnp.bfloat16), jax.tree.map(jnp.asarray, back), params)
    assert update._cache_size() == 1


def test_gradients_are_widened_before_they_are_divided():
    tx = dynamic_loss_scale(optax.sgd(1.0))  # 65536
    for dtype in (jnp.float16, jnp.bfloat16, jnp.float32):
        grads = jnp.asarray([1.0, 2.0**-14], dtype)
        updates, _ = tx.update(grads, tx.init(grads), grads)
        assert updates.dtype == jnp.float32
        assert updates.tolist() == [-(2.0**-16), -(2.0**-30)]  # the second is below float16
    with jax.enable_x64(True):
        grads = jnp.asarray([1 + 2.0**-40])
        updates, _ = tx.update(grads, tx.init(grads), grads)
        assert updates.tolist() == [-(2.0**-16 + 2.0**-56)]


def test_training_under_a_scale_of_two_to_a_power_equals_training_without_bitwise():
    params = draw(0, jnp.float32)
    tx, plain = dynamic_loss_scale(optax.adamw(1e-2), initial_scale_power=8), optax.adamw(1e-2)
    grads = draw(1, jnp.float32)
    scaled = jax.tree.map(lambda g: g * 256, grads)
    got, state = tx.update(scaled, tx.init(params), params)
    want, want_state = plain.update(grads, plain.init(params), params)
    assert bitwise((got, state.inner), (want, want_state))


def test_clipping_inside_acts_on_unscaled_gradients():
    tx = static_loss_scale(optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(1.0)), 1024.0)
    grads = jnp.asarray([512.0])
    assert tx.update(grads, tx.init(grads), grads)[0].tolist() == [-0.5]


def test_master_weights_outside_of_the_scale_skip_as_well():
    params = draw(0, jnp.float16)
    orders = [
        dynamic_loss_scale(master_weights(optax.adamw(1e-2))),
        master_weights(dynamic_loss_scale(optax.adamw(1e-2))),
    ]
    ends = []
    for tx in orders:
        p, state, step = params, tx.init(params), jitted(tx)
        for i in range(4):
            grads = jax.tree.map(lambda g: g * 8, draw(i, jnp.float16))
            p, state = step(p, state, with_overflow(grads, "bias") if i == 2 else grads)
        assert int(find_loss_scale_state(state).skipped_steps) == 1
        ends.append(p)
    assert bitwise(*ends)


def test_the_scale_never_grows_to_infinity():
    tx = dynamic_loss_scale(optax.sgd(0.1), initial_scale_power=126, loss_scale_window=1)
    state, params = tx.init(jnp.ones(1)), jnp.ones(1)
    for _ in range(5):
        _, state = tx.update(params, state, params)
    assert float(loss_scale(state)) == 2.0**127


@pytest.mark.parametrize(("is_consecutive", "scales"), [(False, [4, 4, 2]), (True, [4, 4, 4])])
def test_a_good_step_refills_the_hysteresis_only_where_asked_for(is_consecutive, scales):
    tx = dynamic_loss_scale(
        optax.sgd(0.1), initial_scale_power=2, consecutive_hysteresis=is_consecutive
    )
    state, params, got = tx.init(jnp.ones(1)), jnp.ones(1), []
    for value in (np.inf, 1.0, np.inf):
        _, state = tx.update(params * value, state, params)
        got.append(float(loss_scale(state)))
    assert got == scales


def test_the_scale_falls_to_a_minimum_that_is_no_power_of_the_factor():
    tx = dynamic_loss_scale(
        optax.sgd(0.1), initial_scale_power=3, hysteresis=1, min_loss_scale=3.0, at_minimum="stay"
    )
    state, params = tx.init(jnp.ones(1)), jnp.ones(1)
    scales = []
    for _ in range(3):
        _, state = tx.update(params * jnp.nan, state, params)
        scales.append(float(loss_scale(state)))
    assert scales == [4.0, 3.0, 3.0]
    assert int(state.skips_in_a_row) == 1


def test_integer_and_complex_leaves_go_through_and_are_checked():
    params = {"a": jnp.arange(3), "c": jnp.ones(3, jnp.complex64)}
    tx = skip_not_finite(optax.sgd(0.5))
    grads = {"a": jnp.zeros(3, jnp.int32), "c": jnp.asarray([1, complex(0, np.inf), 1])}
    updates, state = tx.update(grads, tx.init(params), params)
    assert int(state.nonfinite_leaf) == 0  # the first floating one
    after = optax.apply_updates(params, updates)
    assert bitwise(after, params)


# -- partitioned ----------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("chain", ["adamw with a schedule", "clipped master"])
def test_an_overflow_in_the_shard_of_one_device_makes_every_device_skip(stage, chain):
    dtype = jnp.float16 if "master" in chain else jnp.float32
    params = draw(0, dtype)
    zero = jzero.Zero(jzero.make_mesh(), stage, like=params)
    tx = zero.optimizer(dynamic_loss_scale(CHAINS[chain](), initial_scale_power=4, hysteresis=1))
    placed = zero.place(params)
    state, step = tx.init(placed), jitted(tx)
    placed, state = jax.block_until_ready(step(placed, state, laid_out(zero, draw(1, dtype))))
    before, inner = zero.gather(placed), zero.gather(state).inner
    grads = laid_out(zero, with_overflow(draw(2, dtype), "kernel"))
    shards = [np.asarray(s.data) for s in grads["layer"]["kernel"].addressable_shards]
    assert sum(not np.isfinite(s).all() for s in shards) == 1
    placed, state = jax.block_until_ready(step(placed, state, grads))
    assert bitwise(zero.gather(placed), before)
    assert bitwise(zero.gather(state).inner, inner)
    for shard in state.loss_scale.addressable_shards:
        assert float(shard.data) == 8.0
    assert NAMES[int(state.nonfinite_leaf)] == "layer.kernel"
    placed, state = jax.block_until_ready(step(placed, state, laid_out(zero, draw(3, dtype))))
    assert not bitwise(zero.gather(placed), before)
    assert step._cache_size() == 1


def laid_out(zero, grads):
    """Puts gradients as `zero.value_and_grad` leaves them at every stage: padded and cut."""
    layout = zero.layout(grads)

    def put(x, leaf):
        rows = [(0, leaf.padding if d == leaf.dim else 0) for d in range(x.ndim)]
        padded = np.pad(x, rows) if rows else x
        return jax.device_put(padded, jax.NamedSharding(zero.mesh, leaf.spec(("data",))))

    leaves, treedef = named_leaves(grads)
    return jax.tree.unflatten(treedef, [put(np.asarray(x), layout[n]) for n, x in leaves.items()])


@pytest.mark.parametrize(
    ("stage", "dtype"), [(s, d) for s in (1, 2, 3) for d in (jnp.float32, jnp.float16)]
)
def test_a_skip_keeps_minus_zero_in_partitioned_parameters(stage, dtype):
    params = {"w": jnp.full((13, 7), -0.0, dtype)}
    zero = jzero.Zero(jzero.make_mesh(), stage, like=params)
    tx = zero.optimizer(dynamic_loss_scale(master_weights(optax.sgd(0.1))))
    placed = zero.place(params)
    grads = laid_out(zero, {"w": jnp.full((13, 7), np.nan, dtype)})
    after, _ = jax.block_until_ready(jitted(tx)(placed, tx.init(placed), grads))
    assert bitwise(zero.gather(after), params)


@pytest.mark.parametrize("stage", [1, 3])
def test_a_loss_scaled_by_the_state_trains_as_one_that_is_not(stage):
    params = cast(draw(0, jnp.float32), jnp.float32)
    zero = jzero.Zero(jzero.make_mesh(), stage, like=params)
    batch = jnp.asarray(np.random.default_rng(1).normal(size=(8, 13)), jnp.float32)

    def loss_fn(p, x):
        y = x @ p["layer"]["kernel"]
        return (y**2).mean() * p["s"] + (p["layer"]["bias"] ** 2).sum()

    value_and_grad = zero.value_and_grad(loss_fn)
    ends = []
    for tx in (optax.sgd(0.125), dynamic_loss_scale(optax.sgd(0.125))):
        mine, p = zero.optimizer(tx), zero.place(params)
        state = mine.init(p)

        @jax.jit
        def step(p, state, mine=mine):
            loss, grads = value_and_grad(p, batch, loss_scale=loss_scale(state))
            updates, state = mine.update(grads, state, p)
            return optax.apply_updates(p, updates), state, loss

        p, state, _ = jax.block_until_ready(step(p, state))
        ends.append(zero.gather(p))
    for a, b in zip(*map(jax.tree.leaves, ends), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-6)  # float32, sums in another order


def test_an_explicit_mesh_skips_as_well():
    mesh = jax.make_mesh((8,), ("data",))
    params = {"w": jnp.ones((13, 7))}
    tx = jzero.Zero(mesh, 1).optimizer(dynamic_loss_scale(optax.adam(0.1)))
    with jax.set_mesh(mesh):
        params = jax.device_put(params, jax.NamedSharding(mesh, P()))
        grads = jax.tree.map(lambda x: x.at[12, 6].set(np.inf), params)
        after, state = jax.block_until_ready(jitted(tx)(params, tx.init(params), grads))
    assert bitwise(after, params)
    assert int(state.skipped_steps) == 1


# -- reading --------------------------------------------------------------------------------------


def test_the_scale_is_outermost_in_a_state_and_one_where_there_is_none():
    params = draw(0, jnp.bfloat16)
    tx = static_loss_scale(optax.sgd(0.1), 128.0)
    for outer in (tx, master_weights(tx)):
        scale = loss_scale(outer.init(params))
        assert scale.dtype == jnp.float32
        assert float(scale) == 128.0
    none = optax.adam(0.1).init(params)
    assert float(loss_scale(none)) == 1.0
    assert loss_scale(none).dtype == jnp.float32
    assert find_loss_scale_state(none) is None
    assert skip_counts(none) == {}
    check_skips(none, TREE)


def test_a_scale_inside_of_another_transform_is_refused():
    tx = dynamic_loss_scale(optax.sgd(0.1))
    for outer in (
        skip_not_finite(tx),
        optax.chain(optax.clip_by_global_norm(1.0), tx),
        optax.named_chain(("a", optax.identity()), ("b", tx)),
        optax.masked(tx, {"layer": True, "s": False}),
        optax.chain(skip_not_finite(optax.identity()), skip_not_finite(optax.sgd(0.1))),
    ):
        with pytest.raises(ValueError, match="see scaled gradients and go on where it skips; keep"):
            loss_scale(outer.init(draw(0, jnp.float32)))


def test_an_overflow_at_the_minimum_is_told_whenever_it_is_asked_for():
    tx = dynamic_loss_scale(optax.sgd(0.1), initial_scale_power=0, hysteresis=1)
    params = {"a_count": jnp.int32(0), "b": jnp.ones(2)}
    state = tx.init(params)
    for value in (1.0, jnp.inf, 1.0, 1.0):
        _, state = tx.update({"a_count": jnp.int32(0), "b": jnp.full(2, value)}, state, params)
    with pytest.raises(FloatingPointError, match="step 1: the gradient of b overflows at the min"):
        check_skips(state, params)


def test_whether_the_last_update_was_skipped_can_be_asked():
    tx = skip_not_finite(optax.sgd(0.1))
    state = tx.init(jnp.ones(2))
    assert not was_skipped(state)
    for value, is_skipped in ((jnp.nan, True), (1.0, False), (jnp.inf, True)):
        _, state = tx.update(jnp.full(2, value), state)
        assert bool(was_skipped(state)) == is_skipped
    assert not was_skipped(optax.sgd(0.1).init(jnp.ones(2)))


def test_the_scale_in_an_nnx_optimizer_is_found_and_skips():
    model = nnx.Linear(3, 5, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, static_loss_scale(optax.adam(0.1), 4.0), wrt=nnx.Param)
    before = np.asarray(model.kernel[...])
    grads = nnx.grad(lambda m: m(jnp.full((1, 3), np.inf)).sum())(model)
    optimizer.update(model, grads)
    assert float(loss_scale(optimizer.opt_state)) == 4.0
    assert int(skip_counts(optimizer.opt_state)["skipped_steps"]) == 1
    assert bitwise(model.kernel[...], before)


@pytest.mark.parametrize("wrapper", ["static", "skip"])
def test_ten_skips_in_a_row_stop_the_run_naming_step_leaf_and_scale(wrapper):
    params = draw(0, jnp.bfloat16)
    tx = WRAPPERS[wrapper](optax.adamw(1e-2))
    state, update = tx.init(params), jax.jit(tx.update)
    bad = with_overflow(with_overflow(draw(1, jnp.bfloat16), "kernel"), "bias", np.nan)
    for _ in range(9):
        _, state = update(bad, state, params)
    check_skips(state, TREE)
    _, good = update(draw(1, jnp.bfloat16), state, params)
    assert int(good.skips_in_a_row) == 0
    _, state = update(bad, state, params)
    scale = "128" if wrapper == "static" else "1"
    with pytest.raises(
        FloatingPointError,
        match=rf"^step 9: 10 updates in a row .* layer\.bias is not finite at loss scale {scale};"
        " lower the learning rate",
    ):
        check_skips(state, TREE)
    with pytest.raises(FloatingPointError, match="^step 500: 10 updates"):
        check_skips(state, TREE, step=500)
    check_skips(state, TREE, max_skips_in_a_row=None)
    check_skips(state, TREE, max_skips_in_a_row=11)


def test_overflows_that_a_lower_scale_can_mend_are_not_counted_in_a_row():
    tx = dynamic_loss_scale(optax.sgd(0.1), initial_scale_power=15)
    state, params = tx.init(jnp.ones(1)), jnp.ones(1)
    update = jax.jit(tx.update)
    for _ in range(16):
        _, state = update(params * jnp.inf, state, params)
        check_skips(state, {"w": jnp.ones(3)}, max_skips_in_a_row=1)
    assert (int(state.skips_in_a_row), float(state.loss_scale)) == (0, 1.0)
    assert int(state.skipped_steps) == 16
    _, state = update(params * jnp.inf, state, params)
    with pytest.raises(FloatingPointError, match="step 16: the gradient of w overflows at the min"):
        check_skips(state, {"w": jnp.ones(3)}, max_skips_in_a_row=None)


def test_staying_at_the_minimum_stops_only_after_the_limit():
    tx = dynamic_loss_scale(optax.sgd(0.1), initial_scale_power=0, hysteresis=1, at_minimum="stay")
    state, params = tx.init(jnp.ones(1)), jnp.ones(1)
    for _ in range(3):
        _, state = tx.update(params * jnp.inf, state, params)
    check_skips(state, {"w": jnp.ones(3)})
    with pytest.raises(FloatingPointError, match="3 updates in a row"):
        check_skips(state, {"w": jnp.ones(3)}, max_skips_in_a_row=3)


def test_fetched_numbers_are_checked_without_arrays():
    counts = {"loss_scale": 2.0, "last_overflow_step": 6.0, "skips_in_a_row": 3.0,
              "nonfinite_leaf": 5.0}  # fmt: skip
    check_skip_counts(counts | {"is_stuck": 0.0}, ["w"])
    check_skip_counts({}, [])
    with pytest.raises(FloatingPointError, match="step 6: 3 updates in a row .* leaf 5 is not"):
        check_skip_counts(counts | {"is_stuck": 0.0}, ["w"], max_skips_in_a_row=3)
    with pytest.raises(ValueError, match="max_skips_in_a_row 0 must be an integer of at least 1"):
        check_skip_counts({}, [], max_skips_in_a_row=0)


@pytest.mark.parametrize(
    ("argument", "value", "match"),
    [
        ("loss_scale_window", 0, "must be an integer of at least 1"),
        ("loss_scale_window", 2.5, "must be an integer of at least 1"),
        ("hysteresis", 0, "must be an integer of at least 1"),
        ("hysteresis", True, "must be an integer of at least 1"),
        ("min_loss_scale", 0.0, "must be a positive number"),
        ("min_loss_scale", float("nan"), "must be a positive number"),
        ("min_loss_scale", 2.0**17, "power 16 starts at 65536, below .* 131072; use at least 17"),
        ("initial_scale_power", 128, "must be an integer from -126 to 127"),
        ("initial_scale_power", 16.0, "must be an integer from -126 to 127"),
        ("scale_factor", 1.0, "must be above 1; the usual one is 2"),
        ("scale_factor", float("inf"), "must be a positive number"),
        ("at_minimum", "stop", 'is unknown; use "raise" or "stay"'),
    ],
)
def test_a_bad_argument_is_refused(argument, value, match):
    with pytest.raises(ValueError, match=match):
        dynamic_loss_scale(optax.sgd(0.1), **{argument: value})


@pytest.mark.parametrize("value", [0, -1.0, float("inf"), float("nan"), 1e39, "dynamic", True])
def test_a_static_scale_must_be_positive_and_finite(value):
    with pytest.raises(ValueError, match="loss_scale .* must be a positive number, finite in"):
        static_loss_scale(optax.sgd(0.1), value)
