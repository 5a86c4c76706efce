"""jzero: ZeRO for JAX."""

from jzero.checkpoint import Checkpoints
from jzero.gpus import GPUS, Gpu
from jzero.layers import block_params, run_layers
from jzero.ledger import Ledger, collectives
from jzero.mesh import make_mesh
from jzero.options import compiler_options
from jzero.policies import POLICIES, Policy, policy, with_policy
from jzero.precision import master_weights, with_state_dtype
from jzero.scaling import dynamic_loss_scale, skip_not_finite, static_loss_scale
from jzero.skips import check_skips, loss_scale, was_skipped
from jzero.virtual import virtual_mesh
from jzero.zero import Zero

__all__ = [
    "GPUS",
    "POLICIES",
    "Checkpoints",
    "Gpu",
    "Ledger",
    "Policy",
    "Zero",
    "block_params",
    "check_skips",
    "collectives",
    "compiler_options",
    "dynamic_loss_scale",
    "loss_scale",
    "make_mesh",
    "master_weights",
    "policy",
    "run_layers",
    "skip_not_finite",
    "static_loss_scale",
    "virtual_mesh",
    "was_skipped",
    "with_policy",
    "with_state_dtype",
]
