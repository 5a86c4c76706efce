"""Where a traced loss reads each parameter: the program itself is asked, not the author.

A parameter may be gathered where it is read only if that moves it as often as the law says: each
read must be marked (a module's read hook, or `block_params`), and either slice its leading layer
dims by a scan, or be the only one. Every other parameter is gathered once, before the loss.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax
from jax.interpreters import partial_eval

from jzero.held import READ
from jzero.layout import Leaf

_LOOPS = ("while", "cond")


@dataclasses.dataclass(frozen=True)
class Use:
    """One use of a parameter: a marked read or not, dims that scans took, loop-invariant or not."""

    is_read: bool
    num_scanned: int = 0
    is_invariant: bool = False


def find_uses(jaxpr: Any, num_inputs: int) -> list[list[Use]]:
    """Finds the uses of the first `num_inputs` inputs of an open jaxpr; an output is a use, too."""
    found = []
    for var in jaxpr.invars[:num_inputs]:
        uses, outputs = _follow(jaxpr, var, Use(False))
        found.append([*uses, *(after for _, after in outputs)])
    return found


def _follow(jaxpr: Any, var: Any, so_far: Use) -> tuple[list[Use], list[tuple[int, Use]]]:
    """The uses of `var`, and the outputs that are `var` unchanged: the parameter still."""
    uses, outputs, names = [], [], [(var, so_far)]
    while names:
        name, so_far = names.pop()
        outputs += [(i, so_far) for i, out in enumerate(jaxpr.outvars) if out is name]
        for eqn in jaxpr.eqns:
            for position, operand in enumerate(eqn.invars):
                if operand is name:
                    more, again = _eqn_uses(eqn, position, so_far)
                    uses += more
                    names += again
    return uses, outputs


def _eqn_uses(eqn: Any, position: int, so_far: Use) -> tuple[list[Use], list[tuple[Any, Use]]]:
    """The uses in one equation, and the outputs of it that are the parameter still."""
    name = eqn.primitive.name
    mark = str(eqn.params.get("name", "")) if name == "name" else ""
    if mark.startswith(READ):
        num_batched = len(eqn.invars[0].aval.shape) - int(mark.rsplit(".")[-1])
        num_scanned = so_far.num_scanned + num_batched
        return [dataclasses.replace(so_far, is_read=True, num_scanned=num_scanned)], []
    inner = None if name in _LOOPS else _inner_jaxpr(eqn)
    if inner is None or position >= len(inner.invars):
        return [dataclasses.replace(so_far, is_read=False)], []
    var, within, shape = inner.invars[position], so_far, eqn.invars[position].aval.shape
    if name == "scan":
        within = _in_scan(eqn.invars[position], var, so_far)
    uses, outputs = _follow(inner, var, within)
    changed = dataclasses.replace(so_far, is_invariant=True)
    aliases = [eqn.outvars[i] for i, _ in outputs]
    return uses, [(a, so_far if a.aval.shape == shape else changed) for a in aliases]


def _in_scan(outer: Any, inner: Any, so_far: Use) -> Use:
    """A scanned operand loses its leading dim inside; a constant or a carry keeps it."""
    if len(inner.aval.shape) < len(outer.aval.shape):
        return dataclasses.replace(so_far, num_scanned=so_far.num_scanned + 1)
    return dataclasses.replace(so_far, is_invariant=True)


def _inner_jaxpr(eqn: Any) -> Any:
    """The one sub-program an equation calls with its own operands, or None."""
    for key in ("jaxpr", "call_jaxpr", "fun_jaxpr"):
        inner = eqn.params.get(key)
        inner = getattr(inner, "jaxpr", inner)
        if inner is not None and len(inner.invars) == len(eqn.invars):
            return inner
    return None


def is_gathered_on_read(leaf: Leaf, uses: Sequence[Use]) -> bool:
    """Whether gathering at each read moves this parameter no more often than the law says."""
    if not all(use.is_read and not use.is_invariant for use in uses):
        return False
    scanned = all(0 < use.num_scanned <= (leaf.dim or 0) for use in uses)
    return scanned or (len(uses) == 1 and uses[0].num_scanned == 0)


def trace(fn: Any, args: Sequence[Any]) -> Any:
    """Traces `fn(list of parameters)` with ShapeDtypeStructs to an open jaxpr."""
    return jax.make_jaxpr(fn)(list(args)).jaxpr


def depends_on(jaxpr: Any, output: int, inputs: Iterable[int]) -> bool:
    """Whether an output of an open jaxpr is computed from any of these inputs."""
    wanted = [i == output for i in range(len(jaxpr.outvars))]
    _, used = partial_eval.dce_jaxpr(jaxpr, wanted)
    return any(used[i] for i in inputs)


def plan_reads(jaxpr: Any, leaves: Sequence[Leaf]) -> list[bool]:
    """Says for each of the first inputs of a traced loss whether to gather it on read.

    Every other parameter is gathered once, before the loss.
    """
    uses = find_uses(jaxpr, len(leaves))
    return [is_gathered_on_read(leaf, mine) for leaf, mine in zip(leaves, uses, strict=True)]


def find_constrained_axes(jaxpr: Any) -> set[str]:
    """Finds the mesh axes that sharding constraints anywhere in a traced loss name."""
    found: set[str] = set()
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "sharding_constraint":
            spec = getattr(eqn.params["sharding"], "spec", ())
            found.update(name for part in spec for name in _axis_names(part))
        for inner in _all_jaxprs(eqn):
            found |= find_constrained_axes(inner)
    return found


def _axis_names(part: Any) -> tuple[str, ...]:
    if isinstance(part, tuple):
        return tuple(str(name) for name in part)
    return (part,) if isinstance(part, str) else ()


def _all_jaxprs(eqn: Any) -> Iterator[Any]:
    for value in eqn.params.values():
        for item in value if isinstance(value, (tuple, list)) else (value,):
            item = getattr(item, "jaxpr", item)
            if hasattr(item, "eqns"):
                yield item
