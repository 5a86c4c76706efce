"""Meshes: every device is used, axes are named, bad sizes say how to mend."""

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh

import jzero
from jzero.mesh import partition_axes, replica_axes


def test_data_takes_the_devices_that_are_left():
    mesh = jzero.make_mesh(replica=2)
    assert dict(mesh.shape) == {"replica": 2, "data": 4, "model": 1}
    assert set(mesh.axis_types) == {AxisType.Auto}


def test_no_device_is_left_out_silently():
    with pytest.raises(
        ValueError, match=r"replica 1 x data 3 x model 1 = 3 devices, but there are 8"
    ):
        jzero.make_mesh(data=3)
    assert jzero.make_mesh(data=3, devices=jax.devices()[:3]).size == 3


@pytest.mark.parametrize("sizes", [{"replica": 0}, {"data": -1}, {"model": 1.5}])
def test_sizes_are_positive_integers(sizes):
    with pytest.raises(ValueError, match="give an integer of at least 1"):
        jzero.make_mesh(**sizes)


def test_partition_axes_default_to_data_or_the_only_axis():
    devices = np.array(jax.devices()).reshape(2, 4)
    assert partition_axes(jzero.make_mesh(), None) == ("data",)
    assert partition_axes(jax.make_mesh((8,), ("fsdp",)), None) == ("fsdp",)
    assert partition_axes(Mesh(devices, ("a", "b")), ("a", "b")) == ("a", "b")
    assert partition_axes(Mesh(devices, ("a", "b")), "b") == ("b",)
    with pytest.raises(ValueError, match=r"none is called 'data'; say which .* axes=\('a',\)"):
        partition_axes(Mesh(devices, ("a", "b")), None)


@pytest.mark.parametrize("axes", ["fsdp", ("data", "fsdp"), ("data", "data"), ()])
def test_axes_must_be_different_names_of_the_mesh(axes):
    with pytest.raises(ValueError, match="must be different names among the mesh axes"):
        jzero.Zero(jzero.make_mesh(), 1, axes=axes)


def test_a_model_axis_is_refused_rather_than_gathered_silently():
    with pytest.raises(ValueError, match=r"\{'model': 2\} are neither partition axes"):
        jzero.Zero(jzero.make_mesh(model=2), 1)
    assert replica_axes(jzero.make_mesh(replica=2), ("data",)) == ("replica",)
