"""Matrix products in an update: where they are, and each matrix moved once for all of them.

Left alone, XLA moves a cut matrix anew for each product of an iteration such as Muon's. What such
an iteration starts from is multiplied with itself (a Gram product), which marks it in the jaxpr.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var

# What each device does to its own shard, up to scalars, rows and columns that XLA may reduce.
_LOCAL = """
abs add add_any and argmax argmin atan2 bitcast_convert_type broadcast_in_dim cbrt ceil clamp
complex conj convert_element_type copy copy_p cos cosh div eq erf erf_inv erfc exp exp2 expm1
floor ge gt imag integer_pow iota is_finite le lgamma log log1p logistic lt max min mul ne neg
nextafter not optimization_barrier or pow real reduce_and reduce_max reduce_min reduce_or
reduce_sum rem round rsqrt select_n sharding_constraint shift_left shift_right_arithmetic
shift_right_logical sign sin sinh split sqrt square squeeze stop_gradient sub tan tanh transpose
xor zeta
"""
_CALLS = frozenset(("jit", "pjit", "closed_call", "core_call", "cond", "scan", "while", "remat"))
_VIEWS = frozenset(("conj", "convert_element_type", "copy", "copy_p"))

Pin = Callable[[Any, tuple[int, ...]], Any]


def has_only_local_ops(jaxpr: Jaxpr, min_size: int) -> bool:
    """Whether arrays of `min_size` elements meet nothing but element-wise ops and reductions."""
    return all(_is_local(eqn, min_size) for eqn in jaxpr.eqns)


def _is_local(eqn: JaxprEqn, min_size: int) -> bool:
    name = eqn.primitive.name
    if name in _LOCAL.split():
        return True
    if name in _CALLS or name.startswith("custom_"):
        return all(has_only_local_ops(sub, min_size) for sub in _sub_jaxprs(eqn))
    sizes = (getattr(v.aval, "size", 0) for v in (*eqn.invars, *eqn.outvars))
    return max(sizes, default=0) < min_size


def with_pinned_matrices(fn: Callable[..., Any], pin: Pin) -> Callable[..., Any]:
    """Wraps `fn(*args)`: what a Gram product multiplies with itself goes through `pin` first.

    Args:
      fn: a function of trees of arrays, called under jit.
      pin: `pin(x, batch_dims)` constrains one stack of matrices; `batch_dims` are those dims of it
        that the product does not sum or pair.
    """

    def run(*args: Any) -> Any:
        closed, shapes = jax.make_jaxpr(fn, return_shape=True)(*args)
        if not _has_gram(closed.jaxpr):
            return fn(*args)
        out = _evaluate(closed.jaxpr, closed.consts, jax.tree.leaves(args), pin)
        return jax.tree.unflatten(jax.tree.structure(shapes), out)

    return run


def _evaluate(jaxpr: Jaxpr, consts: Any, args: Any, pin: Pin) -> list[Any]:
    """Evaluates a jaxpr, with the roots of its Gram products pinned as soon as they exist."""
    roots, env = gram_roots(jaxpr), {}

    def write(variables: Any, values: Any) -> None:
        for v, x in zip(variables, values, strict=True):
            env[v] = pin(x, roots[v]) if v in roots else x

    write(jaxpr.constvars, consts)
    write(jaxpr.invars, args)
    for eqn in jaxpr.eqns:
        values = [v.val if isinstance(v, Literal) else env[v] for v in eqn.invars]
        write(eqn.outvars, _run(eqn, values, pin))
    out = [v.val if isinstance(v, Literal) else env[v] for v in jaxpr.outvars]
    return _pinned_results(jaxpr, out, pin)


def _pinned_results(jaxpr: Jaxpr, out: list[Any], pin: Pin) -> list[Any]:
    """Pins what an iteration makes of its operands, so that none is cut again between two."""
    roots = gram_roots(jaxpr)
    operands: Any = [v for v in jaxpr.invars if v in roots]
    iterated = {v.aval.shape: roots[v] for v in operands}
    return [pin(x, iterated[x.shape]) if jax.numpy.shape(x) in iterated else x for x in out]


def _run(eqn: JaxprEqn, values: list[Any], pin: Pin) -> list[Any]:
    """Runs one equation, the Gram products of the calls and loops in it pinned."""
    params = dict(eqn.params)
    if _has_gram(eqn):
        params = {name: _with_pins(value, pin) for name, value in params.items()}
    out = eqn.primitive.bind(*values, **eqn.primitive.get_bind_params(params))
    out = out if eqn.primitive.multiple_results else [out]
    for sub in _sub_jaxprs(eqn):
        out = _pinned_results(sub, out, pin)
    return out


def _with_pins(param: Any, pin: Pin) -> Any:
    """A parameter of an equation, each jaxpr in it evaluated anew with pins."""
    if isinstance(param, tuple) and any(isinstance(part, ClosedJaxpr) for part in param):
        return tuple(_with_pins(part, pin) for part in param)
    if not isinstance(param, ClosedJaxpr) or not _has_gram(param.jaxpr):
        return param
    avals = [v.aval for v in param.jaxpr.invars]
    args = [jax.ShapeDtypeStruct(a.shape, a.dtype, weak_type=a.weak_type) for a in avals]
    return jax.make_jaxpr(lambda *a: _evaluate(param.jaxpr, param.consts, a, pin))(*args)


def gram_roots(jaxpr: Jaxpr) -> dict[Var, tuple[int, ...]]:
    """What a jaxpr, or a loop or call in it, multiplies with itself, and the batch dims of each."""
    views: dict[Var, tuple[Var, tuple[int, ...]]] = {}
    roots: dict[Var, tuple[int, ...]] = {}

    def source(v: Any) -> tuple[Any, tuple[int, ...]]:
        return (v, ()) if isinstance(v, Literal) else views.get(v, (v, tuple(range(_ndim(v)))))

    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "transpose":
            root, dims = source(eqn.invars[0])
            views[eqn.outvars[0]] = root, tuple(dims[d] for d in eqn.params["permutation"])
        elif eqn.primitive.name in _VIEWS and isinstance(eqn.invars[0], Var):
            views[eqn.outvars[0]] = source(eqn.invars[0])
        elif eqn.primitive.name == "dot_general" and isinstance(eqn.invars[0], Var):
            (root, dims), other = source(eqn.invars[0]), source(eqn.invars[1])
            batch = eqn.params["dimension_numbers"][1][0]
            if other[0] is root and _ndim(eqn.outvars[0]) - len(batch) == 2:
                roots.setdefault(root, tuple(dims[d] for d in batch))
        for sub in _sub_jaxprs(eqn):
            roots = _roots_outside(eqn, sub) | roots
    return roots


def _roots_outside(eqn: JaxprEqn, sub: Jaxpr) -> dict[Var, tuple[int, ...]]:
    """The roots of a called jaxpr among the operands of its caller, which come last there."""
    operands = dict(zip(sub.invars[::-1], eqn.invars[::-1], strict=False))
    found = ((operands[v], batch) for v, batch in gram_roots(sub).items() if v in operands)
    return {v: dims for v, dims in found if isinstance(v, Var) and _ndim(v) == 2 + len(dims)}


def _ndim(v: Any) -> int:
    return len(v.aval.shape)


def _has_gram(part: Jaxpr | JaxprEqn) -> bool:
    if isinstance(part, Jaxpr):
        return bool(gram_roots(part)) or any(_has_gram(eqn) for eqn in part.eqns)
    return any(_has_gram(sub) for sub in _sub_jaxprs(part))


def _sub_jaxprs(eqn: JaxprEqn) -> Iterator[Jaxpr]:
    yield from (closed.jaxpr for closed in _closed_jaxprs(eqn))


def _closed_jaxprs(eqn: JaxprEqn) -> Iterator[ClosedJaxpr]:
    params: Mapping[str, Any] = eqn.params
    for value in params.values():
        for part in value if isinstance(value, (tuple, list)) else (value,):
            if isinstance(part, ClosedJaxpr):
                yield part
            elif isinstance(part, Jaxpr):
                yield ClosedJaxpr(part, ())
