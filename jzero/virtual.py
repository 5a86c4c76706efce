"""Meshes of GPUs that are not here: programs compile for them, and cannot run."""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import itertools
import math
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jax.experimental import topologies
from jax.sharding import Mesh

from jzero.gpus import Gpu, find_gpu
from jzero.mesh import make_mesh
from jzero.target import library_path, target_text

# XLA of jax 0.12 kills the process on a small all-reduce over just so many GPUs of one partition.
FATAL_GROUP = 64
OLDEST_OF_CUDA_13 = (7, 5)  # compute capability


def virtual_mesh(
    gpu: str | Gpu,
    *,
    num_gpus: int,
    replica: int = 1,
    data: int | None = None,
    model: int = 1,
) -> Mesh:
    """Makes a mesh of GPUs that need not be there, to compile for.

    Args:
      gpu: a name of `jzero.gpus.GPUS`, or a GPU of your own from `jzero.gpus.read_gpu`.
      num_gpus: at most a node's, or whole nodes (8 GPUs for an H100, 16 for a V100).
      replica: number of full copies of what is partitioned, at least 1.
      data: size of the partition axis; None takes every GPU that is left.
      model: size of the model-parallel axis, at least 1.

    Returns:
      A mesh as of `jzero.make_mesh`: `Zero(mesh, ...)`, `zero.abstract` and
      `jax.jit(step).lower(...).compile()` work with it; arrays cannot be placed on it.

    Raises:
      ValueError: an unknown GPU, sizes that do not multiply to `num_gpus`, part of a node, or what
        compiles for the GPU is not installed: jax's CUDA plugin and a ptxas that knows the chip.
    """
    gpu = find_gpu(gpu) if isinstance(gpu, str) else gpu
    topology = check_cluster(gpu, num_gpus, replica=replica, data=data, model=model)
    devices = _compile_only_devices(topology, target_text(gpu))
    return make_mesh(replica=replica, data=data, model=model, devices=devices)


def check_cluster(
    gpu: Gpu, num_gpus: int, *, replica: int = 1, data: int | None = None, model: int = 1
) -> str:
    """Checks all that `virtual_mesh` checks, without loading what compiles.

    Returns:
      The cluster as XLA reads it.

    Raises:
      ValueError: as `virtual_mesh`.
    """
    topology = topology_text(gpu, num_gpus, _axis_sizes(num_gpus, replica, data, model))
    _check_compiler(gpu)
    return topology


def _axis_sizes(num_gpus: int, replica: int, data: int | None, model: int) -> tuple[int, int, int]:
    """The sizes of the mesh, checked before anything is loaded."""
    given = {"num_gpus": num_gpus, "replica": replica, "data": data, "model": model}
    for name, size in given.items():
        if size is not None and not (type(size) is int and size >= 1):
            raise ValueError(f"{name} is {size!r}; give an integer of at least 1.")
    rest = replica * model
    if num_gpus % rest or data not in (None, num_gpus // rest):
        sizes = f"replica {replica} x data {data or '?'} x model {model}"
        mend = (
            f"leave data out, or give {num_gpus // rest}."
            if num_gpus % rest == 0
            else f"give a multiple of {rest}, such as {math.ceil(num_gpus / rest) * rest}."
        )
        raise ValueError(f"{sizes} does not make num_gpus {num_gpus}; {mend}")
    return replica, num_gpus // rest, model


def topology_text(gpu: Gpu, num_gpus: int, axis_sizes: tuple[int, ...] = ()) -> str:
    """Writes a cluster as XLA reads it: partitions x hosts x GPUs, one partition an NVLink domain.

    Args:
      gpu: says how many GPUs a node joins.
      num_gpus: at most a node's, or a multiple of it.
      axis_sizes: of the mesh; where a collective over some of its axes would meet XLA's fatal
        group size inside one partition, nodes are told as several partitions.

    Raises:
      ValueError: `num_gpus` is more than a node's and not a multiple.

    >>> topology_text(find_gpu("h100-sxm"), 64), topology_text(find_gpu("gb200"), 64, (1, 64, 1))
    ('8x1x8', '2x1x32')
    """
    per_node = min(gpu.gpus_per_node, num_gpus)
    if num_gpus % per_node:
        below = num_gpus // per_node * per_node
        raise ValueError(
            f"num_gpus {num_gpus} is not a multiple of the {per_node} GPUs in a node of "
            f"{gpu.name}; use {below} or {below + per_node}."
        )
    if per_node >= FATAL_GROUP and FATAL_GROUP in _group_sizes(axis_sizes):
        per_node = max(n for n in range(1, FATAL_GROUP) if per_node % n == 0)
    return f"{num_gpus // per_node}x1x{per_node}"


def _group_sizes(axis_sizes: tuple[int, ...]) -> set[int]:
    """How many devices a collective over any choice of axes joins."""
    counts = range(len(axis_sizes) + 1)
    return {math.prod(c) for n in counts for c in itertools.combinations(axis_sizes, n)}


def _check_compiler(gpu: Gpu) -> None:
    """Says what is missing; XLA would say so late, and that of jax 0.12 by killing the process."""
    mend = "install it with pip install 'jzero[plan]'. No GPU is needed, and no CUDA."
    if library_path() is None:
        raise ValueError(
            f"jax's CUDA plugin, which compiles for GPUs that are not here, is missing; {mend}"
        )
    path = ptxas_path()
    if path is None:
        raise ValueError(f"ptxas, the assembler that XLA needs for GPUs, is missing; {mend}")
    if gpu.compute_capability < OLDEST_OF_CUDA_13 and ptxas_release(path) >= 13:
        raise ValueError(
            f"{path} is of CUDA 13, which knows no {gpu.name} any more; install an older one with "
            "pip install nvidia-cuda-nvcc-cu12, which goes before it."
        )


def ptxas_path() -> str | None:
    """The ptxas that XLA takes: of CUDA_ROOT, of NVIDIA's packages, on PATH, in /usr/local/cuda."""
    roots = [os.environ.get("CUDA_ROOT", "")]
    for package in ("nvidia.cu13", "nvidia.cuda_nvcc"):  # as jax looks for them
        with contextlib.suppress(ModuleNotFoundError):
            spec = importlib.util.find_spec(package)
            roots += (spec and spec.submodule_search_locations) or []
    folders = [str(Path(root) / "bin") for root in roots if root]
    paths = [*folders, os.environ.get("PATH", ""), "/usr/local/cuda/bin"]
    return next(filter(None, (shutil.which("ptxas", path=path) for path in paths)), None)


@functools.cache
def ptxas_release(path: str) -> int:
    """The CUDA release that a ptxas says it is of; 0 where it does not say."""
    told = subprocess.run([path, "--version"], capture_output=True, text=True, check=False).stdout
    found = re.search(r"release (\d+)", told)
    return int(found[1]) if found else 0


def _compile_only_devices(topology: str, target: str) -> list[Any]:
    make = functools.partial(
        topologies.get_topology_desc, platform="cuda", topology=topology, target_config=target
    )
    with _without_cuda_check():
        try:
            return list(make().devices)
        except NotImplementedError:  # jax has started, found no CUDA, and left the plugin out
            importlib.import_module(_plugin_name()).initialize()
            return list(make().devices)


def _plugin_name() -> str:
    path = library_path()
    assert path is not None
    return f"jax_plugins.{path.parent.name}"


@contextlib.contextmanager
def _without_cuda_check() -> Iterator[None]:
    """The plugin registers itself though CUDA's libraries are not there."""
    name = "JAX_SKIP_CUDA_CONSTRAINTS_CHECK"
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
