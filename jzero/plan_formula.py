"""Plans by formula alone: nothing is compiled, so a trillion parameters take no longer than one."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from jzero.config import Config
from jzero.formula import ClassBytes, largest_model, state_bytes
from jzero.gpus import Gpu
from jzero.plan_figures import FORMULA, GIVEN, Figure, Plan, Sent, StagePlan
from jzero.terminal import format_count
from jzero.timing import PASSES, estimate, law

NOTES = (
    "By formula alone: model states without padding, activations and temporaries, so a real step "
    "needs more than the peak given here. Leave --formula out to compile it.",
    "Gradients live within the step; they are in the peak.",
)
TIME_NOTE = "Times take all communication as exposed; a compiled plan says what is covered."
MIXED_PRECISION_ADAM = ClassBytes(2, 2, 12)  # 16 bits with a float32 master
FULL_BYTES = 4  # of a parameter of which there is no master


@dataclasses.dataclass(frozen=True)
class Formula:
    """What the formulas need to know.

    Args:
      num_params: of the whole model.
      gpu: the GPU and its node.
      num_gpus: of the run.
      stages: in the order of the columns.
      capacity: bytes of a GPU that model states may take.
      model_parallel: GPUs that each copy of the model is evenly split over besides.
      bytes_each: of a parameter, a summed gradient and the optimizer state.
      flops_per_token: of the whole model; None leaves the times out.
      tokens: of a step; None leaves the times out.
      num_microbatches: of a step.
      dtype: of the products.
      num_tokens: for the hours.
    """

    num_params: float
    gpu: Gpu
    num_gpus: int
    stages: tuple[int, ...] = (0, 1, 2, 3)
    capacity: float = 0.0
    model_parallel: int = 1
    bytes_each: ClassBytes = MIXED_PRECISION_ADAM
    flops_per_token: float | None = None
    tokens: int | None = None
    num_microbatches: int = 1
    dtype: str = "bfloat16"
    num_tokens: float | None = None

    @property
    def num_shards(self) -> int:
        """N, the data-parallel GPUs."""
        return self.num_gpus // self.model_parallel


def formula_plan(request: Formula, facts: Mapping[str, Any] | None = None) -> Plan:
    """Makes a plan of formulas.

    Raises:
      ValueError: `num_gpus` is no multiple of `model_parallel`, or a size is out of its range.

    >>> from jzero.gpus import find_gpu
    >>> plan = formula_plan(Formula(7.5e9, find_gpu("a100-80gb"), 64, capacity=80e9))
    >>> [stage.value("peak_bytes") / 1e9 for stage in plan.stages]
    [120.0, 31.40625, 16.640625, 1.875]
    """
    if request.model_parallel < 1 or request.num_gpus % request.model_parallel:
        raise ValueError(
            f"num_gpus {request.num_gpus} is not a multiple of model_parallel "
            f"{request.model_parallel}; make it one."
        )
    size = format_count(request.num_params)
    split = f", {request.model_parallel}-way model parallel" if request.model_parallel > 1 else ""
    return Plan(
        title=f"{size} parameters on {request.num_gpus} x {request.gpu.name}{split}, by formula",
        notes=NOTES if request.tokens is None else (*NOTES, TIME_NOTE),
        stages=tuple(_stage(request, stage) for stage in request.stages),
        facts={
            "gpu": request.gpu.name,
            "num_gpus": request.num_gpus,
            "model_parallel": request.model_parallel,
            "num_params": request.num_params,
            **(facts or {}),
        },
    )


def of_config(config: Config, setup: Any, request: Formula) -> Formula:
    """The same for the model, precision and batch of a configuration."""
    policy, batch = setup.policy, setup.batch
    itemsize = policy.param_dtype.itemsize
    is_narrow = policy.master_dtype is not None
    summed = policy.accumulator_dtype if batch.num_microbatches > 1 else policy.param_dtype
    state = 2 * (policy.state_dtype.itemsize if policy.state_dtype else FULL_BYTES)
    state += policy.master_dtype.itemsize if is_narrow else 0
    return dataclasses.replace(
        request,
        num_params=setup.num_params,
        bytes_each=ClassBytes(itemsize, summed.itemsize if summed else FULL_BYTES, state),
        flops_per_token=setup.flops_per_token,
        tokens=batch.micro_batch * batch.num_microbatches * config.data.seq_len,
        num_microbatches=batch.num_microbatches,
        dtype=str(policy.compute_dtype),
    )


def _stage(request: Formula, stage: int) -> StagePlan:
    each = request.bytes_each
    sizes: dict[str, Any] = {"num_shards": request.num_shards, "stage": stage}
    sizes |= {"model_parallel": request.model_parallel}
    names = ("param_bytes", "grad_bytes", "optimizer_bytes")
    sizes |= dict(zip(names, each, strict=True))
    held = state_bytes(request.num_params, **sizes)
    master = held.optimizer * 4 / each.optimizer if each.params < FULL_BYTES else 0.0
    sent = law(
        stage,
        request.num_params / request.model_parallel,
        param_bytes=each.params,
        reduce_bytes=each.params,
        num_microbatches=request.num_microbatches,
    )
    figures = {
        "params_bytes": held.params,
        "master_bytes": master,
        "state_bytes": held.optimizer - master,
        "grads_bytes": held.grads,
        "peak_bytes": held.total,
        "largest_params": largest_model(request.capacity, **sizes),
        **_times(request, sent),
    }
    marked = {key: Figure(value, FORMULA) for key, value in figures.items()}
    marked["capacity_bytes"] = Figure(request.capacity, GIVEN)
    ring = (request.num_shards - 1) / request.num_shards
    rows = [
        Sent(
            kind=row.kind.replace("-", "_"),
            dtype="",
            axis="data",
            times=row.num_pieces,
            wire_bytes=PASSES[row.kind] * ring * row.payload_bytes,
            source=FORMULA,
        )
        for row in sent
    ]
    return StagePlan(stage, marked, tuple(rows))


def _times(request: Formula, sent: Any) -> dict[str, float]:
    """Estimated seconds, where the batch and the model's FLOPs are known."""
    if request.tokens is None or request.flops_per_token is None:
        return {}
    tokens = request.tokens * request.num_shards
    flops = request.flops_per_token * tokens
    found = estimate(
        sent,
        flops,
        request.gpu,
        num_gpus=request.num_gpus,
        group_size=request.num_shards,
        stride=request.model_parallel,
        dtype=request.dtype,
    )
    times = {
        "flops": flops,
        "compute_s": found.compute_s,
        "comm_s": found.comm_s,
        "exposed_s": found.exposed_s,
        "step_s": found.step_s,
        "tokens_per_s": found.tokens_per_s(tokens),
        "mfu": found.mfu(flops, request.num_gpus, request.gpu.peak_flops(request.dtype)),
    }
    if request.num_tokens is not None:
        times["hours"] = found.hours(request.num_tokens, tokens)
    return times
