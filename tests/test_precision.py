"""Master weights and state dtypes equal wide training, alone and partitioned."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jzero
from jzero.precision import MasterWeightsState, exact_update, master_weights, with_state_dtype
from jzero.trees import named_leaves

pytestmark = pytest.mark.filterwarnings("ignore:stage . with gradients")

NARROW = {"bfloat16": jnp.bfloat16, "float16": jnp.float16}
SHAPES = {"layer": {"kernel": (13, 7), "bias": (5,)}, "s": ()}


def is_shape(x):
    return isinstance(x, tuple)


def draw(seed, dtype):
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda s: jnp.asarray(rng.normal(size=s), dtype), SHAPES, is_leaf=is_shape)


def bitwise(a, b):
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return all(
        x.dtype == y.dtype
        and x.shape == y.shape
        and np.asarray(x).tobytes() == np.asarray(y).tobytes()
        for x, y in pairs
    )


def cast(tree, dtype):
    return jax.tree.map(lambda x: x.astype(dtype), tree)


def dtypes(tree):
    return [(name, str(x.dtype)) for name, x in named_leaves(tree)[0].items()]


def jitted(tx):
    def step(params, state, grads):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return jax.jit(step)


@pytest.mark.parametrize("dtype", NARROW.values(), ids=NARROW)
def test_parameters_under_a_master_are_float32_training_rounded_bitwise_at_every_step(dtype):
    params = draw(0, dtype)
    wide, narrow = optax.adamw(1e-2), master_weights(optax.adamw(1e-2))
    want, want_state = cast(params, jnp.float32), wide.init(cast(params, jnp.float32))
    state = narrow.init(params)
    for i in range(4):  # op by op: in one program, XLA fuses multiply-adds as it likes
        grads = draw(i + 1, dtype)
        updates, state = narrow.update(grads, state, params)
        params = optax.apply_updates(params, updates)
        updates, want_state = wide.update(cast(grads, jnp.float32), want_state, want)
        want = optax.apply_updates(want, updates)
        assert bitwise(state.master, want)
        assert bitwise(state.inner, want_state)
        assert bitwise(params, cast(want, dtype))


@pytest.mark.parametrize("dtype", NARROW.values(), ids=NARROW)
def test_parameters_are_their_own_master_rounded_bitwise_under_jit(dtype):
    params, tx = draw(0, dtype), master_weights(optax.adamw(1e-1))
    state, step = tx.init(params), jitted(tx)
    for i in range(20):
        params, state = step(params, state, draw(i + 1, dtype))
        assert bitwise(params, cast(state.master, dtype))
    assert step._cache_size() == 1


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("dtype", NARROW.values(), ids=NARROW)
def test_master_weights_partitioned_equal_plain_ones_bitwise_and_are_cut(stage, dtype):
    tx, params = master_weights(optax.adamw(1e-2)), draw(0, dtype)
    zero = jzero.Zero(jzero.make_mesh(), stage, like=params)
    mine = zero.optimizer(tx)
    placed = zero.place(params)
    state, plain_state = mine.init(placed), tx.init(params)
    step, plain = jitted(mine), jitted(tx)
    for i in range(3):
        grads = draw(i + 1, dtype)
        placed, state = jax.block_until_ready(step(placed, state, zero.place(grads)))
        params, plain_state = plain(params, plain_state, grads)
        assert bitwise(zero.gather(placed), params)
    assert bitwise(zero.gather(state), plain_state)
    assert step._cache_size() == 1
    assert dtypes(state) == dtypes(plain_state)
    for x in jax.tree.leaves((state.master, state.inner[0].mu)):
        assert x.dtype == jnp.float32
        assert not x.ndim or x.addressable_shards[0].data.size * 8 == x.size


@pytest.mark.parametrize("stage", [1, 2])
def test_what_is_gathered_under_a_master_is_the_16_bit_parameters(stage):
    params = {"w": draw(0, jnp.bfloat16)["layer"]["kernel"]}
    zero = jzero.Zero(jzero.make_mesh(), stage)
    tx = zero.optimizer(master_weights(optax.adamw(1e-2)))
    placed = zero.place(params)
    text = jax.jit(tx.update).lower(params, tx.init(placed), placed).as_text()
    gathers = [line for line in text.splitlines() if "all_gather" in line]
    assert gathers
    assert all("bf16" in line for line in gathers)


def test_only_narrow_floating_leaves_have_a_master():
    params = {
        "narrow": jnp.ones(3, jnp.bfloat16),
        "wide": jnp.ones(3),
        "count": jnp.arange(3),
        "complex": jnp.ones(3, jnp.complex64),
    }
    tx = master_weights(optax.sgd(0.5))
    state = tx.init(params)
    assert list(named_leaves(state.master)[0]) == ["narrow"]
    grads = jax.tree.map(jnp.ones_like, params) | {"count": jnp.zeros(3, jnp.int32)}
    updates, state = tx.update(grads, state, params)
    assert {k: str(x.dtype) for k, x in optax.apply_updates(params, updates).items()} == {
        "narrow": "bfloat16",
        "wide": "float32",
        "count": "int32",
        "complex": "complex64",
    }
    assert updates["narrow"].dtype == jnp.float32
    assert updates["wide"].tolist() == [-0.5] * 3
    assert updates["count"].tolist() == [0] * 3


def test_a_master_in_float64_is_kept_in_float64():
    with jax.enable_x64(True):
        params = {"w": jnp.ones(3, jnp.float32), "c": jnp.ones(3, jnp.complex64)}
        tx = master_weights(optax.sgd(1e-12), jnp.float64)
        updates, state = tx.update(params, tx.init(params), params)
        assert dtypes(state.master) == [("c", "complex128"), ("w", "float64")]
        assert updates["w"].dtype == jnp.float64
        assert state.master["w"].tolist() == [1 - 1e-12] * 3


def test_steps_too_small_for_bfloat16_add_up_in_the_master():
    params = {"w": jnp.ones(3, jnp.bfloat16)}
    grads = {"w": jnp.full(3, 1.0, jnp.bfloat16)}
    ends = []
    for tx in (optax.sgd(1e-3), master_weights(optax.sgd(1e-3))):
        state, p, step = tx.init(params), params, jitted(tx)
        for _ in range(20):
            p, state = step(p, state, grads)
        ends.append(float(p["w"][0]))
    assert ends == [1.0, 0.98046875]


@pytest.mark.parametrize("dtype", NARROW.values(), ids=NARROW)
def test_an_exact_update_reaches_any_nearby_value_and_keeps_the_sign_of_zero(dtype):
    rng = np.random.default_rng(0)
    old = rng.normal(size=4096).astype(dtype)
    new = (np.asarray(old, np.float32) * rng.uniform(-2, 2, size=4096)).astype(dtype)
    new[:6] = [
        0.0,
        -0.0,
        0.0,
        1.0,
        np.inf,
        {"bfloat16": 2.0**-15, "float16": 2.0**-24}[old.dtype.name],
    ]
    old[:6] = [0.0, -0.0, -0.0, -0.0, np.inf, 1.0]
    apply = jax.jit(lambda new, old: optax.apply_updates(old, exact_update(new, old, jnp.float32)))
    assert bitwise(apply(jnp.asarray(new), jnp.asarray(old)), new)


def test_rounding_to_the_parameters_dtype_cannot_be_compiled_away():
    # XLA for GPUs cancels f32 -> bf16 -> f32 unless something stands between (seen in its program
    # of 0.12.0.1); its CPU backend does not, so numbers here could not tell.
    params = {"w": jnp.ones(3, jnp.bfloat16)}
    tx = master_weights(optax.sgd(0.1))
    text = jax.jit(tx.update).lower(params, tx.init(params), params).as_text()
    barriers = [line for line in text.splitlines() if "optimization_barrier" in line]
    assert len(barriers) == 1
    assert "tensor<3xbf16>" in barriers[0]


def test_a_parameter_that_shrinks_beyond_reach_is_near_at_once_and_exact_after_the_next_update():
    params = {"w": jnp.ones(1, jnp.bfloat16)}
    tx = master_weights(optax.sgd(1.0))
    state, step = tx.init(params), jitted(tx)
    tiny = np.float32(2**-24 - 1)  # 1 + tiny = 2**-24, below half a unit of 2**-16
    params, state = step(params, state, {"w": jnp.full(1, -tiny)})
    assert float(state.master["w"][0]) == 2**-24
    assert abs(float(params["w"][0]) - 2**-24) <= 2**-24
    params, state = step(params, state, {"w": jnp.zeros(1)})
    assert float(params["w"][0]) == 2**-24


def test_an_update_that_changes_nothing_keeps_minus_zero():
    params = {"w": jnp.asarray([-0.0, 0.0, 1.5], jnp.bfloat16)}
    for tx in (master_weights(optax.set_to_zero()), master_weights(optax.sgd(0.0))):
        updates, _ = tx.update(params, tx.init(params), params)
        assert bitwise(optax.apply_updates(params, updates)["w"][1:], params["w"][1:])
        assert np.signbit(np.asarray(updates["w"], np.float32))[1:].all()


INNER = {
    "adamw": lambda: optax.adamw(1e-2),
    "sgd": lambda: optax.sgd(1e-2, momentum=0.9),
    "adafactor": lambda: optax.adafactor(1e-2, min_dim_size_to_factor=4),
    "noise": lambda: optax.chain(optax.add_noise(0.1, 0.5, jax.random.key(0)), optax.sgd(0.1)),
    "inject": lambda: optax.inject_hyperparams(optax.adam)(1e-2),
    "mu in bfloat16": lambda: optax.adam(1e-2, mu_dtype=jnp.bfloat16),
    "masked": lambda: optax.masked(optax.adam(1e-2), {"layer": True, "s": False}),
}
WRAPPERS = {
    "master": master_weights,
    "state": with_state_dtype,
    "state bfloat16": lambda tx: with_state_dtype(tx, jnp.bfloat16),
    "master of state bfloat16": lambda tx: master_weights(with_state_dtype(tx, jnp.bfloat16)),
}


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("inner", INNER)
def test_the_tree_and_dtypes_of_the_state_never_change(inner, wrapper):
    params = draw(0, jnp.bfloat16)
    tx = WRAPPERS[wrapper](INNER[inner]())
    state = tx.init(params)
    abstract = jax.eval_shape(tx.init, params)
    step, first = jitted(tx), dtypes(state)
    for i in range(3):
        params, state = step(params, state, draw(i, jnp.bfloat16))
    assert dtypes(state) == first == dtypes(abstract)
    assert jax.tree.structure(state) == jax.tree.structure(abstract)
    assert step._cache_size() == 1
    assert {str(x.dtype) for x in jax.tree.leaves(params)} == {"bfloat16"}


def test_moments_of_bfloat16_parameters_are_float32_by_default():
    params, tx = draw(0, jnp.bfloat16), optax.adam(1e-2)
    assert tx.init(params)[0].nu["s"].dtype == jnp.bfloat16  # optax alone
    state = with_state_dtype(tx).init(params)
    assert {str(x.dtype) for x in jax.tree.leaves((state[0].mu, state[0].nu))} == {"float32"}
    wide = optax.adam(1e-2)
    want_state, mine = wide.init(cast(params, jnp.float32)), with_state_dtype(tx)
    got, state = mine.update(draw(1, jnp.bfloat16), state, params)
    want, want_state = wide.update(
        cast(draw(1, jnp.bfloat16), jnp.float32), want_state, cast(params, jnp.float32)
    )
    assert bitwise(got, want)
    assert bitwise(state, want_state)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float64])
def test_without_a_dtype_wide_parameters_train_as_in_plain_optax_bitwise(dtype):
    with jax.enable_x64(dtype == jnp.float64):
        params, tx = draw(0, dtype), optax.adamw(1e-2)
        mine = with_state_dtype(tx)
        got, got_state = mine.update(draw(1, dtype), mine.init(params), params)
        want, want_state = tx.update(draw(1, dtype), tx.init(params), params)
        assert bitwise((got, got_state), (want, want_state))


def test_a_state_dtype_is_for_what_mirrors_a_parameter_and_never_for_scalars():
    params = draw(0, jnp.float32) | {"learning_rate": jnp.ones(())}
    tx = with_state_dtype(optax.inject_hyperparams(optax.adam)(1e-2), jnp.bfloat16)
    state = tx.init(params)
    stored = dict(dtypes(state))
    assert stored["hyperparams.learning_rate"] == "float32"
    assert stored["inner_state.0.count"] == "int32"
    assert stored["inner_state.0.mu.layer.kernel"] == "bfloat16"
    assert stored["inner_state.0.nu.layer.bias"] == "bfloat16"
    assert stored["inner_state.0.nu.s"] == "float32"
    factored = with_state_dtype(optax.adafactor(1e-2, min_dim_size_to_factor=8), jnp.bfloat16)
    stored = dict(dtypes(factored.init({"w": jnp.ones((13, 9)), "v": jnp.ones(5)})))
    assert stored["0.v_row.w"] == stored["0.v_col.w"] == "float32"
    assert stored["0.v.v"] == "bfloat16"


@pytest.mark.parametrize(
    "tx", [optax.flatten(optax.adam(1.0)), optax.adafactor(1.0, min_dim_size_to_factor=4)]
)
def test_a_state_dtype_without_effect_is_refused(tx):
    with pytest.raises(ValueError, match="state_dtype bfloat16 has no effect on this optimizer"):
        with_state_dtype(tx, "bfloat16").init({"w": jnp.ones((13, 7))})


def test_moments_in_16_bits_beside_a_master_are_warned_of():
    params = {"a": jnp.ones(16, jnp.bfloat16), "b": jnp.ones(16, jnp.bfloat16)}
    parts = {"m": master_weights(optax.adam(1e-3)), "p": optax.adam(1e-3)}
    tx = jzero.Zero(jzero.make_mesh(), 1).optimizer(optax.partition(parts, {"a": "m", "b": "p"}))
    with pytest.warns(UserWarning, match=r"16 bits beside master_weights: .*mu\.b.*around the"):
        tx.init(params)


def test_a_state_is_widened_again_before_each_update():
    params, tx = {"w": jnp.ones(3)}, with_state_dtype(optax.trace(0.99), jnp.bfloat16)
    state = tx.init(params)
    _, state = tx.update({"w": jnp.ones(3)}, state, params)
    updates, state = tx.update({"w": jnp.full(3, 2.0**-12)}, state, params)
    want = np.float32(0.99) + np.float32(2.0**-12)  # neither product nor sum in bfloat16
    assert updates["w"].tolist() == [want] * 3
    assert state.trace["w"].dtype == jnp.bfloat16
    assert state.trace["w"].tolist() == [float(jnp.bfloat16(want))] * 3


def test_hyperparams_stay_float32_for_bfloat16_parameters():
    tx = optax.inject_hyperparams(optax.adam)(1e-3)
    params = draw(0, jnp.bfloat16)
    for wrap in WRAPPERS.values():
        mine = wrap(tx)
        _, state = mine.update(draw(1, jnp.bfloat16), mine.init(params), params)
        state = state.inner if isinstance(state, MasterWeightsState) else state
        assert state.hyperparams["learning_rate"].dtype == jnp.float32
        assert state.hyperparams["learning_rate"] == np.float32(1e-3)


def test_a_lower_dtype_asked_for_inside_optax_is_honoured():
    tx = optax.adam(1e-3, mu_dtype=jnp.bfloat16)
    for wrap in (with_state_dtype, lambda tx: with_state_dtype(tx, "float32")):
        state = wrap(tx).init(draw(0, jnp.bfloat16))
        assert state[0].mu["layer"]["kernel"].dtype == jnp.bfloat16
        assert state[0].nu["layer"]["kernel"].dtype == jnp.float32


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_state_dtype_partitioned_equals_the_plain_one_bitwise_and_halves_the_bytes(stage):
    # Powers of two: every product is exact, so that fused multiply-adds change nothing.
    tx = with_state_dtype(optax.sgd(2.0**-7, momentum=0.5), jnp.bfloat16)
    params = draw(0, jnp.float32)
    zero = jzero.Zero(jzero.make_mesh(), stage, like=params)
    mine = zero.optimizer(tx)
    placed, plain_state = zero.place(params), tx.init(params)
    state, step, plain = mine.init(placed), jitted(mine), jitted(tx)
    for i in range(3):
        grads = draw(i + 1, jnp.float32)
        placed, state = jax.block_until_ready(step(placed, state, zero.place(grads)))
        params, plain_state = plain(params, plain_state, grads)
    assert bitwise(zero.gather(placed), params)
    assert bitwise(zero.gather(state), plain_state)
    assert state[0].trace["layer"]["kernel"].addressable_shards[0].data.nbytes == 13 * 1 * 2
    assert step._cache_size() == 1


def test_an_extra_argument_goes_through_both_wrappers():
    tx = optax.chain(
        optax.sgd(1.0), optax.contrib.reduce_on_plateau(factor=0.5, patience=0, rtol=0, atol=1e9)
    )
    grads = params = {"w": jnp.ones(3, jnp.bfloat16)}
    mine = master_weights(with_state_dtype(tx))
    state = mine.init(params)
    for _ in range(3):
        updates, state = mine.update(grads, state, params, value=jnp.float32(1))
        params = optax.apply_updates(params, updates)
    assert float(updates["w"][0]) == -0.5


def test_an_nnx_optimizer_takes_master_weights_unchanged():
    model = nnx.Linear(3, 5, param_dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, master_weights(optax.adam(1e-2)), wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer, x):
        grads = nnx.grad(lambda m: (m(x) ** 2).sum())(model)
        optimizer.update(model, grads)

    before = np.asarray(model.kernel[...], np.float32)
    for _ in range(2):
        step(model, optimizer, jnp.ones((2, 3), jnp.bfloat16))
    assert model.kernel[...].dtype == jnp.bfloat16
    assert (np.asarray(model.kernel[...], np.float32) != before).any()
    master = optimizer.opt_state.master["kernel"][...]
    assert bitwise(master.astype(jnp.bfloat16), model.kernel[...])


def test_an_update_without_parameters_is_refused():
    params = jnp.ones(3, jnp.bfloat16)
    for tx in (master_weights(optax.sgd(0.1)), with_state_dtype(optax.sgd(0.1), "bfloat16")):
        with pytest.raises(ValueError, match=r"call tx.update\(grads, opt_state, params\)"):
            tx.update(params, tx.init(params))


@pytest.mark.parametrize(
    ("dtype", "match"),
    [
        ("int32", "'int32' is no dtype to compute in; use one of float16"),
        ("brainfloat", "'brainfloat' is no dtype to compute in"),
        ("complex64", "'complex64' is no dtype to compute in"),
        ("float64", "float64 is switched off in jax.*jax_enable_x64"),
    ],
)
def test_a_dtype_that_cannot_be_had_is_refused(dtype, match):
    with pytest.raises(ValueError, match=f"master_dtype {match}"):
        master_weights(optax.sgd(0.1), dtype)
    with pytest.raises(ValueError, match=f"state_dtype {match}"):
        with_state_dtype(optax.sgd(0.1), dtype)


def test_a_state_dtype_around_a_master_is_refused():
    tx = with_state_dtype(master_weights(optax.adam(1e-3)), "bfloat16")
    with pytest.raises(ValueError, match=r"write master_weights\(with_state_dtype"):
        tx.init(jnp.ones(3, jnp.bfloat16))


def test_a_state_wider_than_the_computation_is_refused():
    with jax.enable_x64(True):
        tx = with_state_dtype(optax.adam(1e-3), "float64")
        with pytest.raises(ValueError, match=r"wider than the float32 .* 0.mu.w; use float32"):
            tx.init({"w": jnp.ones(3, jnp.float32)})


def test_a_transform_that_is_cut_already_is_refused():
    params = {"w": jnp.ones(16, jnp.bfloat16)}
    cut = jzero.Zero(jzero.make_mesh(), 1, like=params).optimizer(optax.adam(1e-3))
    for wrap in (master_weights, with_state_dtype, jzero.skip_not_finite, jzero.dynamic_loss_scale):
        with pytest.raises(ValueError, match=r"around zero.optimizer\(tx\) .* put it inside"):
            wrap(cut)
