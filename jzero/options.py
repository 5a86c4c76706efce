"""What XLA is asked for when a training step is compiled."""

from __future__ import annotations

from jax.sharding import Mesh

GPU_PLATFORMS = ("gpu", "cuda")
# With one collective in flight, XLA's default, the gathers of the next layer wait for the reduction
# of the last, and little compute is left beside them. Of what travels together it makes one
# collective, as long as that has no more bytes than the threshold (by default 30 MB).
# Without the scheduler that hides latency, XLA's default for GPUs before Hopper, nothing overlaps.
OVERLAP = {
    "xla_gpu_enable_latency_hiding_scheduler": True,
    "xla_gpu_experimental_parallel_collective_overlap_limit": 2,
    "xla_gpu_all_gather_combine_threshold_bytes": 10**9,
    "xla_gpu_reduce_scatter_combine_threshold_bytes": 10**9,
}


def compiler_options(mesh: Mesh) -> dict[str, str | int | bool]:
    """Options with which XLA hides more of a step's collectives behind its compute.

    Args:
      mesh: for whose devices the step is compiled; of GPUs that are not here, too.

    Returns:
      What `jax.jit(step, compiler_options=...)` takes; nothing for other devices than GPUs.

    >>> import jax
    >>> compiler_options(jax.make_mesh((jax.device_count(),), ("data",)))
    {}
    """
    return dict(OVERLAP) if mesh.devices.flat[0].platform in GPU_PLATFORMS else {}
