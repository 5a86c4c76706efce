"""The state of a run between steps: what a step takes over, and what a checkpoint holds."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jzero.policies import with_policy
from jzero.recipe import Setup
from jzero.restore import LOSS_SCALE, OPT_STATE, stored_names
from jzero.scaling import LossScaleState
from jzero.trees import named_leaves


class TrainState(NamedTuple):
    """What a step takes and gives back."""

    params: Any  # nnx.State of nnx.Param, at rest
    others: Any  # nnx.State of the model's other Variables
    opt_state: optax.OptState
    step: Any  # int32 (), steps done


def init_state(setup: Setup, key: jax.Array) -> TrainState:
    """The first state, born partitioned."""
    model = setup.zero.init(setup.make_model, key)
    _, params, others = nnx.split(model, nnx.Param, ...)
    return TrainState(params, others, setup.tx.init(params), replicated(setup, np.int32(0)))


def replicated(setup: Setup, x: Any) -> jax.Array:
    """A value that every device holds whole."""
    return jax.device_put(x, NamedSharding(setup.zero.mesh, P()))


def graphdef_of(setup: Setup) -> Any:
    """The static part of the model."""
    return nnx.split(setup.abstract)[0]


def state_parts(state: TrainState, key: jax.Array) -> dict[str, Any]:
    """The state and the run's random key as trees by part, as checkpoints name them."""
    run = {"step": state.step, "rng": key}
    return {"params": state.params, "others": state.others, OPT_STATE: state.opt_state, "run": run}


def abstract_parts(setup: Setup) -> dict[str, Any]:
    """`state_parts` of shapes alone."""
    _, params, others = nnx.split(setup.abstract, nnx.Param, ...)
    opt_state = jax.eval_shape(setup.tx.init, params)
    key = jax.eval_shape(lambda: jax.random.key(0))
    state = TrainState(params, others, opt_state, jax.ShapeDtypeStruct((), jnp.int32))
    return state_parts(state, key)


def fresh_loss_scale(setup: Setup) -> dict[str, np.ndarray]:
    """The scalars of a loss scale at its start, by stored name; empty where there is none."""
    options = setup.config.precision.scale_options
    small = jnp.zeros(1, setup.policy.param_dtype)
    state = with_policy(optax.identity(), setup.policy, **options).init(small)
    if not isinstance(state, LossScaleState):
        return {}
    leaves = named_leaves(state)[0]
    names = stored_names(OPT_STATE, state)
    return {names[n]: np.asarray(x) for n, x in leaves.items() if names[n].startswith(LOSS_SCALE)}
