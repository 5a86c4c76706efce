"""Precision: master weights and the dtype of optimizer state, as optax transforms.

A wide leaf is one in the dtype that the optimizer computes in; a narrow one is the parameter as it
is stored, sent and multiplied.
"""

from __future__ import annotations

import difflib
import warnings
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jzero.layout import is_floating, mirrored_name
from jzero.trees import named_leaves

PARTITIONED = "partitioned_by_jzero"  # attribute of an update of `Zero.optimizer`: what is in it
DTYPES = ("float16", "bfloat16", "float32", "float64")


class MasterWeightsState(NamedTuple):
    """State of `master_weights`."""

    master: Any  # shapes of the parameters, master dtype; optax.MaskedNode where not narrower
    inner: Any


def is_master(name: str) -> bool:
    """Whether a leaf of an optimizer state is of a master copy, by its tree path.

    >>> is_master("0.master.wte.weight"), is_master("0.inner.0.mu.wte.weight")
    (True, False)
    """
    return "master" in name.split(".")


def master_weights(
    tx: optax.GradientTransformation, master_dtype: Any = jnp.float32
) -> optax.GradientTransformationExtraArgs:
    """Runs `tx` on a wide copy of narrow parameters, which follow it rounded.

    Adding the updates gives exactly the master rounded to the parameter's dtype. One case is out of
    reach of any update in the master dtype: a bfloat16 parameter that shrinks by more than 2**16 in
    one step (float16 beyond 1.0 in size: 2**12) lands within 2**-24 of its old size. The next
    update starts from the parameter as it is, so such an error is gone then.

    Args:
      tx: any optax transform; it sees master parameters, and gradients at least as wide.
      master_dtype: float32 or float64. Leaves that are as wide, and integers, have no second copy.

    Returns:
      A transform whose updates are in `master_dtype` for narrow leaves; `update` needs `params`.
      An update that changes nothing is -0.0, so that a parameter of -0.0 stays what it is.

    Raises:
      ValueError: where `master_dtype` is no real floating dtype or is switched off in jax; in
        `update` where `params` is missing.

    Source: Micikevicius et al., Mixed Precision Training, arXiv:1710.03740, section 3.1.

    >>> tx = master_weights(optax.sgd(0.5))
    >>> params = jnp.ones(3, jnp.bfloat16)
    >>> updates, state = tx.update(jnp.full(3, 2**-9, jnp.bfloat16), tx.init(params), params)
    >>> float(state.master[0]), float(optax.apply_updates(params, updates)[0])
    (0.9990234375, 1.0)
    """
    inner = unpartitioned_only(tx, "master_weights")
    master_dtype = floating_dtype("master_dtype", master_dtype)

    def init(params: Any) -> MasterWeightsState:
        master = jax.tree.map(lambda p: _master(p, master_dtype), params)
        return MasterWeightsState(master, inner.init(_wide_params(params, master)))

    def update(grads: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
        _check_params("master_weights", params)
        old = _wide_params(params, state.master)
        updates, inner_state = inner.update(_widened(grads, old), state.inner, old, **extra)
        new = optax.apply_updates(old, updates)
        master = jax.tree.map(
            lambda m, n: n if _is_master(m) else m,
            state.master,
            new,
            is_leaf=lambda m: not _is_master(m),
        )
        updates = jax.tree.map(_narrow_update, params, master, updates)
        return updates, MasterWeightsState(master, inner_state)

    return optax.GradientTransformationExtraArgs(init, update)  # pyright: ignore[reportArgumentType]


def exact_update(new: jax.Array, old: jax.Array, dtype: Any) -> jax.Array:
    """Returns the update in `dtype` that takes a narrow `old` to a narrow `new`; -0.0 for none.

    Args:
      new, old: arrays of one shape and one floating dtype.
      dtype: wider than theirs.

    >>> old, new = jnp.asarray([-0.0, 1.0], jnp.bfloat16), jnp.asarray([-0.0, 1.5], jnp.bfloat16)
    >>> exact_update(new, old, jnp.float32).tolist()
    [-0.0, 0.5]
    """
    if jnp.iscomplexobj(new):
        part = jnp.finfo(dtype).dtype
        return jax.lax.complex(
            exact_update(new.real, old.real, part), exact_update(new.imag, old.imag, part)
        )
    # The barrier keeps XLA from cancelling the rounding to `new`'s dtype against the widening here.
    new = jax.lax.optimization_barrier(new)
    is_same = (new == old) & (jnp.signbit(new) == jnp.signbit(old))
    return jnp.where(is_same, jnp.asarray(-0.0, dtype), new.astype(dtype) - old.astype(dtype))


def with_state_dtype(
    tx: optax.GradientTransformation, state_dtype: Any = None
) -> optax.GradientTransformationExtraArgs:
    """Runs `tx` in at least float32, and stores its state in `state_dtype`.

    optax gives moments the dtype of the parameters: of bfloat16 ones, moments of 8 bits precision.
    Under this wrapper they are float32, and lower only where asked for by name: here, or in `tx`
    (`mu_dtype`). Adds no array to the state. With `state_dtype` None it leaves `master_weights` in
    `tx` as it is, which does the same.

    Args:
      tx: any optax transform.
      state_dtype: the dtype in which each leaf is stored that mirrors a parameter (name and shape),
        moment or not; it is widened again before each update. None: as `tx` keeps it. Scalars stay
        as they are, so do leaves that `tx` itself keeps below float32.

    Returns:
      A transform with the state tree of `tx`, whose dtypes never change. Updates are in at least
      float32. With a `state_dtype`, `update` needs `params`.

    Raises:
      ValueError: where `state_dtype` is no real floating dtype, wider than what `tx` computes in,
        or around `master_weights`, which belongs outside.

    >>> state = with_state_dtype(optax.adam(1e-3)).init(jnp.ones(3, jnp.bfloat16))
    >>> state[0].mu.dtype
    dtype('float32')
    """
    inner = unpartitioned_only(tx, "with_state_dtype")
    stored_dtype = None if state_dtype is None else floating_dtype("state_dtype", state_dtype)

    def init(params: Any) -> Any:
        if has_master(jax.eval_shape(lambda p: inner.init(_widened(p)), params)):
            _check_order(stored_dtype)
            return _warned(inner.init(params))
        state = jax.tree.map(jnp.asarray, inner.init(_widened(params)))  # some have bools in them
        return _as_dtypes(state, _stored_dtypes(state, params, stored_dtype))

    def update(grads: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
        if has_master(state):
            return inner.update(grads, state, params, **extra)
        state = jax.tree.map(jnp.asarray, state)
        stored = [x.dtype for x in jax.tree.leaves(state)]
        wide = None if params is None else _widened(params)
        if stored_dtype is not None:
            _check_params("with_state_dtype", params)
            native = jax.eval_shape(inner.init, wide)
            state = _as_dtypes(state, [x.dtype for x in jax.tree.leaves(native)])
        updates, state = inner.update(_widened(grads), state, wide, **extra)
        return updates, _as_dtypes(jax.tree.map(jnp.asarray, state), stored)

    return optax.GradientTransformationExtraArgs(init, update)  # pyright: ignore[reportArgumentType]


def unpartitioned_only(tx: Any, what: str) -> optax.GradientTransformationExtraArgs:
    """The transform with extra arguments; one of `Zero.optimizer` is refused.

    Raises:
      ValueError: naming the order that cuts the state of `what`, too.
    """
    if hasattr(tx.update, PARTITIONED):
        raise ValueError(
            f"{what} around zero.optimizer(tx) would keep its own state whole on every device; "
            "put it inside, as in zero.optimizer(master_weights(tx))."
        )
    return optax.with_extra_args_support(tx)


def floating_dtype(what: str, dtype: Any) -> np.dtype:
    """Reads a dtype by name, one that a policy may use.

    Raises:
      ValueError: where it is not a real floating dtype of at least 16 bits, or is float64 while
        jax has it switched off.

    >>> floating_dtype("param_dtype", "bfloat16")
    dtype(bfloat16)
    """
    try:
        known = jnp.dtype(dtype)
    except TypeError:
        known = None
    if dtype is None or known is None or known.name not in DTYPES:
        near = difflib.get_close_matches(str(dtype), DTYPES, 1)
        hint = f"did you mean {near[0]!r}?" if near else f"use one of {', '.join(DTYPES)}."
        raise ValueError(f"{what} {dtype!r} is no dtype to compute in; {hint}")
    if jax.dtypes.canonicalize_dtype(known) != known:
        raise ValueError(
            f"{what} float64 is switched off in jax, which would use float32 in silence; "
            'call jax.config.update("jax_enable_x64", True) first, or use float32.'
        )
    return known


def bits(dtype: Any) -> int:
    """The width of a floating dtype; of a complex one, that of its real part.

    >>> bits("bfloat16"), bits("complex64")
    (16, 32)
    """
    return jnp.finfo(jnp.dtype(dtype)).bits


def _master(param: Any, master_dtype: np.dtype) -> Any:
    is_narrow = is_floating(param.dtype) and bits(param.dtype) < bits(master_dtype)
    return param.astype(_like(param.dtype, master_dtype)) if is_narrow else optax.MaskedNode()


def _like(dtype: Any, real: np.dtype) -> Any:
    """`real`, or the complex dtype of its width where `dtype` is complex."""
    return jnp.promote_types(dtype, real) if jnp.issubdtype(dtype, jnp.complexfloating) else real


def _is_master(part: Any) -> bool:
    return not isinstance(part, optax.MaskedNode)


def _wide_params(params: Any, master: Any) -> Any:
    return jax.tree.map(lambda p, m: m if _is_master(m) else p, params, master)


def _narrow_update(param: Any, master: Any, update: Any) -> Any:
    if not _is_master(master):
        return update
    return exact_update(master.astype(param.dtype), param, master.dtype)


def _widened(tree: Any, like: Any = None) -> Any:
    """Widens floating leaves to at least float32, and to the dtypes of `like`."""

    def widen(x: Any, *others: Any) -> Any:
        if not is_floating(x.dtype):
            return x
        dtype = jnp.promote_types(x.dtype, jnp.float32)
        for other in others:
            dtype = jnp.promote_types(dtype, other.dtype)
        return x.astype(dtype)

    return jax.tree.map(widen, tree, *(() if like is None else (like,)))


def _stored_dtypes(state: Any, params: Any, stored_dtype: np.dtype | None) -> list[Any]:
    """The dtype in which each leaf of a state is stored, in order."""
    shapes = {name: x.shape for name, x in named_leaves(params)[0].items()}

    def stored(name: str, x: Any) -> Any:
        is_mirror = shapes.get(mirrored_name(name, shapes) or "") == x.shape and x.ndim > 0
        if stored_dtype is None or not is_mirror or not is_floating(x.dtype) or bits(x.dtype) < 32:
            return x.dtype
        if bits(stored_dtype) > bits(x.dtype):
            raise ValueError(
                f"state_dtype {stored_dtype} is wider than the {x.dtype} in which the optimizer "
                f"computes {name}; use {x.dtype}, or master_weights(tx, {stored_dtype}) around it."
            )
        return _like(x.dtype, stored_dtype)

    leaves = named_leaves(state)[0]
    dtypes = [stored(name, x) for name, x in leaves.items()]
    wide = {
        n: x for n, x in leaves.items() if x.ndim and is_floating(x.dtype) and bits(x.dtype) > 16
    }
    if stored_dtype is not None and bits(stored_dtype) < 32 and wide and dtypes == _dtypes(leaves):
        raise ValueError(
            f"state_dtype {stored_dtype} has no effect on this optimizer: none of its state has "
            f"the name and shape of a parameter ({', '.join(list(wide)[:3])}, ...); leave it out."
        )
    return dtypes


def _dtypes(leaves: dict[str, Any]) -> list[Any]:
    return [x.dtype for x in leaves.values()]


def _warned(state: Any) -> Any:
    """A state with a master in it; warns of moments in 16 bits outside of that master."""
    outside = jax.tree.map(
        lambda x: optax.MaskedNode() if isinstance(x, MasterWeightsState) else x,
        state,
        is_leaf=lambda x: isinstance(x, MasterWeightsState),
    )
    leaves = named_leaves(outside)[0]
    narrow = [
        n for n, x in leaves.items() if x.ndim and is_floating(x.dtype) and bits(x.dtype) < 32
    ]
    if narrow:
        warnings.warn(
            f"optimizer state in 16 bits beside master_weights: {', '.join(narrow)}; put it around "
            "the whole optimizer, or with_state_dtype around each other part.",
            stacklevel=2,
        )
    return state


def _as_dtypes(tree: Any, dtypes: list[Any]) -> Any:
    leaves, treedef = jax.tree.flatten(tree)
    pairs = zip(leaves, dtypes, strict=True)
    return jax.tree.unflatten(treedef, [x if x.dtype == d else x.astype(d) for x, d in pairs])


def _check_params(what: str, params: Any) -> None:
    if params is None:
        raise ValueError(
            f"{what} needs the parameters to update; call tx.update(grads, opt_state, params)."
        )


def has_master(state: Any) -> bool:
    """Whether an optimizer state has `master_weights` in it anywhere."""

    def is_master(x: Any) -> bool:
        return isinstance(x, MasterWeightsState)

    return any(map(is_master, jax.tree.leaves(state, is_leaf=is_master)))


def _check_order(stored_dtype: np.dtype | None) -> None:
    if stored_dtype is not None:
        raise ValueError(
            "with_state_dtype around master_weights would show it wide parameters, and there would "
            "be no master; write master_weights(with_state_dtype(tx, ...))."
        )
