"""The announcement of ZeRO as a check of the time model: 64 V100s, Megatron-LM against ZeRO."""

from __future__ import annotations

from typing import NamedTuple

from jzero.gpus import Gpu, find_gpu
from jzero.terminal import train_flops_per_token
from jzero.timing import REMAT, collective_seconds, law

NUM_GPUS, SEQ_LEN, GPU = 64, 1024, "v100-sxm2-32gb"
# Narrow products are slower: share of the peak = efficiency (1 + h/r) w / (w + h) at width w, the
# embedding's over the tensor-parallel degree. r is the width at which the efficiency was measured
# (1.2 B on one V100). h follows from the same paper's 77 % of linear scaling for 8.3 B on 8 GPUs
# (w = 384; its all-reduces by the ring formula): nothing is fitted to the rows below.
MEASURED_WIDTH, HALF_WIDTH = 1536, 60
ALL_REDUCES = 6  # of a layer: 2 forward, 2 backward, 2 in the forward that is computed again


class Run(NamedTuple):
    """One published measurement."""

    model_parallel: int
    data_parallel: int
    batch_size: int  # sequences
    samples_per_s: float


class Model(NamedTuple):
    """A model of the announcement, as run by Megatron-LM and with ZeRO."""

    num_params: float
    num_layers: int
    embed_dim: int
    megatron: Run
    zero: Run


# Microsoft, "ZeRO & DeepSpeed", February 2020: four DGX-2, sequences of 1024 tokens, fp16.
MODELS = (
    Model(1.5e9, 48, 1600, Run(2, 32, 512, 128.56), Run(1, 64, 2048, 151.35)),
    Model(4e9, 64, 2304, Run(4, 16, 128, 49.36), Run(1, 64, 512, 75.13)),
    Model(8e9, 72, 3072, Run(4, 16, 128, 24.57), Run(2, 32, 512, 43.52)),
    Model(20e9, 111, 3808, Run(16, 4, 16, 3.42), Run(4, 16, 128, 12.65)),
)


class Check(NamedTuple):
    """A row of the check: published figures, the model's, and the error of the ratio."""

    num_params: float
    megatron_published: float  # samples/s of all GPUs, as all four
    zero_published: float
    megatron_model: float
    zero_model: float

    @property
    def ratio_published(self) -> float:
        """How many times as fast ZeRO was."""
        return self.zero_published / self.megatron_published

    @property
    def ratio_model(self) -> float:
        """How many times as fast the time model says."""
        return self.zero_model / self.megatron_model

    @property
    def error(self) -> float:
        """Of the model's ratio, as a share of the published one; below 0: too low."""
        return self.ratio_model / self.ratio_published - 1


def check_announcement() -> list[Check]:
    """Holds the time model to the announcement's four models, with nothing fitted to them.

    Returns:
      A row for each model: 1.5, 4, 8 and 20 billion parameters.

    Source: see MODELS.

    >>> [f"{row.ratio_published:.2f}" for row in check_announcement()]
    ['1.18', '1.52', '1.77', '3.70']
    """
    gpu = find_gpu(GPU)
    return [
        Check(
            model.num_params,
            model.megatron.samples_per_s,
            model.zero.samples_per_s,
            samples_per_s(model, model.megatron, gpu, stage=0),
            samples_per_s(model, model.zero, gpu, stage=1),
        )
        for model in MODELS
    ]


def samples_per_s(model: Model, run: Run, gpu: Gpu, *, stage: int) -> float:
    """The model's throughput of one run: all of its communication waits for compute.

    Activations are all-reduced over neighbouring GPUs, gradients (stage 1: and parameters) over the
    data-parallel ranks between them, both in 16 bits.
    """
    tokens = run.batch_size * SEQ_LEN
    flops = tokens * train_flops_per_token(
        round(model.num_params), model.num_layers, SEQ_LEN, model.embed_dim
    )
    width = model.embed_dim / run.model_parallel
    compute_s = REMAT * flops / NUM_GPUS / (_efficiency(gpu, width) * gpu.peak_flops("float16"))
    activation_bytes = 2 * tokens / run.data_parallel * model.embed_dim
    tensor_s = (ALL_REDUCES * model.num_layers) * collective_seconds(
        "all-reduce", activation_bytes, run.model_parallel, gpu
    )
    data_s = sum(
        collective_seconds(
            sent.kind, sent.payload_bytes, run.data_parallel, gpu, stride=run.model_parallel
        )
        for sent in law(stage, model.num_params / run.model_parallel)
    )
    return run.batch_size / (compute_s + tensor_s + data_s)


def _efficiency(gpu: Gpu, width: float) -> float:
    """Share of the peak for products of so many columns."""
    return gpu.efficiency * (1 + HALF_WIDTH / MEASURED_WIDTH) * width / (width + HALF_WIDTH)
