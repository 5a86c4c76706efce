"""The loop's own cost: a step of zero over the same step hand-written in plain JAX, stage by stage.

    python scripts/bench_step.py
    python scripts/bench_step.py --rounds 30 --steps 4 --stages 1 3
    python scripts/bench_step.py --count

Both train the same GPT-2-like stack with the same AdamW on the same batch, over all GPUs or over 8
virtual CPU devices. They take turns, step by step; only ratios within one run mean something.
"""

import argparse
import functools
import re
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jzero

AXIS = "data"
NUM_VIRTUAL_DEVICES = 8
LOSS_TOLERANCE = 1e-5  # float32, another order of summation; relative
NUM_WARMUP = 3
SIZES = {  # rows are per device
    **{"--num-layers": 4, "--dim": 256, "--num-heads": 4},
    **{"--vocab-size": 2048, "--length": 64, "--rows": 2},
}
TIMES = ("stage", "by hand, ms", "zero, ms", "zero / by hand", "min", "max")
COUNTED = ("all-reduce", "reduce-scatter", "all-gather", "copy", "fusion")


class Variant(NamedTuple):
    step: Any  # (params, opt_state, tokens) -> (params, opt_state, loss); jitted, then compiled
    params: Any
    opt_state: Any


# The model: plain functions of a dict; `read` is the first line of a block.


def init(args: argparse.Namespace) -> Any:
    """Parameters on the host; every dim that is cut divides by the number of devices."""
    rng = np.random.default_rng(0)
    depth, dim = args.num_layers, args.dim

    def normal(*shape: int) -> np.ndarray:
        return rng.normal(0, 0.02, shape).astype(np.float32)

    layers = {}
    for name, rows, columns in (("qkv", 1, 3), ("proj", 1, 1), ("up", 1, 4), ("down", 4, 1)):
        layers[name] = normal(depth, rows * dim, columns * dim)
        layers[f"{name}_b"] = normal(depth, columns * dim)
    layers |= {name: 1 + normal(depth, dim) for name in ("ln_1", "ln_2")}
    rest = {"wte": normal(args.vocab_size, dim), "wpe": normal(args.length, dim)}
    return {**rest, "ln_f": 1 + normal(dim), "h": layers}


def norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    x = x - x.mean(-1, keepdims=True)
    return x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-5) * scale[None, None]


def linear(x: jax.Array, w: Any, name: str) -> jax.Array:
    return x @ w[name] + w[f"{name}_b"][None, None]


def block(x: jax.Array, w: Any, head_dim: int) -> jax.Array:
    qkv = linear(norm(x, w["ln_1"]), w, "qkv")  # (B, T, 3 D)
    q, k, v = (part.reshape(*x.shape[:2], -1, head_dim) for part in jnp.split(qkv, 3, -1))
    attended = jax.nn.dot_product_attention(q, k, v, is_causal=True)  # (B, T, H, head_dim)
    x = x + linear(attended.reshape(x.shape), w, "proj")
    return x + linear(jax.nn.gelu(linear(norm(x, w["ln_2"]), w, "up")), w, "down")


def model_loss(params: Any, tokens: jax.Array, read: Callable[[Any], Any], head_dim: int) -> Any:
    """Mean cross entropy; `read` makes one layer's weights of what the scan hands the block."""

    def body(x: jax.Array, layer: Any) -> tuple[jax.Array, None]:
        return block(x, read(layer), head_dim), None

    wte, wpe = params["wte"], params["wpe"]
    x = wte[tokens[:, :-1]] + wpe[None]
    x, _ = jax.lax.scan(jax.checkpoint(body, prevent_cse=False), x, params["h"])
    logits = norm(x, params["ln_f"]) @ wte.T  # (B, T, V)
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


# The step by hand: nothing of jzero from here to `hand_written`.


def cut_dims(params: Any) -> Any:
    """The dim to cut of each leaf: the leading one of the layer."""
    rest = {name: 0 for name in params if name != "h"}
    return {**rest, "h": dict.fromkeys(params["h"], 1)}


def gather(shard: jax.Array, dim: int) -> jax.Array:
    return jax.lax.all_gather(shard, AXIS, axis=dim, tiled=True)


def scatter(grad: jax.Array, dim: int) -> jax.Array:
    return jax.lax.psum_scatter(grad, AXIS, scatter_dimension=dim, tiled=True)


def my_shard(x: jax.Array, dim: int) -> jax.Array:
    size = x.shape[dim] // jax.lax.axis_size(AXIS)
    return jax.lax.dynamic_slice_in_dim(x, jax.lax.axis_index(AXIS) * size, size, dim)


def tap(weight: jax.Array, shard: jax.Array, dim: int) -> jax.Array:
    """Forward the weight; backward its gradient, reduce-scattered, to `shard`."""
    tapped = jax.custom_vjp(lambda weight, shard: weight)
    tapped.defvjp(lambda weight, shard: (weight, None), lambda _, grad: (None, scatter(grad, dim)))
    return tapped(weight, shard)


def whole_grads(loss: Any, params: Any, tokens: Any) -> Any:
    return jax.value_and_grad(lambda p: loss(p, tokens, read=lambda layer: layer))(params)


def grads_0(loss: Any, params: Any, tokens: Any) -> Any:
    value, grads = whole_grads(loss, params, tokens)
    return value, jax.tree.map(lambda g: jax.lax.psum(g, AXIS), grads)


def grads_1(loss: Any, params: Any, tokens: Any) -> Any:
    value, grads = whole_grads(loss, params, tokens)
    return value, jax.tree.map(scatter, grads, cut_dims(params))


def grads_2(loss: Any, params: Any, tokens: Any) -> Any:
    """Each layer's gradient is reduce-scattered in the backward loop; the rest's at its end."""

    def tapped_loss(taps: Any) -> Any:
        rest = {name: tap(params[name], taps[name], 0) for name in params if name != "h"}
        given = {**rest, "h": (params["h"], taps["h"])}
        return loss(given, tokens, read=lambda h: jax.tree.map(lambda w, t: tap(w, t, 0), *h))

    shards = jax.eval_shape(lambda p: jax.tree.map(my_shard, p, cut_dims(p)), params)
    taps = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shards)
    return jax.value_and_grad(tapped_loss)(taps)


def grads_3(loss: Any, params: Any, tokens: Any) -> Any:
    """Layers are gathered in both loops, forward and backward; the rest once, before the loss."""

    def sharded_loss(shards: Any) -> Any:
        given = {name: gather(shards[name], 0) for name in shards if name != "h"}
        read = functools.partial(jax.tree.map, lambda w: gather(w, 0))
        return loss({**given, "h": shards["h"]}, tokens, read=read)

    return jax.value_and_grad(sharded_loss)(params)


GRADS = (grads_0, grads_1, grads_2, grads_3)


def hand_written(stage: int, loss: Any, tx: Any, mesh: Any, params: Any) -> Variant:
    """The step of a stage, all of it in one shard_map."""
    dims = cut_dims(params)
    cut = jax.tree.map(lambda dim: P(*(None,) * dim, AXIS), dims)
    whole = jax.tree.map(lambda _: P(), dims)
    at_rest, of_state = cut if stage == 3 else whole, whole if stage == 0 else cut

    def step(params: Any, opt_state: Any, tokens: jax.Array) -> Any:
        value, grads = GRADS[stage](loss, params, tokens)
        grads = jax.tree.map(lambda g: g / jax.lax.axis_size(AXIS), grads)
        mine = jax.tree.map(my_shard, params, dims) if stage in (1, 2) else params
        updates, opt_state = tx.update(grads, opt_state, mine)
        mine = optax.apply_updates(mine, updates)
        params = jax.tree.map(gather, mine, dims) if stage in (1, 2) else mine
        return params, opt_state, jax.lax.pmean(value, AXIS)

    state_specs = optax.tree.map_params(
        tx,
        lambda _, spec: spec,
        jax.eval_shape(tx.init, params),
        of_state,
        transform_non_params=lambda _: P(),
    )
    specs = at_rest, state_specs, P(AXIS)
    to_sharding = functools.partial(jax.tree.map, lambda spec: NamedSharding(mesh, spec))
    run = jax.shard_map(
        step, mesh=mesh, in_specs=specs, out_specs=(*specs[:2], P()), check_vma=False
    )
    opt_state = jax.jit(tx.init, out_shardings=to_sharding(state_specs))(params)
    placed = jax.device_put(params, to_sharding(at_rest))
    return Variant(jax.jit(run, donate_argnums=(0, 1)), placed, opt_state)


def with_zero(stage: int, loss: Any, tx: Any, mesh: Any, params: Any) -> Variant:
    """The same step through jzero."""
    zero = jzero.Zero(mesh, stage, like=params)
    tx = zero.optimizer(tx)
    value_and_grad = zero.value_and_grad(functools.partial(loss, read=zero.block_params))

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params: Any, opt_state: Any, tokens: jax.Array) -> Any:
        value, grads = value_and_grad(params, tokens)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, value

    placed = zero.place(params)
    return Variant(step, placed, tx.init(placed))


# Running them.


def compiled(variant: Variant, tokens: jax.Array) -> Variant:
    """The same, compiled: a step whose layouts drifted would be refused, not compiled anew."""
    step = variant.step.lower(variant.params, variant.opt_state, tokens).compile()
    return variant._replace(step=step)


def run_step(variant: Variant, tokens: jax.Array) -> tuple[Variant, float, float]:
    """One step, waited for; returns the variant after it, its loss and milliseconds."""
    start = time.perf_counter()
    out = jax.block_until_ready(variant.step(variant.params, variant.opt_state, tokens))
    elapsed = time.perf_counter() - start
    return Variant(variant.step, *out[:2]), float(out[2]), 1e3 * elapsed


def run_round(pair: list[Variant], tokens: Any, num_steps: int, first: int) -> list[float]:
    """Runs both in turn, `first` leading; replaces them in `pair`, returns each one's median ms."""
    times: list[list[float]] = [[], []]
    for i in range(num_steps):
        for which in ((first + i) % 2, (first + i + 1) % 2):
            pair[which], _, elapsed = run_step(pair[which], tokens)
            times[which].append(elapsed)
    return [statistics.median(each) for each in times]


def check_same_loss(stage: int, pair: list[Variant], tokens: Any) -> None:
    """Runs the first steps of both and compares the losses."""
    for i in range(NUM_WARMUP):
        losses = []
        for which in range(2):
            pair[which], value, _ = run_step(pair[which], tokens)
            losses.append(value)
        if not abs(losses[0] - losses[1]) <= LOSS_TOLERANCE * abs(losses[0]):
            raise ValueError(
                f"stage {stage}, step {i}: hand-written loss {losses[0]}, zero's {losses[1]}; "
                "they must be one step, or their times cannot be compared."
            )


def measure(pairs: dict[int, list[Variant]], tokens: Any, args: argparse.Namespace) -> list[str]:
    """Checks and times all pairs; returns the lines of a table."""
    for stage, pair in pairs.items():
        check_same_loss(stage, pair, tokens)
    rounds = [
        {stage: run_round(pair, tokens, args.steps, i % 2) for stage, pair in pairs.items()}
        for i in range(args.rounds)
    ]
    lines = [f"| {' | '.join(TIMES)} |", "|---" * len(TIMES) + "|"]
    for stage in pairs:
        times = [each[stage] for each in rounds]
        by_hand, zero = (statistics.median(column) for column in zip(*times, strict=True))
        ratios = [z / h for h, z in times]
        spread = f"{statistics.median(ratios):.3f} | {min(ratios):.3f} | {max(ratios):.3f}"
        lines.append(f"| {stage} | {by_hand:.1f} | {zero:.1f} | {spread} |")
    return lines


def count_table(pairs: dict[int, list[Variant]]) -> list[str]:
    """Instructions of both compiled programs, each counted once however often its loop runs."""
    lines = [f"| stage | program | {' | '.join(COUNTED)} | temp MiB |", "|---" * 8 + "|"]
    for stage, pair in pairs.items():
        for name, variant in zip(("by hand", "zero"), pair, strict=True):
            found = Counter(re.findall(r" ([a-z\-]+?)(?:-start)?\(", variant.step.as_text()))
            temp = variant.step.memory_analysis().temp_size_in_bytes / 2**20
            counts = " | ".join(str(found[kind]) for kind in COUNTED)
            lines.append(f"| {stage} | {name} | {counts} | {temp:.2f} |")
    return lines


def bench(args: argparse.Namespace) -> list[str]:
    """Builds both variants of each stage; returns the lines to print."""
    mesh = jzero.make_mesh()
    params = init(args)
    devices = jax.devices()
    shape = (args.rows * len(devices), args.length + 1)
    tokens = np.random.default_rng(1).integers(0, args.vocab_size, shape, dtype=np.int32)
    tokens = jax.device_put(tokens, NamedSharding(mesh, P(AXIS)))
    loss = functools.partial(model_loss, head_dim=args.dim // args.num_heads)
    tx = optax.adamw(1e-3)
    pairs = {
        stage: [
            compiled(make(stage, loss, tx, mesh, params), tokens)
            for make in (hand_written, with_zero)
        ]
        for stage in args.stages
    }
    size = sum(x.size for x in jax.tree.leaves(params))
    title = f"{size:,} parameters, tokens {shape}, {len(devices)} x {devices[0].device_kind}"
    counts = ["", *count_table(pairs)] if args.count else []
    return [title, "", *measure(pairs, tokens, args), *counts]


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=15, help="one ratio a round and stage")
    parser.add_argument("--steps", type=int, default=3, help="steps of each in a round")
    parser.add_argument("--stages", type=int, nargs="+", choices=range(4), default=[0, 1, 2, 3])
    parser.add_argument("--count", action="store_true", help="count compiled instructions too")
    for flag, default in SIZES.items():
        parser.add_argument(flag, type=int, default=default, help=f"default {default}")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    args = parse_args(argv)
    cut = {"--dim": args.dim, "--vocab-size": args.vocab_size, "--length": args.length}
    bad = [f"{flag} {n}" for flag, n in cut.items() if n % jax.device_count() or n < 1]
    if bad or min(args.rounds, args.steps) < 1 or args.dim % args.num_heads:
        sys.exit(
            f"error: {', '.join(bad) or 'a count below 1, or --dim not divisible by --num-heads'}; "
            f"give multiples of {jax.device_count()}, the number of devices."
        )
    print("\n".join(bench(args)))


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", NUM_VIRTUAL_DEVICES)
    main()
