"""Plans by formula alone: nothing is compiled, so a trillion parameters take no longer than one."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

import jax
from flax import nnx

from jzero.config import Config
from jzero.formula import ClassBytes, largest_model, state_bytes
from jzero.gpus import Gpu
from jzero.mesh import make_mesh
from jzero.plan_figures import FORMULA, GIVEN, Figure, Plan, Sent, StagePlan
from jzero.precision import is_master
from jzero.recipe import Setup, make_setup, resolve_batch
from jzero.schema import own_arguments
from jzero.terminal import format_count
from jzero.timing import PASSES, estimate, law
from jzero.trees import abstract_leaves, named_leaves

NOTES = (
    "By formula alone: model states without padding, activations and temporaries, so a real step "
    "needs more than the peak given here. Leave --formula out to compile it.",
    "Gradients live within the step; they are in the peak.",
)
TIME_NOTE = "Times take all communication as exposed; a compiled plan says what is covered."
MIXED_PRECISION_ADAM = ClassBytes(2, 2, 12)  # 16 bits with a float32 master


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
      master_bytes: of the optimizer state, what the wide copy of a parameter takes.
      reduce_bytes: of a gradient as it travels.
      flops_per_token: of the whole model; None leaves the times out.
      tokens: of a step; None leaves the times out.
      num_microbatches: of a step.
      dtype: of the products.
      is_remat: whether the forward pass is computed again.
      num_tokens: for the hours.

    Raises:
      ValueError: `num_gpus` is no multiple of `model_parallel`.
    """

    num_params: float
    gpu: Gpu
    num_gpus: int
    stages: tuple[int, ...] = (0, 1, 2, 3)
    capacity: float = 0.0
    model_parallel: int = 1
    bytes_each: ClassBytes = MIXED_PRECISION_ADAM
    master_bytes: float = 4
    reduce_bytes: float = 2
    flops_per_token: float | None = None
    tokens: int | None = None
    num_microbatches: int = 1
    dtype: str = "bfloat16"
    is_remat: bool = True
    num_tokens: float | None = None

    def __post_init__(self) -> None:
        if self.model_parallel < 1 or self.num_gpus % self.model_parallel:
            raise ValueError(
                f"num_gpus {self.num_gpus} is not a multiple of model_parallel "
                f"{self.model_parallel}; make it one."
            )

    @property
    def num_shards(self) -> int:
        """N, the data-parallel GPUs."""
        return self.num_gpus // self.model_parallel


def formula_plan(request: Formula, facts: Mapping[str, Any] | None = None) -> Plan:
    """Makes a plan of formulas.

    Raises:
      ValueError: a size is out of its range, or the GPU does not multiply in `dtype`.

    >>> from jzero.gpus import find_gpu
    >>> plan = formula_plan(Formula(7.5e9, find_gpu("a100-80gb"), 64, capacity=80e9))
    >>> [stage.value("peak_bytes") / 1e9 for stage in plan.stages]
    [120.0, 31.40625, 16.640625, 1.875]
    """
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


def of_config(config: Config, request: Formula) -> Formula:
    """The same for the model, precision, optimizer and batch of a configuration.

    Raises:
      ValueError: values of the configuration that do not go together, or a mesh that the formulas
        do not know.
    """
    _check_mesh(config, request)
    train = config.train
    batch = resolve_batch(
        request.num_shards,
        train_batch_size=train.train_batch_size,
        micro_batch=train.micro_batch,
        num_microbatches=train.num_microbatches,
    )
    # One device pads nothing; a batch for all of them would not divide on it as it does there.
    train = dataclasses.replace(train, train_batch_size=None)
    alone = make_mesh(devices=jax.devices()[:1])
    setup = make_setup(dataclasses.replace(config, train=train), alone)
    params, state, master = _held_bytes(setup)
    summed = setup.policy.accumulator_dtype.itemsize if batch.num_microbatches > 1 else params
    return dataclasses.replace(
        request,
        num_params=setup.num_params,
        bytes_each=ClassBytes(params, summed, state),
        master_bytes=master,
        reduce_bytes=setup.policy.reduce_dtype.itemsize,
        flops_per_token=setup.flops_per_token,
        tokens=batch.micro_batch * batch.num_microbatches * config.data.seq_len,
        num_microbatches=batch.num_microbatches,
        dtype=str(setup.policy.compute_dtype),
        is_remat=own_arguments(config.model).get("remat") == "full",
    )


def _check_mesh(config: Config, request: Formula) -> None:
    sizes, num_shards = config.mesh, request.num_shards
    if sizes.replica > 1 or sizes.model > 1:
        raise ValueError(
            f"[mesh] has replica {sizes.replica} and model {sizes.model}, which the formulas do "
            "not know; leave --formula out, or set both to 1."
        )
    if sizes.data not in (None, num_shards):
        raise ValueError(
            f"[mesh] data is {sizes.data}, but there are {num_shards} data-parallel GPUs; leave "
            "it out."
        )


def _held_bytes(setup: Setup) -> tuple[float, float, float]:
    """Bytes per parameter: of itself, of the optimizer's arrays, and what of these is a master."""
    held = abstract_leaves(setup.abstract).values()
    params = nnx.split(setup.abstract, nnx.Param, ...)[1]
    leaves = named_leaves(jax.eval_shape(setup.tx.init, params))[0]
    arrays = {name: x for name, x in leaves.items() if x.ndim}  # without counts and scales
    master = [x for name, x in arrays.items() if is_master(name)]

    def each(leaves: Iterable[Any]) -> float:
        return sum(x.size * x.dtype.itemsize for x in leaves) / setup.num_params

    return each(held), each(arrays.values()), each(master)


def _stage(request: Formula, stage: int) -> StagePlan:
    each = request.bytes_each
    sizes: dict[str, Any] = {"num_shards": request.num_shards, "stage": stage}
    sizes |= {"model_parallel": request.model_parallel}
    names = ("param_bytes", "grad_bytes", "optimizer_bytes")
    sizes |= dict(zip(names, each, strict=True))
    held = state_bytes(request.num_params, **sizes)
    master = held.optimizer * request.master_bytes / (each.optimizer or 1.0)
    sent = law(
        stage,
        request.num_params / request.model_parallel,
        param_bytes=each.params,
        reduce_bytes=request.reduce_bytes,
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
        is_remat=request.is_remat,
    )
    return found.figures(
        flops=flops,
        tokens=tokens,
        num_gpus=request.num_gpus,
        peak_flops=request.gpu.peak_flops(request.dtype),
        num_tokens=request.num_tokens,
    )
