"""What XLA must know of a GPU to compile for it: its own description of the chip, or ours."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import math
import mmap
import re
from pathlib import Path

from jzero.gpus import Gpu

PLUGINS = ("jax_plugins.xla_cuda12", "jax_plugins.xla_cuda13")
LIBRARY = "xla_cuda_plugin.so"
# Each description that XLA carries stands in the plugin's library as text, ended by a zero byte.
MARK = b"# proto-message: stream_executor.GpuTargetConfigProto"
OWN_TEXT = """\
gpu_device_info {{
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
{figures}
  threads_per_core_limit: 2048
  registers_per_block_limit: 65536
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  thread_dim_limit_x: 1024
  thread_dim_limit_y: 1024
  thread_dim_limit_z: 64
  cuda_compute_capability {{
    major: {major}
    minor: {minor}
    feature_extension: {extension}
  }}
  device_vendor: "NVIDIA Corporation"
  device_address_bits: 64
  ecc_enabled: true
  runtime_version: "12.8.0"
  compile_time_toolkit_version: "12.8.0"
  dnn_version: "9.10.0"
  device_interconnect_info {{
    active_links: {links}
  }}
}}
platform_name: "CUDA"
device_description_str: "{device_name}"
"""


def target_text(gpu: Gpu) -> str:
    """Writes what XLA must know of a GPU: its own description of the chip, or else ours.

    The plugin of jax 0.12 carries descriptions of many chips; the one of the same compute
    capability and number of cores that is nearest in memory is taken, with the figures of `gpu`
    in it. Where there is none (jax 0.10 and 0.11), the text holds these figures alone.
    """
    path = library_path()
    near = [text for text in plugin_texts(path) if _is_chip(text, gpu)] if path else []
    if not near:
        return own_text(gpu)
    text = min(near, key=lambda text: _distance(text, gpu))
    for name, value in _figures(gpu).items():
        text = re.sub(rf"(?m)^  {name}: .*$", f"  {name}: {value}", text)
    return re.sub(r'(?m)^(  name|device_description_str): ".*"$', rf'\1: "{gpu.device_name}"', text)


def own_text(gpu: Gpu) -> str:
    """Writes a GPU as text of XLA's GpuTargetConfigProto, in fields that jax 0.10 knows."""
    major, minor = gpu.compute_capability
    return OWN_TEXT.format(
        figures="\n".join(f"  {name}: {value}" for name, value in _figures(gpu).items()),
        major=major,
        minor=minor,
        extension="ACCELERATED_FEATURES" if major >= 9 else "NONE",
        links=gpu.num_links,
        device_name=gpu.device_name,
    )


def _figures(gpu: Gpu) -> dict[str, int | float]:
    """What the table says, under XLA's names."""
    return {
        "shared_memory_per_core": gpu.shared_bytes_per_core,
        "shared_memory_per_block_optin": gpu.shared_bytes_per_block,
        "core_count": gpu.core_count,
        "fpus_per_core": gpu.fpus_per_core,
        "registers_per_core_limit": gpu.registers_per_core,
        "memory_bandwidth": round(gpu.memory_bytes_per_s),
        "l2_cache_size": gpu.l2_bytes,
        "clock_rate_ghz": gpu.clock_ghz,
        "device_memory_size": gpu.memory_bytes,
    }


def library_path() -> Path | None:
    """Where the shared library of jax's CUDA plugin lies, if it is installed; loads nothing."""
    for plugin in PLUGINS:
        with contextlib.suppress(ModuleNotFoundError):
            spec = importlib.util.find_spec(plugin)
            path = Path(spec.origin).parent / LIBRARY if spec and spec.origin else None
            if path and path.exists():
                return path
    return None


@functools.cache
def plugin_texts(path: Path) -> tuple[str, ...]:
    """Reads XLA's own descriptions of CUDA GPUs out of the plugin's library; none before 0.12."""
    texts = []
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        start = data.find(MARK)
        while start >= 0:
            end = data.find(b"\0", start)
            texts.append(data[start:end].decode(errors="replace"))
            start = data.find(MARK, end)
    return tuple(text for text in texts if "cuda_compute_capability" in text)


def _read(text: str, name: str) -> float:
    """A number of a description; 0 where it is left out, as the format has it."""
    found = re.search(rf"(?m)^ +{name}: ([\d.]+)$", text)
    return float(found[1]) if found else 0.0


def _is_chip(text: str, gpu: Gpu) -> bool:
    capability = re.search(r"cuda_compute_capability \{.*?\}", text, re.DOTALL)
    numbers = [_read(capability[0], name) for name in ("major", "minor")] if capability else []
    return [*numbers, _read(text, "core_count")] == [*gpu.compute_capability, gpu.core_count]


def _distance(text: str, gpu: Gpu) -> float:
    figures = {"device_memory_size": gpu.memory_bytes, "memory_bandwidth": gpu.memory_bytes_per_s}
    return sum(abs(math.log(_read(text, name) / x)) for name, x in figures.items())
