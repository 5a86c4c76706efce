"""Plans by formula alone: nothing is compiled, so a trillion parameters take no longer than one."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import jax
from flax import nnx

from jzero.config import Config
from jzero.formula import ClassBytes, largest_model, state_bytes
from jzero.gpus import Gpu
from jzero.layout import STAGES, is_floating, make_layout
from jzero.losses import is_born_cut
from jzero.mesh import make_mesh
from jzero.plan_figures import CAPACITY_NOTE, FORMULA, GIVEN, Figure, Plan, Sent, StagePlan
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
GATHERED_NOTE = "At stage 3 the weights are kept whole within the step, and are in the peak."
BORN_CUT_NOTE = "With one microbatch stage 1 reduces gradients where they arise, as stage 2 does."
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
      capacity_bytes: of a GPU; None: `gpu.usable_bytes`.
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
      whole_grads: share of the gradients, 0 to 1, that stage 1 holds whole: in the paper all.
      keep_gathered: whether stage 3 gathers once a step and keeps the weights whole within it.

    Raises:
      ValueError: `num_gpus` is no multiple of `model_parallel`.
    """

    num_params: float
    gpu: Gpu
    num_gpus: int
    stages: tuple[int, ...] = (0, 1, 2, 3)
    capacity_bytes: float | None = None
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
    whole_grads: float = 1.0
    keep_gathered: bool = False

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

    @property
    def capacity(self) -> float:
        """Bytes of a GPU that model states may take."""
        return self.gpu.usable_bytes if self.capacity_bytes is None else self.capacity_bytes


def formula_plan(request: Formula, facts: Mapping[str, Any] | None = None) -> Plan:
    """Makes a plan of formulas.

    Raises:
      ValueError: a size is out of its range, or the GPU does not multiply in `dtype`.

    >>> from jzero.gpus import find_gpu
    >>> plan = formula_plan(Formula(7.5e9, find_gpu("a100-80gb"), 64, capacity_bytes=8e10))
    >>> [stage.value("peak_bytes") / 1e9 for stage in plan.stages]
    [120.0, 31.40625, 16.640625, 1.875]
    """
    size = format_count(request.num_params)
    split = f", {request.model_parallel}-way model parallel" if request.model_parallel > 1 else ""
    return Plan(
        title=f"{size} parameters on {request.num_gpus} x {request.gpu.name}{split}, by formula",
        notes=_notes(request),
        stages=tuple(_stage(request, stage) for stage in request.stages),
        facts={
            "gpu": request.gpu.name,
            "num_gpus": request.num_gpus,
            "model_parallel": request.model_parallel,
            "num_params": request.num_params,
            **(facts or {}),
        },
    )


def _notes(request: Formula) -> tuple[str, ...]:
    told = {
        GATHERED_NOTE: request.keep_gathered and 3 in request.stages,
        BORN_CUT_NOTE: request.whole_grads < 1 and 1 in request.stages,
        CAPACITY_NOTE: request.capacity_bytes is None,
        TIME_NOTE: request.tokens is not None,
    }
    return (*NOTES, *(note for note, is_so in told.items() if is_so))


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
        whole_grads=_whole_grads(setup, request, batch.num_microbatches),
        keep_gathered=config.zero.keep_gathered,
    )


def _whole_grads(setup: Setup, request: Formula, num_microbatches: int) -> float:
    """Share of the gradients that stage 1 holds whole within a step."""
    if 1 not in request.stages:
        return 1.0
    zero = setup.config.zero
    leaves = make_layout(
        abstract_leaves(setup.abstract),
        num_shards=request.num_shards,
        min_size=zero.min_size,
        cut_layers=zero.cut_layers,
    ).values()
    trained = [leaf for leaf in leaves if is_floating(leaf.dtype)]
    whole = [leaf for leaf in trained if not is_born_cut(leaf, STAGES[1], num_microbatches)]
    sizes = [sum(math.prod(leaf.shape) for leaf in some) for some in (whole, trained)]
    return sizes[0] / max(sizes[1], 1)


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
    paper = state_bytes(request.num_params, **sizes)
    held = paper._replace(grads=paper.grads * _held_grads(request, stage))
    peak = held.total + _kept_bytes(request, stage)
    master = held.optimizer * request.master_bytes / (each.optimizer or 1.0)
    sent = law(
        stage,
        request.num_params / request.model_parallel,
        param_bytes=each.params,
        reduce_bytes=request.reduce_bytes,
        num_microbatches=request.num_microbatches,
        keep_gathered=request.keep_gathered,
    )
    figures = {
        "params_bytes": held.params,
        "master_bytes": master,
        "state_bytes": held.optimizer - master,
        "grads_bytes": held.grads,
        "peak_bytes": peak,
        "largest_params": largest_model(request.capacity, **sizes) * (paper.total / peak),
        **_times(request, sent),
    }
    marked = {key: Figure(value, FORMULA) for key, value in figures.items()}
    marked["capacity_bytes"] = Figure(request.capacity, GIVEN)
    return StagePlan(stage, marked, tuple(_rows(request, sent)))


def _held_grads(request: Formula, stage: int) -> float:
    """Of the gradients that the paper has a device hold, the share that it does."""
    if stage != 1:
        return 1.0
    return request.whole_grads + (1 - request.whole_grads) / request.num_shards


def _kept_bytes(request: Formula, stage: int) -> float:
    """Of whole weights beside the shards, within a step."""
    if stage != 3 or not request.keep_gathered or request.num_shards == 1:
        return 0.0
    return request.bytes_each.params * request.num_params / request.model_parallel


def _rows(request: Formula, sent: Iterable[Any]) -> Iterator[Sent]:
    ring = (request.num_shards - 1) / request.num_shards
    for row in sent:
        yield Sent(
            kind=row.kind.replace("-", "_"),
            dtype="",
            axis="data",
            times=row.num_pieces,
            wire_bytes=PASSES[row.kind] * ring * row.payload_bytes,
            source=FORMULA,
        )


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
