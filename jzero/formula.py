"""The paper's formulas: bytes of model states, the largest model, bytes on the wire; no compile.

Source of all: Rajbhandari et al., ZeRO, arXiv:1910.02054: sections 3.1 and 5 and Tables 1 and 2
for memory, section 7 for the wire. Psi is the number of parameters, N of shards, G of
microbatches. Padding, activations and buffers are left out; all results are floats, exact while
the inputs are.
"""

import math
from numbers import Integral, Real
from typing import NamedTuple

from jzero.layout import STAGES


class ClassBytes(NamedTuple):
    """Bytes of model states that one device holds, by class."""

    params: float
    grads: float  # the sum within a step; between steps there is none
    optimizer: float  # moments and, with 16-bit parameters, the fp32 master

    @property
    def total(self) -> float:
        """All three together."""
        return self.params + self.grads + self.optimizer


def state_bytes(
    num_params: float,
    *,
    num_shards: int,
    stage: int,
    param_bytes: float = 2,
    grad_bytes: float = 2,
    optimizer_bytes: float = 12,
    model_parallel: int = 1,
) -> ClassBytes:
    """Count the bytes of model states per device. The defaults are 16 bits with Adam, K = 12.

    Args:
        num_params: Psi, parameters of the whole model, > 0.
        num_shards: N, >= 1: the data-parallel devices that the states are cut over.
        stage: 0 to 3.
        param_bytes: per parameter, >= 0: 2, or 4 in fp32.
        grad_bytes: per parameter, >= 0: 2, or 4 in fp32 or where microbatches are summed in fp32.
        optimizer_bytes: per parameter, >= 0: 12 for an fp32 master and two moments, 8 for two
            moments alone.
        model_parallel: devices, >= 1, that each copy of the model is evenly split over besides.

    Returns:
        Bytes per device, by class.

    Raises:
        ValueError: an argument is out of its range; says which.

    Source: section 5 and Table 1 (GB of 1e9 bytes).

    >>> state_bytes(7.5e9, num_shards=64, stage=2)
    ClassBytes(params=15000000000.0, grads=234375000.0, optimizer=1406250000.0)
    >>> state_bytes(7.5e9, num_shards=64, stage=3).total
    1875000000.0
    """
    _check_positive("num_params", num_params, "parameters, such as 7.5e9")
    _check_count("model_parallel", model_parallel, "devices that hold one copy of the model")
    per_param = _bytes_per_param(num_shards, stage, param_bytes, grad_bytes, optimizer_bytes)
    return ClassBytes(*(x * num_params / model_parallel for x in per_param))


def largest_model(
    memory_bytes: float,
    *,
    num_shards: int,
    stage: int,
    param_bytes: float = 2,
    grad_bytes: float = 2,
    optimizer_bytes: float = 12,
    model_parallel: int = 1,
) -> float:
    """Count the parameters whose model states fill a device, with nothing left for activations.

    Args:
        memory_bytes: of one device, > 0. The paper's 32 GB are 32e9.
        num_shards: N, >= 1.
        stage: 0 to 3.
        param_bytes: per parameter, >= 0.
        grad_bytes: per parameter, >= 0.
        optimizer_bytes: per parameter, >= 0.
        model_parallel: devices, >= 1, that each copy of the model is evenly split over besides.

    Returns:
        Parameters of the whole model.

    Raises:
        ValueError: an argument is out of its range, or a parameter takes no bytes at all.

    Source: Table 2, left half.

    >>> largest_model(32e9, num_shards=64, stage=3)
    128000000000.0
    """
    _check_positive("memory_bytes", memory_bytes, "bytes of one device, such as 32e9")
    _check_count("model_parallel", model_parallel, "devices that hold one copy of the model")
    total = _bytes_per_param(num_shards, stage, param_bytes, grad_bytes, optimizer_bytes).total
    if not total:
        raise ValueError(
            "param_bytes, grad_bytes and optimizer_bytes are all 0, so that any model fits; "
            "give the bytes of at least one, such as param_bytes=2."
        )
    return memory_bytes * model_parallel / total


def _bytes_per_param(
    num_shards: int, stage: int, params: float, grads: float, optimizer: float
) -> ClassBytes:
    _check_stage(stage)
    _check_count("num_shards", num_shards, "data-parallel devices")
    _check_sizes(param_bytes=params, grad_bytes=grads, optimizer_bytes=optimizer)
    cut = STAGES[stage]
    return ClassBytes(
        params / num_shards if cut.params else params,
        grads / num_shards if cut.grads else grads,
        optimizer / num_shards if cut.state else optimizer,
    )


def _check_stage(stage: int) -> None:
    if not isinstance(stage, Integral) or stage not in range(len(STAGES)):
        raise ValueError(f"stage {stage!r} is not one of ZeRO's; use 0, 1, 2 or 3.")


def _check_count(name: str, value: int, meaning: str) -> None:
    if not isinstance(value, Integral) or value < 1:
        raise ValueError(f"{name} {value!r} is not an integer >= 1; give the number of {meaning}.")


def _check_positive(name: str, value: float, meaning: str) -> None:
    if not isinstance(value, Real) or not 0 < value < math.inf:
        raise ValueError(f"{name} {value!r} is not a finite number > 0; give {meaning}.")


def _check_sizes(**sizes: float) -> None:
    for name, value in sizes.items():
        if not isinstance(value, Real) or not 0 <= value < math.inf:
            raise ValueError(
                f"{name} {value!r} is not a finite number >= 0; give bytes per parameter, "
                "2 for 16 bits or 4 for 32."
            )
