"""Small models with everything that goes wrong: uneven shapes, tied weights, scans, remat."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import jzero

VOCAB, DIM, HIDDEN, TIME = 13, 6, 10, 5


class Layer(nnx.Module):
    """A residual MLP."""

    def __init__(self, rngs: nnx.Rngs, dtype: Any):
        draw = lambda *shape: nnx.Param(jax.random.normal(rngs.params(), shape, dtype) * 0.3)
        self.up, self.bias, self.down = draw(DIM, HIDDEN), draw(HIDDEN), draw(HIDDEN, DIM)

    def __call__(self, x: jax.Array, key: Any = None) -> jax.Array:
        del key
        return x + jnp.tanh(x @ self.up[...] + self.bias[...][None, None]) @ self.down[...]


class Toy(nnx.Module):
    """A tied embedding around scanned, rematerialised layers; no dim suits 5, 7 or 8 devices."""

    def __init__(self, key: jax.Array, dtype: Any = jnp.float32, num_layers: int = 2):
        rngs = nnx.Rngs(key)

        @nnx.split_rngs(splits=num_layers)
        @nnx.vmap(in_axes=(0,), out_axes=0)
        def make(rngs: nnx.Rngs) -> Layer:
            return Layer(rngs, dtype)

        self.layers = make(rngs)
        self.table = nnx.Param(jax.random.normal(rngs.params(), (VOCAB, DIM), dtype) * 0.3)
        self.scale = nnx.Param(jnp.ones((), dtype))

    def __call__(self, tokens: jax.Array, run_layers: Any = None) -> jax.Array:
        x = self.table[...][tokens]
        if run_layers is not None:
            x = run_layers(lambda layer, x, key: layer(x, key), self.layers, x)
        else:
            x = _scan(self.layers, x)
        return self.scale[...] * x @ self.table[...].T


@nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
def _scan(layer: Layer, x: jax.Array) -> jax.Array:
    return nnx.remat(lambda layer, x: layer(x))(layer, x)


def toy_loss(model: Toy, tokens: jax.Array, run_layers: Any = None) -> jax.Array:
    """Mean next-token cross entropy."""
    logits = model(tokens[:, :-1], run_layers)
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


def toy_batches(num_steps: int, num_rows: int) -> list[np.ndarray]:
    """Token batches of shape (num_rows, TIME + 1)."""
    rng = np.random.default_rng(0)
    return [rng.integers(0, VOCAB, (num_rows, TIME + 1)) for _ in range(num_steps)]


def data_mesh(num_devices: int) -> jax.sharding.Mesh:
    """A data mesh over the first devices."""
    return jzero.make_mesh(devices=jax.devices()[:num_devices])


def plain_training(
    model: nnx.Module, loss_fn: Any, tx: optax.GradientTransformation, batches: list[Any]
) -> tuple[list[float], Any]:
    """The reference: un-partitioned optax on one device. Returns losses and parameters."""
    graphdef, params, rest = nnx.split(model, nnx.Param, ...)

    @jax.jit
    def step(params: Any, state: Any, batch: Any) -> Any:
        fn = lambda p: loss_fn(nnx.merge(graphdef, p, rest), batch)
        loss, grads = jax.value_and_grad(fn)(params)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    state, losses = tx.init(params), []
    for batch in batches:
        params, state, loss = step(params, state, batch)
        losses.append(float(loss))
    return losses, params


def make_step(zero: jzero.Zero, model: nnx.Module, loss_fn: Any, tx: Any, **options: Any) -> Any:
    """One jitted training step (params, state, batch) of a module under `zero`."""
    graphdef, _, rest = nnx.split(model, nnx.Param, ...)
    value_and_grad = zero.value_and_grad(loss_fn, **options)

    def step(params: Any, state: Any, batch: Any) -> Any:
        loss, grads = value_and_grad(nnx.merge(graphdef, params, rest), batch)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    return jax.jit(step, donate_argnums=(0, 1))


def zero_training(
    zero: jzero.Zero, model: nnx.Module, loss_fn: Any, tx: Any, batches: list[Any], **options: Any
) -> tuple[list[float], Any, int]:
    """The same under `zero`. Returns losses, gathered parameters and the number of compilations."""
    placed = zero.place(model)
    tx = zero.optimizer(tx)
    params = nnx.state(placed, nnx.Param)
    state, losses = tx.init(params), []
    step = make_step(zero, placed, loss_fn, tx, **options)
    for batch in batches:
        params, state, loss = step(params, state, batch)
        losses.append(float(loss))
    return losses, zero.gather(params), step._cache_size()


def max_difference(a: Any, b: Any) -> float:
    """The largest absolute difference between two trees."""
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return max(float(np.abs(np.asarray(x, float) - np.asarray(y, float)).max()) for x, y in pairs)
