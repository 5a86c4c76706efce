"""XLA is asked to overlap on GPUs, and for nothing elsewhere."""

from types import SimpleNamespace

import numpy as np
import pytest

from jzero.options import OVERLAP, compiler_options


def mesh_of(platform):
    """As much of a mesh as is looked at: devices of a platform that is not here."""
    return SimpleNamespace(devices=np.array([[SimpleNamespace(platform=platform)] * 8]))


@pytest.mark.parametrize("platform", ["gpu", "cuda"])
def test_gpus_are_asked_to_hide_collectives(platform):
    options = compiler_options(mesh_of(platform))
    assert options["xla_gpu_enable_latency_hiding_scheduler"] is True
    assert options == OVERLAP


@pytest.mark.parametrize("platform", ["cpu", "tpu", "rocm"])
def test_other_devices_are_asked_for_nothing(platform):
    assert compiler_options(mesh_of(platform)) == {}


def test_what_a_caller_changes_does_not_reach_the_next():
    before = dict(OVERLAP)
    compiler_options(mesh_of("gpu"))["another"] = True
    assert compiler_options(mesh_of("gpu")) == before
