"""What a run is made of: model, loss, optimizer and schedule, from what its configuration names."""

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jzero.config import DECAY_MASKS, Config, ModelConfig, OptimizerConfig, PrecisionConfig
from jzero.mesh import REPLICA_AXIS, make_mesh
from jzero.schema import find_optimizer, import_target, own_arguments, parameters
from jzero.trees import leaf_name
from jzero.zero import Zero


@dataclass(frozen=True)
class Setup:
    """A run before anything is compiled: shapes alone."""

    config: Config
    zero: Zero
    make_model: Callable[[jax.Array], nnx.Module]
    abstract: nnx.Module  # the model, with shapes in place of arrays
    tx: optax.GradientTransformation
    schedule: optax.Schedule

    @property
    def data_axes(self) -> tuple[str, ...]:
        """The mesh axes that split the batch."""
        axes = (REPLICA_AXIS, *(self.zero.axes or ()))
        return tuple(str(axis) for axis in self.zero.mesh.axis_names if axis in axes)

    @property
    def rows(self) -> int:
        """Rows of one microbatch on all devices together."""
        shards = math.prod(self.zero.mesh.shape[axis] for axis in self.data_axes)
        return self.config.train.micro_batch * shards

    @property
    def loss_fn(self) -> Callable[..., jax.Array]:
        """`loss_fn(model, tokens, key)`, to be put under `zero`."""
        return make_loss_fn(type(self.abstract), self.zero.run_layers)

    def place(self, rows: np.ndarray) -> jax.Array:
        """This process's rows (b, T + 1) as its share of the global batch, on the devices."""
        sharding = NamedSharding(self.zero.mesh, P(self.data_axes))
        return jax.make_array_from_process_local_data(sharding, rows)


def make_setup(config: Config) -> Setup:
    """Makes mesh, abstract model, Zero and optimizer, of which nothing is compiled or run."""
    _set_cpu_devices(config.mesh.num_cpu_devices)
    sizes = config.mesh
    mesh = make_mesh(replica=sizes.replica, data=sizes.data, model=sizes.model)
    make = model_factory(config.model, config.precision)

    def make_model(key: jax.Array) -> Any:
        return make(nnx.Rngs(key))

    abstract = nnx.eval_shape(lambda: make_model(jax.random.key(0)))
    if not isinstance(abstract, nnx.Module):
        raise ValueError(
            f"[model] target {config.model.target!r} makes a {type(abstract).__name__}, not a "
            "flax.nnx.Module; name a class of modules, or a function that returns one."
        )
    zero = Zero(
        mesh,
        config.zero.stage,
        axes=config.zero.axes or None,
        like=abstract,
        reduce_dtype=config.precision.reduce_dtype,
        min_size=config.zero.min_size,
    )
    schedule = make_schedule(config.optimizer, config.train.num_steps)
    tx = zero.optimizer(make_optimizer(config.optimizer, schedule))
    return Setup(config, zero, make_model, abstract, tx, schedule)


def trace_loss(setup: Setup) -> None:
    """Traces loss and gradients, so that errors of the model come before any compile.

    The report then knows which parameters are gathered where they are read.
    """
    value_and_grad = setup.zero.value_and_grad(setup.loss_fn)
    graphdef, state = nnx.split(setup.zero.abstract(setup.abstract))
    tokens = jax.ShapeDtypeStruct((setup.rows, setup.config.data.seq_len + 1), jnp.int32)
    key = jax.eval_shape(lambda: jax.random.key(0))
    jax.eval_shape(
        lambda state, *args: value_and_grad(nnx.merge(graphdef, state), *args), state, tokens, key
    )


def model_factory(model: ModelConfig, precision: PrecisionConfig) -> Callable[[Any], Any]:
    """A function of `rngs` that makes the model, of its arguments and the dtypes of [precision].

    Raises:
      ValueError: a dtype is set that the model has no argument for.
    """
    target = import_target(model.target)
    accepted = parameters(target)
    dtypes = {"param_dtype": precision.param_dtype, "compute_dtype": precision.compute_dtype}
    dtypes = {name: dtype for name, dtype in dtypes.items() if dtype is not None}
    for name, dtype in dtypes.items():
        if name not in accepted:
            raise ValueError(
                f"[precision] sets {name} {dtype!r}, but {model.target} has no argument {name}; "
                "leave it out, or give the model that argument."
            )
    arguments = own_arguments(model) | dtypes

    def make(rngs: Any) -> Any:
        return target(**arguments, **({"rngs": rngs} if "rngs" in accepted else {}))

    return make


def make_schedule(config: OptimizerConfig, num_steps: int) -> optax.Schedule:
    """Warmup from peak / warmup_steps to the peak, then the decay to the last step.

    >>> schedule = make_schedule(OptimizerConfig(learning_rate=1.0, warmup_steps=4), 10)
    >>> [round(float(schedule(step)), 2) for step in (0, 3, 4, 10)]
    [0.25, 1.0, 1.0, 0.0]
    """
    peak, warmup = config.learning_rate, config.warmup_steps
    ratio, num_decay = config.min_learning_rate_ratio, max(num_steps - warmup, 1)
    if config.schedule == "cosine":
        decay = optax.cosine_decay_schedule(peak, num_decay, alpha=ratio)
    elif config.schedule == "linear":
        decay = optax.linear_schedule(peak, ratio * peak, num_decay)
    else:
        decay = optax.constant_schedule(peak)
    if not warmup:
        return decay
    rise = optax.linear_schedule(peak / warmup, peak, max(warmup - 1, 1))
    return optax.join_schedules([rise, decay], [warmup])


def make_optimizer(
    config: OptimizerConfig, schedule: optax.Schedule
) -> optax.GradientTransformation:
    """The optimizer of optax that a configuration names, clipped, its decay masked."""
    make = find_optimizer(config.name)
    accepted = inspect.signature(make).parameters
    arguments = {name: x for name, x in own_arguments(config).items() if x is not None}
    masks = {name: decay_mask for name in DECAY_MASKS if name in accepted}
    if "weight_decay" in accepted:
        arguments["weight_decay"] = config.weight_decay
    tx = make(learning_rate=schedule, **arguments, **masks)
    if config.clip_norm:
        return optax.chain(optax.clip_by_global_norm(config.clip_norm), tx)
    return tx


def decay_mask(params: Any) -> Any:
    """Which leaves weight decay is for: not a bias or scale, nor anything of a norm, nor a vector.

    A norm is known by a part of the leaf's name: one that begins with "ln" or holds "norm".

    >>> decay_mask({"ln_1": {"weight": jnp.ones((2, 3))}, "c_fc": {"weight": jnp.ones((2, 3))}})
    {'c_fc': {'weight': True}, 'ln_1': {'weight': False}}
    """

    def is_decayed(path: Any, leaf: Any) -> bool:
        parts = leaf_name(path).lower().split(".")
        is_norm = any(part.startswith("ln") or "norm" in part for part in parts)
        return not is_norm and parts[-1] not in ("bias", "scale") and jnp.ndim(leaf) > 1

    return jax.tree_util.tree_map_with_path(is_decayed, params)


def make_loss_fn(model_type: type, run_layers: Callable[..., Any]) -> Callable[..., jax.Array]:
    """`loss_fn(model, tokens, key)`: the model's own `loss`, or cross entropy of its logits.

    Args:
      model_type: `loss(tokens)` takes int32 (B, T + 1); `__call__(tokens)` takes (B, T) and gives
        logits (B, T, V). Either is given `key` and `run_layers` where it has those arguments.
      run_layers: what is lent.
    """
    has_loss = hasattr(model_type, "loss")
    called: Any = model_type.loss if has_loss else model_type.__call__  # type: ignore
    accepted = inspect.signature(called).parameters

    def loss_fn(model: Any, tokens: jax.Array, key: jax.Array | None = None) -> jax.Array:
        lent = {"key": key, "run_layers": run_layers}
        lent = {name: value for name, value in lent.items() if name in accepted}
        if has_loss:
            return model.loss(tokens, **lent)
        logits = model(tokens[:, :-1], **lent)
        logits = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    return loss_fn


def _set_cpu_devices(num_devices: int) -> None:
    """Makes virtual CPU devices, unless jax has started; a GPU goes before them."""
    try:
        jax.config.update("jax_num_cpu_devices", num_devices)
    except RuntimeError:  # jax has started
        found = jax.local_device_count()
        if jax.default_backend() == "cpu" and found != num_devices:
            raise ValueError(
                f"[mesh] num_cpu_devices is {num_devices}, but jax runs with {found} CPU devices "
                f"already; use {found}, or start a new process."
            ) from None
