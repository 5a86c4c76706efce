"""Estimates of time: collectives by latency and bandwidth of the links they cross, and steps."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from jzero.gpus import Gpu

# Ring passes of a collective: its N - 1 steps and its bytes (N-1)/N count so often.
PASSES = {"all-gather": 1, "reduce-scatter": 1, "all-to-all": 1, "all-reduce": 2}
REMAT = 4 / 3  # the forward pass, a third of the work, is computed twice


def collective_seconds(
    kind: str, payload_bytes: float, group_size: int, gpu: Gpu, *, stride: int = 1
) -> float:
    """Estimates the time of one collective as a ring: T = a0 + steps a + S (N-1) / (N B).

    Args:
      kind: "all-gather", "reduce-scatter", "all-reduce" (twice the steps and bytes), "all-to-all"
        or "collective-permute" (one step, all bytes).
      payload_bytes: S, of the whole array: all-gather's output, reduce-scatter's input; of an
        all-to-all or a collective-permute what one GPU holds.
      group_size: N, GPUs that take part together, at least 1.
      gpu: its node, links and latencies.
      stride: GPUs from one member of a group to the next: the product of the mesh axes after this
        one. Groups side by side share the network of a node.

    Returns:
      Seconds; 0 for a group of one. Within a node B is the link's rate. Across nodes a ring passes
      each node's boundary once, so B is the node's whole rate over the groups that share it, and
      no more than the link's; as many of the steps are the network's as there are boundaries.

    Raises:
      ValueError: another kind, or sizes that make no sense.

    Source: Thakur et al., Optimization of Collective Communication Operations in MPICH, 2005.

    >>> from jzero.gpus import find_gpu
    >>> f'{collective_seconds("all-gather", 8e9, 8, find_gpu("h100-sxm")) * 1e3:.2f} ms'
    '18.91 ms'
    """
    if kind not in PASSES and kind != "collective-permute":
        known = ", ".join([*PASSES, "collective-permute"])
        raise ValueError(f"no time is known of the collective {kind!r}; give one of {known}.")
    if group_size < 1 or stride < 1 or payload_bytes < 0:
        raise ValueError(
            f"group_size {group_size}, stride {stride} and payload_bytes {payload_bytes}: give at "
            "least 1, 1 and 0."
        )
    if group_size == 1:
        return 0.0
    num_nodes, rate = _boundaries(group_size, gpu, stride)
    if kind == "collective-permute":
        step_s = gpu.node_step_s if num_nodes > 1 else gpu.link_step_s
        return gpu.base_s + step_s + payload_bytes / rate
    steps_s = (num_nodes - 1) * gpu.node_step_s + (group_size - num_nodes) * gpu.link_step_s
    wire_s = payload_bytes * (group_size - 1) / group_size / rate
    return gpu.base_s + PASSES[kind] * (steps_s + wire_s)


def _boundaries(group_size: int, gpu: Gpu, stride: int) -> tuple[int, float]:
    """How many nodes a group spans, and the bytes per second that its ring gets."""
    num_nodes = min(group_size, math.ceil(group_size * stride / gpu.gpus_per_node))
    if num_nodes == 1:
        return 1, gpu.link_bytes_per_s
    num_sharing = min(stride, gpu.gpus_per_node)
    return num_nodes, min(gpu.link_bytes_per_s, gpu.node_bytes_per_s / num_sharing)


@dataclass(frozen=True)
class Estimate:
    """Time of one training step; an estimate, not a promise."""

    compute_s: float
    comm_s: float  # all collectives
    exposed_s: float  # of that, what no compute hides

    @property
    def step_s(self) -> float:
        """Seconds of a step: compute, and communication that it does not hide."""
        return self.compute_s + self.exposed_s

    def tokens_per_s(self, tokens_per_step: float) -> float:
        """Tokens per second of all GPUs together.

        >>> Estimate(compute_s=0.75, comm_s=1.0, exposed_s=0.25).tokens_per_s(4096)
        4096.0
        """
        return tokens_per_step / self.step_s

    def mfu(self, flops_per_step: float, num_gpus: int, peak_flops: float) -> float:
        """Share of the GPUs' peak (FLOP/s each) that the model's FLOPs of a step make, 0 to 1."""
        return flops_per_step / (num_gpus * peak_flops * self.step_s)

    def hours(self, num_tokens: float, tokens_per_step: float) -> float:
        """Hours to train on so many tokens.

        >>> Estimate(compute_s=1.0, comm_s=0.0, exposed_s=0.0).hours(3600 * 1024, 1024)
        1.0
        """
        return num_tokens / self.tokens_per_s(tokens_per_step) / 3600

    def figures(
        self,
        *,
        flops: float,
        tokens: float,
        num_gpus: int,
        peak_flops: float,
        num_tokens: float | None = None,
    ) -> dict[str, float]:
        """All that a plan says of time, by the keys of its figures.

        Args:
          flops: the model's, of a step on all GPUs.
          tokens: of a step on all GPUs.
          num_gpus: of the run.
          peak_flops: of one GPU, in FLOP/s.
          num_tokens: of the whole run; None leaves the hours out.
        """
        found = {
            "flops": flops,
            "compute_s": self.compute_s,
            "comm_s": self.comm_s,
            "exposed_s": self.exposed_s,
            "step_s": self.step_s,
            "tokens_per_s": self.tokens_per_s(tokens),
            "mfu": self.mfu(flops, num_gpus, peak_flops),
        }
        return found if num_tokens is None else found | {"hours": self.hours(num_tokens, tokens)}


class Sent(NamedTuple):
    """A collective of the law, in pieces of equal size."""

    kind: str
    payload_bytes: float  # of all pieces together
    num_pieces: int


def law(
    stage: int,
    num_params: float,
    *,
    param_bytes: float = 2,
    reduce_bytes: float = 2,
    num_microbatches: int = 1,
    num_layers: int = 1,
    num_rest: float = 0,
    keep_gathered: bool = False,
) -> list[Sent]:
    """What a step of each stage sends: 2, 2, G + 1 and at most 3 G passes over the parameters.

    Args:
      stage: 0 to 3.
      num_params: parameters, padded.
      param_bytes: of one as it is gathered.
      reduce_bytes: of one gradient as it is reduced.
      num_microbatches: G, at least 1.
      num_layers: what travels goes layer by layer; each has a latency.
      num_rest: parameters outside the layers, which stage 3 gathers once, not twice.
      keep_gathered: whether stage 3 gathers once a step, and so sends G + 1 passes.

    Raises:
      ValueError: a stage that there is not.

    >>> law(2, 1e9, num_microbatches=4)
    [Sent(kind='reduce-scatter', payload_bytes=8000000000.0, num_pieces=4), \
Sent(kind='all-gather', payload_bytes=2000000000.0, num_pieces=1)]
    """
    if stage not in (0, 1, 2, 3):
        raise ValueError(f"stage is {stage!r}; give 0, 1, 2 or 3.")
    if stage == 0:
        return [Sent("all-reduce", reduce_bytes * num_params, num_layers)]
    num_reduced = num_microbatches if stage >= 2 else 1
    gathers_twice = stage == 3 and not keep_gathered
    passes = 2 * num_params - num_rest if gathers_twice else num_params
    num_gathered = num_microbatches if gathers_twice else 1
    num_pieces = num_gathered * (2 if gathers_twice else 1) * num_layers
    return [
        Sent("reduce-scatter", num_reduced * reduce_bytes * num_params, num_reduced * num_layers),
        Sent("all-gather", num_gathered * param_bytes * passes, num_pieces),
    ]


def estimate(
    sent: list[Sent],
    flops_per_step: float,
    gpu: Gpu,
    *,
    num_gpus: int,
    group_size: int | None = None,
    stride: int = 1,
    dtype: str = "bfloat16",
    is_remat: bool = True,
    hidden: float = 0.0,
) -> Estimate:
    """Estimates a step by formula, without compiling.

    Args:
      sent: what a step sends, as from `law`.
      flops_per_step: the model's, of all GPUs together, recomputation not counted.
      gpu: what each of them is.
      num_gpus: that share the work.
      group_size: that share the parameters; all of them where left out.
      stride: as in `collective_seconds`.
      dtype: of the products.
      is_remat: whether the forward pass is computed again.
      hidden: share of the communication that compute hides, 0 to 1; never more than the compute.

    Raises:
      ValueError: `hidden` is no share, or the GPU does not multiply in `dtype`.
    """
    if not 0 <= hidden <= 1:
        raise ValueError(f"hidden is {hidden}; give a share of the communication, 0 to 1.")
    flops = flops_per_step / num_gpus * (REMAT if is_remat else 1)
    compute_s = flops / (gpu.efficiency * gpu.peak_flops(dtype))
    size = num_gpus if group_size is None else group_size
    comm_s = sum(
        row.num_pieces
        * collective_seconds(row.kind, row.payload_bytes / row.num_pieces, size, gpu, stride=stride)
        for row in sent
    )
    return Estimate(compute_s, comm_s, comm_s - min(hidden * comm_s, compute_s))
