"""jzero: ZeRO for JAX."""

from jzero.layers import block_params, run_layers
from jzero.mesh import make_mesh
from jzero.zero import Zero

__all__ = ["Zero", "block_params", "make_mesh", "run_layers"]
