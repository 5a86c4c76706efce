"""One table of GPUs: what is known of hardware that is not here, each figure with its source."""

from __future__ import annotations

import dataclasses
import re
import tomllib
from pathlib import Path
from typing import Any, get_type_hints

from jzero.schema import nearest, typed

# TFLOP/s, dense, by words of the device's name: (float32, bfloat16, float16); None: no such unit.
# The first entry whose words are all in the name is taken.
PEAK_TFLOPS: dict[tuple[str, ...], tuple[float, float | None, float]] = {
    ("V100", "PCIE"): (14.0, None, 112.0),
    ("V100",): (15.7, None, 125.0),
    ("A100",): (156.0, 312.0, 312.0),
    ("H100", "PCIE"): (378.0, 756.5, 756.5),
    ("H100",): (494.7, 989.4, 989.4),
    ("H200",): (494.7, 989.4, 989.4),
    ("B200",): (1100.0, 2250.0, 2250.0),
    ("GB200",): (1250.0, 2500.0, 2500.0),
    ("L4",): (60.0, 121.0, 121.0),
    ("L40S",): (183.0, 362.05, 362.05),
    ("RTX", "3090"): (35.6, 71.0, 71.0),
    ("RTX", "4090"): (82.6, 165.2, 165.2),
}
OTHER_CHIPS = frozenset({"NVL", "TI", "D", "LAPTOP", "FHHL", "MIG", "MAX"})  # same name, other peak
DTYPES = ("float32", "bfloat16", "float16")  # the columns
# What no peak counts: CUDA's context, NCCL's buffers, fragmentation. None of it is measured.
RESERVE = 0.06  # share of the memory that is kept free for them


def peak_flops(device_kind: str, dtype: str) -> float | None:
    """Look up the dense matrix peak of one GPU, the denominator of MFU.

    Args:
        device_kind: `jax.Device.device_kind`, such as "NVIDIA H100 80GB HBM3".
        dtype: "float32", "bfloat16" or "float16", as multiplied. float32 is the TF32 peak,
            which XLA uses for float32 matmuls by default; the V100 has no TF32: plain FP32.

    Returns:
        FLOP/s, or None where unknown: CPUs, other GPUs, slices of one (MIG), other dtypes.

    Source: NVIDIA's data sheets (V100, A100, H100, H200, L4, L40S, "HGX B200", "GB200 NVL72": per
    GPU, halved where the sheet says "with sparsity"), and for GeForce the GA102 and Ada
    whitepapers, with FP32 accumulation.

    >>> peak_flops("NVIDIA H100 80GB HBM3", "bfloat16")
    989400000000000.0
    >>> peak_flops("cpu", "float32") is None
    True
    """
    words = set(re.findall(r"[A-Z0-9]+", device_kind.upper()))
    if dtype not in DTYPES or words & OTHER_CHIPS:
        return None
    rows = (row for names, row in PEAK_TFLOPS.items() if words.issuperset(names))
    tflops = next(rows, (None, None, None))[DTYPES.index(dtype)]
    return None if tflops is None else tflops * 1e12


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gpu:
    """A GPU, the node it sits in and the network between nodes.

    Raises:
      ValueError: a figure is not positive, or a share is above 1.
    """

    name: str  # as find_gpu takes it
    device_name: str  # as jax prints it
    compute_capability: tuple[int, ...]  # major, minor
    memory_bytes: int  # as the driver reports them
    memory_bytes_per_s: float
    core_count: int  # streaming multiprocessors
    fpus_per_core: int
    registers_per_core: int = 65536
    shared_bytes_per_core: int
    shared_bytes_per_block: int  # the most that a block may ask for
    l2_bytes: int
    clock_ghz: float  # boost
    float32_flops_per_s: float  # dense matrix peak; TF32 where there is such a unit
    bfloat16_flops_per_s: float | None = None
    float16_flops_per_s: float
    num_links: int  # NVLinks of a GPU; 0: PCIe alone
    gpus_per_node: int  # joined by NVLink (or PCIe, where there is none)
    link_bytes_per_s: float  # of one GPU inside a node, one way, usable
    node_bytes_per_s: float  # of all network cards of a node together, one way
    base_s: float = 8.4e-6  # of any collective
    link_step_s: float = 3.4e-6  # of a ring's step inside a node
    node_step_s: float = 14e-6  # of a ring's step between nodes
    efficiency: float  # share of the peak that a transformer's products reach
    memory_efficiency: float = 0.75  # share of memory_bytes_per_s
    source: str

    def __post_init__(self) -> None:
        if len(self.compute_capability) != 2:
            _refuse(self, "compute_capability", "give major and minor, as in [9, 0]")
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, int | float) and not (value > 0 or field.name == "num_links"):
                _refuse(self, field.name, "give a number above 0")
        for name in ("efficiency", "memory_efficiency"):
            if getattr(self, name) > 1:
                _refuse(self, name, "give a share of the peak, above 0 and at most 1")

    @property
    def usable_bytes(self) -> float:
        """Bytes that a step may take: the memory less RESERVE."""
        return self.memory_bytes * (1 - RESERVE)

    def peak_flops(self, dtype: str) -> float:
        """Dense matrix peak in FLOP/s for "float32", "bfloat16" or "float16".

        Raises:
          ValueError: this GPU has no unit for that dtype.

        >>> GPUS["v100-sxm2-32gb"].peak_flops("bfloat16")
        Traceback (most recent call last):
        ValueError: v100-sxm2-32gb does not multiply in bfloat16; use float32 or float16.
        """
        peaks = {name: getattr(self, f"{name}_flops_per_s") for name in DTYPES}
        if peaks.get(dtype) is None:
            known = " or ".join(name for name, peak in peaks.items() if peak)
            raise ValueError(f"{self.name} does not multiply in {dtype}; use {known}.")
        return peaks[dtype]


def _refuse(gpu: Gpu, field: str, mend: str) -> None:
    raise ValueError(f"GPU {gpu.name!r}: {field} is {getattr(gpu, field)!r}; {mend}.")


def _make(name: str, device_name: str, **fields: Any) -> Gpu:
    peaks: dict[str, Any] = {f"{x}_flops_per_s": peak_flops(device_name, x) for x in DTYPES}
    return Gpu(name=name, device_name=device_name, **(peaks | fields))


# Sources. Chips: XLA's own target descriptions (openxla/xla, stream_executor gpu specs), which are
# read from the drivers. Links and latencies: NCCL's tables for rings with the Simple protocol (src/
# graph/topo.h, tuning.cc): 20, 20, 20.6 and 40.1 GB/s for each NVLink of sm_70, 80, 90 and 100;
# PCIe gen5 x16 48 GB/s and 5.7 us a step. Efficiency: of the peak, measured end to end on large
# transformers, recomputation counted as work. Memory: 2.5 of 3.35 TB/s, as assumed of XLA's fused
# kernels on an H100.
_VOLTA: dict[str, Any] = {
    "compute_capability": (7, 0),
    "memory_bytes_per_s": 898_048e6,
    "core_count": 80,
    "fpus_per_core": 64,
    "shared_bytes_per_core": 98304,
    "shared_bytes_per_block": 98304,
    "l2_bytes": 6 * 2**20,
    "clock_ghz": 1.53,
    "num_links": 6,
    "gpus_per_node": 16,
    "link_bytes_per_s": 6 * 20e9,
    "node_bytes_per_s": 800e9 / 8,
    "efficiency": 39 / 125,
    "source": "DGX-2, 800 Gb/s between nodes (announcement of ZeRO); memory of the 32 GB one by "
    "deviceQuery; 39 TFLOP/s on one V100: Shoeybi et al., arXiv:1909.08053, section 1",
}
_AMPERE: dict[str, Any] = {
    "compute_capability": (8, 0),
    "core_count": 108,
    "fpus_per_core": 64,
    "shared_bytes_per_core": 167936,
    "shared_bytes_per_block": 166912,
    "l2_bytes": 40 * 2**20,
    "clock_ghz": 1.41,
    "num_links": 12,
    "gpus_per_node": 8,
    "link_bytes_per_s": 12 * 20e9,
    "node_bytes_per_s": 8 * 200e9 / 8,
    "efficiency": 163 / 312,
    "source": "DGX A100, 8 x 200 Gb/s; 163 TFLOP/s: Narayanan et al., arXiv:2104.04473, table 1",
}
_HOPPER: dict[str, Any] = {
    "compute_capability": (9, 0),
    "core_count": 132,
    "fpus_per_core": 128,
    "shared_bytes_per_core": 233472,
    "shared_bytes_per_block": 232448,
    "l2_bytes": 50 * 2**20,
    "clock_ghz": 1.98,
    "num_links": 18,
    "gpus_per_node": 8,
    "link_bytes_per_s": 18 * 20.6e9,
    "node_bytes_per_s": 8 * 400e9 / 8,
    "efficiency": 400 / 989.4,
    "source": "DGX H100, 8 x 400 Gb/s; 400 TFLOP/s: Llama 3, arXiv:2407.21783, table 4",
}
_BLACKWELL: dict[str, Any] = _HOPPER | {
    "compute_capability": (10, 0),
    "link_bytes_per_s": 18 * 40.1e9,
    "source": "DGX B200, 8 x 400 Gb/s; the share of the peak is taken from the H100",
}
_H100_BYTES = 84_942_979_072

GPUS: dict[str, Gpu] = {
    gpu.name: gpu
    for gpu in (
        _make("v100-sxm2-16gb", "Tesla V100-SXM2-16GB", memory_bytes=16_935_682_048, **_VOLTA),
        _make("v100-sxm2-32gb", "Tesla V100-SXM2-32GB", memory_bytes=34_089_730_048, **_VOLTA),
        _make(
            "a100-40gb",
            "NVIDIA A100-SXM4-40GB",
            memory_bytes=42_331_013_120,
            memory_bytes_per_s=1_555.2e9,
            **_AMPERE,
        ),
        _make(
            "a100-80gb",
            "NVIDIA A100-SXM4-80GB",
            memory_bytes=85_100_068_864,
            memory_bytes_per_s=2_039.04e9,
            **_AMPERE,
        ),
        _make(
            "h100-sxm",
            "NVIDIA H100 80GB HBM3",
            memory_bytes=_H100_BYTES,
            memory_bytes_per_s=3_352.32e9,
            **_HOPPER,
        ),
        _make(
            "h100-pcie",
            "NVIDIA H100 PCIe",
            memory_bytes=_H100_BYTES,
            memory_bytes_per_s=2_039.04e9,
            link_step_s=5.7e-6,
            **_HOPPER
            | {
                "core_count": 114,
                "clock_ghz": 1.755,
                "num_links": 0,
                "link_bytes_per_s": 48e9,
                "source": "eight on PCIe gen5 x16, 8 x 400 Gb/s; the share of the peak as SXM's",
            },
        ),
        _make(
            "h200",
            "NVIDIA H200",
            memory_bytes=round(139.8 * 2**30),  # as drivers report; XLA's description says 141 GiB
            memory_bytes_per_s=4_800e9,
            **_HOPPER | {"source": "DGX H200, 8 x 400 Gb/s; the share of the peak as the H100's"},
        ),
        _make(
            "b200",
            "NVIDIA B200",
            memory_bytes=191_514_411_008,
            memory_bytes_per_s=7_672.32e9,
            **_BLACKWELL | {"core_count": 148, "l2_bytes": 132_644_864, "clock_ghz": 1.965},
        ),
        _make(
            "gb200",
            "NVIDIA GB200",
            memory_bytes=197_897_748_480,
            memory_bytes_per_s=7_928.064e9,
            **_BLACKWELL
            | {
                "core_count": 152,
                "l2_bytes": 135_528_448,
                "clock_ghz": 2.062,
                "gpus_per_node": 72,
                "node_bytes_per_s": 72 * 400e9 / 8,
                "source": "GB200 NVL72: one NVLink domain of 72, 400 Gb/s each; the share of the "
                "peak is taken from the H100",
            },
        ),
    )
}


def find_gpu(name: str) -> Gpu:
    """The GPU of the table by its name.

    Raises:
      ValueError: the table has none of that name.

    >>> find_gpu("h100-sxm").memory_bytes / 2**30
    79.10931396484375
    >>> find_gpu("h100_sxm")
    Traceback (most recent call last):
    ValueError: no GPU is called 'h100_sxm'; did you mean 'h100-sxm'? There are v100-sxm2-16gb, \
v100-sxm2-32gb, a100-40gb, a100-80gb, h100-sxm, h100-pcie, h200, b200, gb200, and read_gpu reads \
your own from a TOML file.
    """
    if name in GPUS:
        return GPUS[name]
    near = nearest(name.lower(), GPUS)
    mend = f"did you mean {near!r}? " if near else ""
    raise ValueError(
        f"no GPU is called {name!r}; {mend}There are {', '.join(GPUS)}, and read_gpu reads your "
        "own from a TOML file."
    )


def read_gpu(path: str | Path) -> Gpu:
    """Reads hardware of your own from a TOML file: `base`, a GPU of the table, and what differs.

    Args:
      path: of a file such as `base = "h100-sxm"`, `gpus_per_node = 4`, `node_bytes_per_s = 50e9`;
        its keys are the fields of `Gpu`.

    Returns:
      The GPU, called as the file unless `name` says otherwise.

    Raises:
      ValueError: no such file, not TOML, no or an unknown base, an unknown key, or a value of the
        wrong type or out of range.
    """
    path = Path(path)
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{path} cannot be read ({error}); give a TOML file of a GPU.") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not TOML: {error}; mend that line.") from error
    if not isinstance(base := table.pop("base", None), str):
        raise ValueError(f'{path} names no GPU to start from; write base = "h100-sxm", say.')
    hints = get_type_hints(Gpu)
    for key in table:
        if key not in hints:
            near = nearest(key, hints)
            mend = f"did you mean {near!r}?" if near else f"a GPU has {', '.join(hints)}."
            raise ValueError(f"{path} has the key {key!r}, which no GPU has; {mend}")
    values = {key: typed(value, hints[key], path.name, key) for key, value in table.items()}
    return dataclasses.replace(find_gpu(base), **{"name": path.stem} | values)
