"""Policies: one name gives the dtype of everything, each may be given separately."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jzero
from jzero.policies import POLICIES, Policy, policy, with_policy

pytestmark = pytest.mark.filterwarnings("ignore:stage . with gradients")


def test_the_policies_are_the_ones_of_the_table():
    names = [name for name, _ in policy("float32").rows()]
    assert names == [
        "param_dtype",
        "compute_dtype",
        "accumulator_dtype",
        "reduce_dtype",
        "state_dtype",
        "master_dtype",
        "loss_scale",
    ]
    f32, b16, f16 = "float32", "bfloat16", "float16"
    assert {k: [v for _, v in policy(k).rows()] for k in POLICIES} == {
        f32: [f32, f32, f32, f32, f32, "none", "none, no finite check"],
        b16: [b16, b16, f32, b16, f32, f32, "1.0, finite check only"],
        f16: [f16, f16, f32, f16, f32, f32, "dynamic"],
    }


@pytest.mark.parametrize("field", [n for n, _ in policy("float32").rows()][:5])
def test_every_dtype_is_overridden_separately(field):
    other = policy("float16", **{field: "bfloat16"})
    changed = [a[0] for a, b in zip(other.rows(), policy("float16").rows(), strict=True) if a != b]
    follows = ["reduce_dtype"] if field == "param_dtype" else []  # gradients have the params' dtype
    assert changed == [field, *follows]
    assert getattr(other, field) == jnp.bfloat16


def test_what_is_left_out_follows_from_parameters_and_products():
    mixed = policy("bfloat16", param_dtype="float32")
    assert (mixed.reduce_dtype, mixed.master_dtype) == (jnp.float32, None)
    assert mixed.loss_scale == 1.0
    assert policy("float32", param_dtype="bfloat16").master_dtype == jnp.float32
    assert policy("float32", compute_dtype="float16").loss_scale == "dynamic"
    with jax.enable_x64(True):
        wide = policy("float32", param_dtype="float64")
        assert wide.accumulator_dtype == wide.state_dtype == wide.reduce_dtype == jnp.float64
        assert policy("bfloat16", master_dtype="float64").state_dtype == jnp.float64
        with pytest.raises(ValueError, match="set state_dtype to float32, or master_dtype to flo"):
            policy("bfloat16", state_dtype="float64")


def test_a_dtype_that_cannot_be_had_is_refused():
    with pytest.raises(ValueError, match="reduce_dtype 'int32' is no dtype to compute in"):
        policy("float32", reduce_dtype="int32")
    with pytest.raises(ValueError, match="param_dtype float64 is switched off in jax"):
        policy("float32", param_dtype="float64")


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_policy_wraps_an_optimizer_that_trains_in_shards(stage):
    params = {"w": jnp.ones((13, 7), jnp.float16)}
    zero = jzero.Zero(jzero.make_mesh(), stage, like=params)
    tx = zero.optimizer(with_policy(optax.adamw(0.1), policy("float16"), initial_scale_power=4))
    placed = zero.place(params)
    state = tx.init(placed)
    assert float(jzero.loss_scale(state)) == 16
    assert state.inner.inner[0].mu["w"].dtype == jnp.float32
    fn = zero.value_and_grad(lambda p, b: (b @ p["w"]).astype(jnp.float32).mean())
    _, grads = fn(placed, jnp.ones((8, 13), jnp.float16), loss_scale=jzero.loss_scale(state))
    updates, state = tx.update(grads, state, placed)
    new = zero.gather(optax.apply_updates(placed, updates))
    assert new["w"].dtype == jnp.float16
    assert np.allclose(np.asarray(new["w"], np.float32), 0.9, atol=1e-3)


def test_options_of_a_dynamic_scale_that_have_no_effect_are_refused():
    with pytest.raises(ValueError, match=r"hysteresis has no effect with loss_scale 1.0; leave it"):
        with_policy(optax.sgd(0.1), policy("bfloat16"), hysteresis=3)


def test_parameters_as_wide_as_the_master_have_none():
    assert policy("bfloat16", param_dtype="float32").master_dtype is None
    assert policy("bfloat16", param_dtype="float16").master_dtype == jnp.float32
    assert policy("bfloat16", master_dtype=None) == policy("bfloat16", master_dtype="none")
    assert policy("float16", loss_scale="none").loss_scale is None
    assert policy("float16", loss_scale=128).loss_scale == 128.0
    assert policy("float32", param_dtype="bfloat16", master_dtype="float32").master_dtype


@pytest.mark.parametrize(
    ("overrides", "match"),
    [
        ({"param_dtype": "float32", "master_dtype": "float32"}, "float32 is not wider than param"),
        ({"master_dtype": "float16"}, "float16 is not wider than param_dtype bfloat16; leave"),
        ({"loss_scale": 0}, 'loss_scale 0 is not usable; give "dynamic"'),
        ({"loss_scale": -2.0}, "loss_scale -2.0 is not usable"),
        ({"loss_scale": float("inf")}, "loss_scale inf is not usable"),
        ({"loss_scale": True}, "loss_scale True is not usable"),
        ({"loss_scale": "dynamo"}, "loss_scale 'dynamo' is not usable"),
        ({"moment_dtype": "float32"}, "moment_dtype is no field of a policy; use param_dtype"),
    ],
)
def test_an_override_that_makes_no_sense_is_refused(overrides, match):
    with pytest.raises(ValueError, match=match):
        policy("bfloat16", **overrides)


def test_an_unknown_policy_is_refused_and_a_policy_is_frozen():
    with pytest.raises(ValueError, match="policy 'fp8' is unknown; use one of float32, bfloat16"):
        policy("fp8")
    with pytest.raises(AttributeError):
        policy("float32").param_dtype = "bfloat16"
    with pytest.raises(ValueError, match="not wider"):
        Policy("float32", "float32", "float32", "float32", "float32", "float32", None)
