"""Every public optax transform by inspection, and the trees and gradients they are run on."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

LR = 1e-2
NUM_STEPS = 10
NAMESPACES = {"": optax, "contrib.": optax.contrib}
contrib = optax.contrib


def params() -> Any:
    """Uneven dims, dims below N, a scalar, a stack of layers, and names that end in each other."""
    return vectors() | {"s": np.random.default_rng(3).normal(size=())}


def vectors() -> Any:
    """The same without a scalar."""
    draw = lambda *shape: np.random.default_rng(len(shape)).normal(size=shape)
    return {"a": {"w": draw(5)}, "h": {"bias": draw(4, 6), "up": draw(4, 6, 5)}, "w": draw(13, 7)}


def matrices() -> Any:
    """Matrices and a stack of them."""
    return {"h": {"up": vectors()["h"]["up"]}, "w": vectors()["w"]}


def complexes() -> Any:
    """The same with a complex matrix."""
    draw = lambda seed: np.random.default_rng(seed).normal(size=(13, 7))
    return params() | {"w": draw(0) + 1j * draw(1)}


def gradients(tree: Any, step: int) -> Any:
    """Recorded gradients: of O(1) size and nowhere near zero."""
    rng = np.random.default_rng(step)
    signed = lambda shape: rng.uniform(0.2, 2.0, shape) * rng.choice([-1.0, 1.0], shape)

    def draw(x: np.ndarray) -> np.ndarray:
        grad = signed(x.shape)
        return grad + 1j * signed(x.shape) if np.iscomplexobj(x) else np.asarray(grad)

    return jax.tree.map(draw, tree)


def value(step: int) -> np.ndarray:
    """A recorded loss, for the transforms that read it; not monotone."""
    return np.asarray(np.random.default_rng(step).uniform(0.5, 3.0))


def value_fn(tree: Any) -> jax.Array:
    """A loss of logical parameters, for line searches and Hessian estimates."""
    return sum((jnp.sum(jnp.cos(x) + x**2) for x in jax.tree.leaves(tree)), jnp.zeros(()))


@dataclasses.dataclass(frozen=True)
class Case:
    """A transform, the parameters it is run on, and what its update is given besides."""

    make: Callable[[], Any]
    params: Callable[[], Any] = params
    extra: tuple[str, ...] = ("value", "grad", "value_fn")
    promotes_ranks: bool = False  # the transform itself, which the suite forbids elsewhere


# By inspection.


@functools.cache
def listed() -> dict[str, Callable[..., Any]]:
    """Every public function that makes a transform, as its signature or a trial tells."""
    found = {}
    for prefix, module in NAMESPACES.items():
        for name, fn in vars(module).items():
            if not name.startswith("_") and inspect.isfunction(fn):
                says = "GradientTransformation" in str(inspect.signature(fn).return_annotation)
                if says or from_defaults(fn) is not None:
                    found[prefix + name] = fn
    return found


def from_defaults(fn: Callable[..., Any]) -> optax.GradientTransformation | None:
    """The transform a function makes from its defaults or a learning rate; it descends by LR."""
    rows = inspect.signature(fn).parameters
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    needed = [n for n, p in rows.items() if p.default is p.empty and p.kind not in kinds]
    if needed not in ([], ["learning_rate"]):
        return None
    try:
        with warnings.catch_warnings(action="ignore"):
            tx = fn(**dict.fromkeys(needed, LR))
    except (TypeError, ValueError):
        return None
    if not isinstance(tx, optax.GradientTransformation):
        return None
    return tx if "learning_rate" in rows else optax.chain(tx, optax.scale(-LR))


@functools.cache
def automatic() -> frozenset[str]:
    """Every listed name that builds from defaults or a learning rate."""
    return frozenset(name for name, fn in listed().items() if from_defaults(fn) is not None)


# By hand: what needs arguments, a wrapper in each of its uses ("name, use"), other parameters.

SKIPPED = {
    "contrib.differentially_private_aggregate": "takes a gradient per example, not per parameter",
    "contrib.dpsgd": "takes a gradient per example, not per parameter",
    "measure_with_ema": "returns a measurement for optax.monitor, not updates",
    "multi_transform": "the old name of partition",
    "with_extra_args_support": "Zero.optimizer applies it to every transform",
}


def deprecated(fn: Callable[..., Any]) -> Callable[..., Any]:
    """A function called without its warnings."""

    def call(*args: Any) -> Any:
        with warnings.catch_warnings(action="ignore"):
            return fn(*args)

    return call


def descending(*before: Any) -> Any:
    """The transforms, then momentum."""
    return optax.chain(*before, optax.sgd(LR, momentum=0.9))


def is_matrix(tree: Any) -> Any:
    """A mask by ndim."""
    return jax.tree.map(lambda x: x.ndim > 1, tree)


def is_in_layers(tree: Any) -> Any:
    """A mask by path."""
    return jax.tree_util.tree_map_with_path(lambda path, _: path[0].key == "h", tree)


def labels(tree: Any) -> Any:
    """A label per leaf, by path and by ndim."""
    name = lambda path, x: "layers" if path[0].key == "h" else "wide" if x.ndim > 1 else "rest"
    return jax.tree_util.tree_map_with_path(name, tree)


def parts() -> dict[str, Any]:
    """A transform per label."""
    return {"layers": optax.lamb(LR), "wide": optax.adamw(LR), "rest": optax.set_to_zero()}


def muon_dims(tree: Any) -> Any:
    """Muon on matrices and on stacks of matrices, never on a stack of biases."""

    def dims(path: Any, x: Any) -> Any:
        if x.ndim < 2 or path[-1].key == "bias":
            return None
        return contrib.MuonDimensionNumbers(x.ndim - 2, x.ndim - 1)

    return jax.tree_util.tree_map_with_path(dims, tree)


def wide(schedule: Any) -> Any:
    """A schedule of the count as a float of the default width, which is float64 here.

    Of an integer count optax's schedules compute in float32, and XLA compiles that into each kernel
    that needs the rate, here with a fused multiply-subtract, there without: 6e-8 of LR apart.
    """
    return lambda count: schedule(jnp.asarray(count, float))


def every_other(step: Any, *_: Any, **__: Any) -> Any:
    """A condition on the step."""
    return step % 2 == 0


def lookahead_pair() -> Any:
    """The parameter pair of lookahead."""
    return optax.LookaheadParams.init_synced(params())


adam = lambda: optax.adam(LR)
short = lambda: optax.scale_by_zoom_linesearch(3)  # each step of a search is traced
HAND = {
    "adaptive_grad_clip": Case(lambda: descending(optax.adaptive_grad_clip(0.1))),
    "add_noise": Case(lambda: descending(optax.add_noise(0.1, 0.5, 7))),
    "apply_if_finite": Case(lambda: optax.apply_if_finite(adam(), 3)),
    "chain": Case(lambda: optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(LR))),
    "clip": Case(lambda: descending(optax.clip(0.5))),
    "clip_by_block_rms": Case(lambda: descending(optax.clip_by_block_rms(0.5))),
    "clip_by_global_norm": Case(lambda: descending(optax.clip_by_global_norm(0.5))),
    "conditionally_mask": Case(lambda: optax.conditionally_mask(adam(), every_other)),
    "conditionally_transform": Case(lambda: optax.conditionally_transform(adam(), every_other)),
    "contrib.mechanize": Case(lambda: contrib.mechanize(adam())),
    "contrib.muon, on stacks": Case(
        lambda: contrib.muon(LR, muon_weight_dimension_numbers=muon_dims)
    ),
    "contrib.reduce_on_plateau, that reduces": Case(
        lambda: optax.chain(
            adam(), contrib.reduce_on_plateau(factor=0.5, patience=1, accumulation_size=2)
        )
    ),
    "contrib.sam": Case(
        lambda: contrib.sam(optax.adam(LR), optax.chain(contrib.normalize(), optax.sgd(LR))),
        extra=(),
    ),
    "contrib.scale_by_muon": Case(
        lambda: descending(contrib.scale_by_muon(weight_dimension_numbers=muon_dims)), matrices
    ),
    "contrib.schedule_free": Case(lambda: contrib.schedule_free(optax.adamw(LR, b1=0.0), LR)),
    "contrib.sophia": Case(lambda: contrib.sophia(LR), extra=("obj_fn",)),
    "contrib.hutchinson_estimator_diag_hessian": Case(
        lambda: descending(contrib.hutchinson_estimator_diag_hessian()), extra=("obj_fn",)
    ),
    "contrib.split_real_and_imaginary": Case(
        lambda: contrib.split_real_and_imaginary(adam()), complexes
    ),
    "adafactor, that factors": Case(lambda: optax.adafactor(LR, min_dim_size_to_factor=4)),
    "ema": Case(lambda: optax.chain(adam(), optax.ema(0.9))),
    "flatten": Case(lambda: optax.flatten(adam())),
    "freeze": Case(lambda: optax.chain(optax.freeze(is_in_layers(params())), adam())),
    "inject_hyperparams": Case(
        lambda: optax.inject_hyperparams(optax.adamw)(
            wide(optax.linear_schedule(LR, 0.0, 7)), mask=is_matrix
        )
    ),
    "inject_stateful_hyperparams": Case(
        lambda: deprecated(optax.inject_stateful_hyperparams)(optax.adam)(
            wide(optax.linear_schedule(LR, 0.0, 7)), b1=0.8
        )
    ),
    "lbfgs": Case(lambda: optax.lbfgs(LR, memory_size=2, linesearch=short())),
    "lookahead": Case(lambda: optax.lookahead(optax.lamb(LR), 3, 0.5), lookahead_pair),
    "masked, by path": Case(lambda: optax.chain(optax.masked(optax.lamb(LR), is_in_layers))),
    "masked, by ndim": Case(lambda: optax.adamw(LR, mask=is_matrix)),
    "masked, nested": Case(
        lambda: optax.masked(
            optax.chain(optax.masked(optax.trace(0.9), is_in_layers), optax.lamb(LR)), is_matrix
        )
    ),
    "MultiSteps": Case(lambda: optax.MultiSteps(adam(), 2).gradient_transformation()),
    "named_chain": Case(
        lambda: optax.named_chain(
            ("clip", optax.clip(0.5)), ("adam", adam()), ("w", optax.ema(0.9))
        )
    ),
    "noisy_sgd": Case(lambda: optax.noisy_sgd(LR, key=7)),
    "partition": Case(lambda: optax.partition(parts(), labels)),
    "scale": Case(lambda: descending(optax.scale(0.5))),
    "scale_by_backtracking_linesearch": Case(
        lambda: optax.chain(optax.sgd(LR), optax.scale_by_backtracking_linesearch(3))
    ),
    "scale_by_distance_over_gradients": Case(
        lambda: optax.chain(optax.scale_by_distance_over_gradients(), optax.scale(-LR)),
        vectors,
        promotes_ranks=True,
    ),
    "scale_by_lbfgs": Case(lambda: descending(optax.scale_by_lbfgs(memory_size=2))),
    "scale_by_schedule": Case(
        lambda: descending(optax.scale_by_schedule(wide(optax.cosine_decay_schedule(1.0, 7))))
    ),
    "scale_by_sm3": Case(lambda: optax.chain(optax.scale_by_sm3(), optax.scale(-LR)), vectors),
    "scale_by_zoom_linesearch": Case(lambda: optax.chain(optax.sgd(LR), short())),
    "selective_transform": Case(
        lambda: optax.selective_transform(adam(), freeze_mask=is_matrix(params()))
    ),
    "sm3": Case(lambda: optax.sm3(LR), vectors),
    "snapshot": Case(lambda: descending(optax.snapshot("seen", lambda u: u["h"]))),
    "stateless": Case(
        lambda: descending(optax.stateless(lambda u, p: jax.tree.map(lambda x, y: x + y, u, p)))
    ),
    "stateless_with_tree_map": Case(
        lambda: descending(optax.stateless_with_tree_map(lambda u, p: u + 0.1 * p))
    ),
    "trace": Case(lambda: optax.chain(optax.trace(0.9), optax.scale(-LR))),
}


def cases() -> dict[str, Case]:
    """Every case by name."""
    built = {
        name: Case(functools.partial(from_defaults, listed()[name])) for name in sorted(automatic())
    }
    return built | HAND
