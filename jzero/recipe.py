"""What a run is made of: mesh, model, loss, batch, optimizer, from what a configuration names."""

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jzero.config import Config, ModelConfig, PrecisionConfig
from jzero.layout import is_floating
from jzero.mesh import REPLICA_AXIS, make_mesh
from jzero.policies import FIELDS as POLICY_FIELDS
from jzero.policies import Policy, with_policy
from jzero.policies import policy as make_named_policy
from jzero.precision import bits
from jzero.rates import make_momentum, make_optimizer, make_schedule
from jzero.schema import import_target, own_arguments, parameters
from jzero.terminal import train_flops_per_token
from jzero.trees import abstract_leaves
from jzero.zero import Zero

DEFAULT_MICRO_BATCH = 8


class Batch(NamedTuple):
    """How many rows there are; the first is the product of the others and the data shards."""

    train_batch_size: int  # of a step, on all devices
    micro_batch: int  # of one device in one microbatch
    num_microbatches: int


@dataclass(frozen=True)
class Setup:
    """A run before anything is compiled: shapes alone."""

    config: Config
    zero: Zero
    make_model: Callable[[jax.Array], nnx.Module]
    abstract: nnx.Module  # the model, with shapes in place of arrays
    tx: optax.GradientTransformationExtraArgs
    tx_without_master: optax.GradientTransformationExtraArgs  # of it, for parameters as wide
    schedule: optax.Schedule
    policy: Policy

    @property
    def data_axes(self) -> tuple[str, ...]:
        """The mesh axes that split the batch."""
        axes = (REPLICA_AXIS, *(self.zero.axes or ()))
        return tuple(str(axis) for axis in self.zero.mesh.axis_names if axis in axes)

    @property
    def batch(self) -> Batch:
        """The rows of a step, as [train] gives them and the mesh splits them."""
        train = self.config.train
        return resolve_batch(
            math.prod(self.zero.mesh.shape[axis] for axis in self.data_axes),
            train_batch_size=train.train_batch_size,
            micro_batch=train.micro_batch,
            num_microbatches=train.num_microbatches,
        )

    @property
    def rows(self) -> int:
        """Rows of one microbatch on all devices together."""
        return self.batch.train_batch_size // self.batch.num_microbatches

    @property
    def num_params(self) -> int:
        """Logical parameters of the model."""
        return sum(math.prod(x.shape) for x in abstract_leaves(self.abstract).values())

    @property
    def flops_per_token(self) -> float:
        """Of the model; of attention, too, where its arguments tell layers and width."""
        arguments = own_arguments(self.config.model)
        num_layers, dim = arguments.get("num_layers", 0), arguments.get("embed_dim", 0)
        seq_len = self.config.data.seq_len
        return train_flops_per_token(self.num_params, num_layers, seq_len, embed_dim=dim)

    @property
    def loss_fn(self) -> Callable[..., jax.Array]:
        """`loss_fn(model, tokens, key)`, to be put under `zero`."""
        return make_loss_fn(type(self.abstract), self.zero.run_layers)

    def value_and_grad(self) -> Callable[..., Any]:
        """Loss and gradients of a step, accumulated as [train], [precision] and [zero] say."""
        return self.zero.value_and_grad(
            self.loss_fn,
            num_microbatches=self.batch.num_microbatches,
            accumulator_dtype=self.policy.accumulator_dtype,
            keep_gathered=self.config.zero.keep_gathered,
        )

    def place(self, rows: np.ndarray) -> jax.Array:
        """This process's rows (b, T + 1) as its share of the global batch, on the devices."""
        sharding = NamedSharding(self.zero.mesh, P(self.data_axes))
        return jax.make_array_from_process_local_data(sharding, rows)


def make_setup(config: Config, mesh: Mesh | None = None) -> Setup:
    """Makes mesh, abstract model, Zero and optimizer, of which nothing is compiled or run.

    Args:
      config: of the run.
      mesh: another than that of [mesh] over the devices at hand: of GPUs that are not here, say.

    Raises:
      ValueError: values of the configuration that do not go together.
    """
    sizes = config.mesh
    if mesh is None:
        _set_cpu_devices(sizes.num_cpu_devices)  # first: a rate that is computed starts jax
    schedule, momentum = make_schedule(config), make_momentum(config)
    if mesh is None:
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
    policy = make_policy(config.precision, abstract)
    zero = Zero(
        mesh,
        config.zero.stage,
        axes=config.zero.axes or None,
        like=abstract,
        reduce_dtype=policy.reduce_dtype,
        min_size=config.zero.min_size,
        cut_layers=config.zero.cut_layers,
    )
    tx = make_optimizer(config.optimizer, schedule, momentum)
    try:
        inner = with_policy(tx, policy.without_master())
        tx = with_policy(tx, policy, **config.precision.scale_options)
    except ValueError as error:
        raise ValueError(f"[precision] {error}") from error
    txs = zero.optimizer(tx), zero.optimizer(inner)
    setup = Setup(config, zero, make_model, abstract, *txs, schedule, policy)
    _ = setup.batch  # numbers that do not go together are refused here
    return setup


def trace_loss(setup: Setup) -> None:
    """Traces loss and gradients, so that errors of the model come before any compile.

    The report then knows which parameters are gathered where they are read.
    """
    value_and_grad = setup.value_and_grad()
    graphdef, state = nnx.split(setup.zero.abstract(setup.abstract))
    shape = (setup.batch.train_batch_size, setup.config.data.seq_len + 1)
    tokens = jax.ShapeDtypeStruct(shape, jnp.int32)
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
    dtypes = {
        name: getattr(precision, name) or precision.policy
        for name in ("param_dtype", "compute_dtype")
    }
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


def make_policy(precision: PrecisionConfig, abstract: nnx.Module) -> Policy:
    """The dtype of everything: as given, and for the model's part as the model has it.

    Raises:
      ValueError: dtypes that do not go together.
    """
    stored = {x.dtype for x in abstract_leaves(abstract).values() if is_floating(x.dtype)}
    params = str(min(stored, key=bits)) if stored else "float32"
    given = {name: getattr(precision, name) for name in POLICY_FIELDS}
    given = {name: value for name, value in given.items() if value is not None}
    own = {
        "param_dtype": params,
        "compute_dtype": getattr(abstract, "compute_dtype", None) or params,
    }
    try:
        return make_named_policy(precision.policy or "float32", **(own | given))
    except ValueError as error:
        raise ValueError(f"[precision] {error}") from error


def resolve_batch(
    num_data_shards: int,
    *,
    train_batch_size: int | None = None,
    micro_batch: int | None = None,
    num_microbatches: int | None = None,
) -> Batch:
    """Checks train_batch_size = micro_batch x num_microbatches x data shards, and fills it in.

    Any two give the third. With train_batch_size alone num_microbatches is 1; without it, what is
    left out is micro_batch 8 and num_microbatches 1.

    Args:
      num_data_shards: into how many pieces the mesh splits a batch: the product of its data and
        replica axes, never of a model axis.
      train_batch_size: rows of one optimizer step on all devices, >= 1.
      micro_batch: rows of one device in one microbatch, >= 1.
      num_microbatches: microbatches of a step, >= 1.

    Raises:
      ValueError: the numbers do not multiply; with all of them, and the nearest right ones.

    >>> resolve_batch(8, train_batch_size=64, micro_batch=4)
    Batch(train_batch_size=64, micro_batch=4, num_microbatches=2)
    >>> resolve_batch(8, train_batch_size=100, micro_batch=4)
    Traceback (most recent call last):
    ValueError: train_batch_size 100 is no multiple of micro_batch 4 x 8 data shards; use 96 or 128.
    """
    total, micro, count = train_batch_size, micro_batch, num_microbatches
    given = {"train_batch_size": total, "micro_batch": micro, "num_microbatches": count}
    for name, value in given.items():
        if value is not None and value < 1:
            raise ValueError(f"{name} is {value}; use 1 or more, or leave it out.")
    if total is None:
        micro, count = micro or DEFAULT_MICRO_BATCH, count or 1
        return Batch(micro * count * num_data_shards, micro, count)
    if micro is None and count is None:
        count = 1
        unit, factors = num_data_shards, f"{num_data_shards} data shards"
    elif micro is None or count is None:
        unit = (micro or count or 1) * num_data_shards
        one = f"num_microbatches {count}" if micro is None else f"micro_batch {micro}"
        factors = f"{one} x {num_data_shards} data shards"
    else:
        unit = micro * count * num_data_shards
        if total != unit:
            raise ValueError(
                f"train_batch_size {total} is not micro_batch {micro} x num_microbatches {count} x "
                f"{num_data_shards} data shards = {unit}; use {unit}, or leave one of them out."
            )
        return Batch(total, micro, count)
    below = total // unit * unit
    if below != total:
        near = f"{below} or {below + unit}" if below else f"{unit}"
        raise ValueError(f"train_batch_size {total} is no multiple of {factors}; use {near}.")
    return Batch(total, micro or total // unit, count or total // unit)


def check_rows(train_batch_size: int, num_tokens: int, seq_len: int) -> None:
    """Refuses a batch of more rows than the data has: windows of seq_len + 1 tokens.

    >>> check_rows(32, num_tokens=200, seq_len=10)  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ValueError: a step takes 32 rows of 10 tokens, and the data has 19; use at most that ...
    """
    num_rows = (num_tokens - 1) // seq_len
    if train_batch_size > num_rows:
        raise ValueError(
            f"a step takes {train_batch_size} rows of {seq_len} tokens, and the data has "
            f"{num_rows}; use at most that for train_batch_size (micro_batch x num_microbatches x "
            "data shards), or more data."
        )


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
