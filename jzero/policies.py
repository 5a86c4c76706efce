"""Which dtype everything in a training step has, by one name or each separately."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np
import optax

from jzero.precision import bits, floating_dtype, master_weights, with_state_dtype
from jzero.scaling import dynamic_loss_scale, static_loss_scale

POLICIES = ("float32", "bfloat16", "float16")
NONE = "none"  # in a configuration: without


@dataclasses.dataclass(frozen=True)
class Policy:
    """The dtype of everything in a training step; made by `policy`, checked when made.

    Args:
      param_dtype: parameters, as stored and as gathered.
      compute_dtype: what the model multiplies in.
      accumulator_dtype: the sum of gradients over microbatches.
      reduce_dtype: gradients as they travel; the local sum is cast just before.
      state_dtype: what the optimizer stores per parameter (moments).
      master_dtype: the wide copy of the parameters, wider than `param_dtype`; None for none.
      loss_scale: "dynamic", a positive number, or None. 1.0 scales nothing and checks that
        gradients are finite; None does not check.
    """

    param_dtype: np.dtype
    compute_dtype: np.dtype
    accumulator_dtype: np.dtype
    reduce_dtype: np.dtype
    state_dtype: np.dtype
    master_dtype: np.dtype | None
    loss_scale: float | Literal["dynamic"] | None

    def __post_init__(self) -> None:
        for name in DTYPE_FIELDS:
            value = getattr(self, name)
            if name != "master_dtype" or value is not None:
                object.__setattr__(self, name, floating_dtype(name, value))
        _check_master(self.param_dtype, self.master_dtype)
        _check_state(self)
        object.__setattr__(self, "loss_scale", _checked_scale(self.loss_scale))

    def without_master(self) -> Policy:
        """The policy of parameters as wide as its master copy, which need none, and no scale."""
        wide = self.master_dtype or self.param_dtype
        return dataclasses.replace(self, param_dtype=wide, master_dtype=None, loss_scale=None)

    def rows(self) -> list[tuple[str, str]]:
        """Returns (name, dtype) pairs for a table.

        >>> policy("bfloat16").rows()[-2:]
        [('master_dtype', 'float32'), ('loss_scale', '1.0, finite check only')]
        """
        rows = [(name, str(getattr(self, name) or NONE)) for name in DTYPE_FIELDS]
        scale = "none, no finite check" if self.loss_scale is None else str(self.loss_scale)
        note = ", finite check only" if self.loss_scale == 1.0 else ""
        return [*rows, ("loss_scale", scale + note)]


FIELDS = tuple(f.name for f in dataclasses.fields(Policy))
DTYPE_FIELDS = tuple(name for name in FIELDS if name != "loss_scale")


def policy(name: str = "float32", **overrides: Any) -> Policy:
    """Returns a policy by name, with any of its fields replaced.

    The name is the dtype of parameters and of the model's products. All else follows from these
    two: gradients travel in the parameters' dtype, are summed and give moments in at least float32;
    parameters of 16 bits have a float32 master; where either is float16 the loss scale is dynamic,
    where one is bfloat16 gradients are checked to be finite.

    Args:
      name: "float32", "bfloat16" or "float16".
      overrides: fields of `Policy`; dtypes by name or as dtypes. None or "none" for `master_dtype`
        and `loss_scale` means without; None for any other field what follows.

    Raises:
      ValueError: for a name, field or value that is unknown, cannot be had or makes no sense.

    >>> policy("bfloat16", param_dtype="float32").master_dtype is None
    True
    >>> policy("float32", compute_dtype="float16").loss_scale
    'dynamic'
    """
    if name not in POLICIES:
        raise ValueError(f"policy {name!r} is unknown; use one of {', '.join(POLICIES)}.")
    unknown = [field for field in overrides if field not in FIELDS]
    if unknown:
        raise ValueError(f"{', '.join(unknown)} is no field of a policy; use {', '.join(FIELDS)}.")
    given: dict[str, Any] = {
        field: None if isinstance(value, str) and value == NONE else value
        for field, value in overrides.items()
        if value is not None or field in ("master_dtype", "loss_scale")
    }
    params = floating_dtype("param_dtype", given.get("param_dtype", name))
    compute = floating_dtype("compute_dtype", given.get("compute_dtype", name))
    wide = jnp.promote_types(params, jnp.float32)
    master = given.get("master_dtype", jnp.dtype("float32") if bits(params) < 32 else None)
    follows: dict[str, Any] = {
        "param_dtype": params,
        "compute_dtype": compute,
        "accumulator_dtype": wide,
        "reduce_dtype": params,
        "state_dtype": master or wide,
        "master_dtype": master,
        "loss_scale": _usual_scale({params.name, compute.name}),
    }
    return Policy(**(follows | given))


def with_policy(
    tx: optax.GradientTransformation, policy: Policy, **scale_options: Any
) -> optax.GradientTransformationExtraArgs:
    """Gives an optimizer the state dtype, master weights and loss scale of a policy.

    Args:
      tx: any optax transform; it sees unscaled gradients and parameters in at least float32.
      policy: from `policy`.
      scale_options: of `dynamic_loss_scale`, for a policy whose loss scale is dynamic.

    Raises:
      ValueError: options that have no effect, or out of their range.

    >>> state = with_policy(optax.adam(1e-3), policy("float16")).init(jnp.ones(3, jnp.float16))
    >>> float(state.loss_scale), state.inner.master.dtype
    (65536.0, dtype('float32'))
    """
    if scale_options and policy.loss_scale != "dynamic":
        raise ValueError(
            f"{', '.join(scale_options)} has no effect with loss_scale {policy.loss_scale}; leave "
            'it out, or use loss_scale "dynamic".'
        )
    usual = policy.master_dtype or jnp.promote_types(policy.param_dtype, jnp.float32)
    tx = with_state_dtype(tx, None if policy.state_dtype == usual else policy.state_dtype)
    if policy.master_dtype is not None:
        tx = master_weights(tx, policy.master_dtype)
    if policy.loss_scale == "dynamic":
        return dynamic_loss_scale(tx, **scale_options)
    return tx if policy.loss_scale is None else static_loss_scale(tx, policy.loss_scale)


def _usual_scale(names: set[str]) -> float | Literal["dynamic"] | None:
    if "float16" in names:
        return "dynamic"
    return 1.0 if "bfloat16" in names else None


def _check_master(param_dtype: np.dtype, master_dtype: np.dtype | None) -> None:
    if master_dtype is not None and bits(master_dtype) <= bits(param_dtype):
        raise ValueError(
            f"master_dtype {master_dtype} is not wider than param_dtype {param_dtype}; leave "
            'master_dtype out or set it to "none", or make param_dtype narrower.'
        )


def _check_state(policy: Policy) -> None:
    widest = policy.master_dtype or jnp.promote_types(policy.param_dtype, jnp.float32)
    if bits(policy.state_dtype) > bits(widest):
        raise ValueError(
            f"state_dtype {policy.state_dtype} is wider than the {widest} in which the optimizer "
            f"computes; set state_dtype to {widest}, or master_dtype to {policy.state_dtype}."
        )


def _checked_scale(scale: Any) -> Any:
    if scale is None or (isinstance(scale, str) and scale == "dynamic"):
        return scale
    is_number = isinstance(scale, int | float) and not isinstance(scale, bool)
    if is_number and 0 < float(scale) < float("inf"):
        return float(scale)
    raise ValueError(
        f'loss_scale {scale!r} is not usable; give "dynamic", a positive finite number '
        '(1.0: only check that gradients are finite), or "none".'
    )
