"""Trains a byte-level GPT-2 in a hand-written Flax NNX loop, on one device.

    python -m scripts.train_flax --steps 100

Five lines put it under ZeRO, on every device there is: `patch -p1 < scripts/train_flax.diff`.
"""

import argparse
import os
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from models.gpt2 import GPT2

BATCH_SIZE, SEQUENCE_LENGTH, PRINT_EVERY = 16, 64, 5


def make_model() -> GPT2:
    """A small GPT-2 over bytes."""
    return GPT2(
        vocab_size=256,
        num_positions=SEQUENCE_LENGTH,
        num_layers=2,
        num_heads=4,
        embed_dim=64,
        rngs=nnx.Rngs(0),
    )


def batches(text: bytes, seed: int) -> Iterator[jax.Array]:
    """Random windows of the text, (BATCH_SIZE, SEQUENCE_LENGTH + 1), one byte a token."""
    tokens = np.frombuffer(text, np.uint8).astype(np.int32)
    windows = np.lib.stride_tricks.sliding_window_view(tokens, SEQUENCE_LENGTH + 1)
    rng = np.random.default_rng(seed)
    while True:
        yield jnp.asarray(windows[rng.integers(len(windows), size=BATCH_SIZE)])


def loss_fn(model: GPT2, batch: jax.Array) -> jax.Array:
    """Mean cross entropy of each next byte, in nats."""
    return model.loss(batch)


def main() -> None:
    """Trains for --steps, and prints the mean loss of every few."""
    parser = argparse.ArgumentParser(description="Train a byte-level GPT-2 on Python's own source.")
    parser.add_argument("--steps", type=int, default=100, help="number of training steps")
    steps = parser.parse_args().steps

    sources = sorted(Path(os.__file__).parent.glob("*.py"))
    data = batches(b"".join(path.read_bytes() for path in sources), seed=0)
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
    model = make_model()
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)

    @nnx.jit(donate_argnums=(0, 1))
    def train_step(model: GPT2, optimizer: nnx.Optimizer, batch: jax.Array) -> jax.Array:
        loss, grads = nnx.value_and_grad(loss_fn)(model, batch)
        optimizer.update(model, grads)
        return loss

    losses = []
    for step in range(1, steps + 1):
        losses.append(float(train_step(model, optimizer, next(data))))
        if step % PRINT_EVERY == 0 or step == steps:
            print(f"step {step}/{steps}  loss {np.mean(losses):.6f}")
            losses.clear()


if __name__ == "__main__":
    main()
