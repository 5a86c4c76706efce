"""Meshes of GPUs that are not here: every GPU of the table compiles, and bad sizes come first."""

import collections
import dataclasses
import functools
import os
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jzero
from jzero import target, virtual
from jzero.gpus import GPUS
from jzero.virtual import topology_text, virtual_mesh

NO_PLUGIN = target.library_path() is None or virtual.ptxas_path() is None
needs_plugin = pytest.mark.skipif(NO_PLUGIN, reason="needs pip install 'jzero[plan]'")
KINDS = "all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute"
H100 = GPUS["h100-sxm"]


def skip_unless_compiles(gpu):
    release = virtual.ptxas_release(virtual.ptxas_path() or "")
    if gpu.compute_capability < virtual.OLDEST_OF_CUDA_13 and release >= 13:
        pytest.skip("needs a ptxas before CUDA 13: pip install nvidia-cuda-nvcc-cu12")


def compile_step(mesh, dtype, stage=3):
    """One step of a scanned stack of two layers."""
    like = {
        "layers": jax.ShapeDtypeStruct((2, 128, 128), dtype),
        "bias": jax.ShapeDtypeStruct((128,), dtype),
    }
    zero = jzero.Zero(mesh, stage, like=like)
    tx = zero.optimizer(optax.adamw(1e-3))

    def block(x, w):
        return jnp.tanh(x @ jzero.block_params(w)), None

    def loss_fn(params, x):
        x, _ = jax.lax.scan(block, x, params["layers"])
        return jnp.mean((x + params["bias"][None]).astype(jnp.float32) ** 2)

    value_and_grad = zero.value_and_grad(loss_fn)

    def step(params, state, x):
        loss, grads = value_and_grad(params, x)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    sharding = NamedSharding(mesh, P(("replica", "data")))
    x = jax.ShapeDtypeStruct((8 * mesh.size, 128), dtype, sharding=sharding)
    args = zero.abstract(like), zero.abstract(jax.eval_shape(tx.init, like)), x
    return jax.jit(step, donate_argnums=(0, 1)).lower(*args).compile()


def collectives(compiled):
    return collections.Counter(re.findall(rf"= .*? ({KINDS})(?:-start)?\(", compiled.as_text()))


def dtype_of(gpu):
    return jnp.bfloat16 if gpu.bfloat16_flops_per_s else jnp.float16


@functools.cache
def compiled(name):
    mesh = virtual_mesh(name, num_gpus=8)
    return compile_step(mesh, dtype_of(GPUS[name]))


@needs_plugin
@pytest.mark.parametrize("gpu", GPUS.values(), ids=GPUS)
def test_a_step_compiles_for_every_gpu_of_the_table(gpu):
    skip_unless_compiles(gpu)
    mesh = virtual_mesh(gpu.name, num_gpus=8)
    assert mesh.devices.flat[0].device_kind == gpu.device_name
    assert dict(mesh.shape) == {"replica": 1, "data": 8, "model": 1}
    assert set(mesh.axis_types) == {AxisType.Auto}
    found = collectives(compiled(gpu.name))
    assert found["all-gather"] == 2 and found["reduce-scatter"] >= 2  # forward and backward loop
    assert not found["all-to-all"]
    told = f"the program is for {gpu.device_name}: give rates= for its own seconds"
    assert (told in str(jzero.collectives(compiled(gpu.name)))) == ("H100" not in gpu.device_name)
    args = compiled(gpu.name).memory_analysis().argument_size_in_bytes
    at_rest = (2 * 128 * 128 + 128) * (2 + 8) / 8  # 16-bit parameters, two float32 moments
    assert args - 8 * 128 * 2 == pytest.approx(at_rest, abs=64)  # rows of the batch; the count


@needs_plugin
@pytest.mark.parametrize("name", ["v100-sxm2-32gb", "a100-80gb", "h100-sxm", "gb200"])
def test_our_description_gives_the_collectives_of_xlas_own(name, monkeypatch):
    gpu = GPUS[name]
    skip_unless_compiles(gpu)
    if not target.plugin_texts(target.library_path()):
        pytest.skip("this version's plugin carries no descriptions")
    monkeypatch.setattr(virtual, "target_text", target.own_text)
    own = compile_step(virtual_mesh(name, num_gpus=8), dtype_of(gpu))
    assert collectives(own) == collectives(compiled(name))
    peaks = [c.memory_analysis().peak_memory_in_bytes for c in (own, compiled(name))]
    assert peaks[0] == pytest.approx(peaks[1], rel=0.02)


@needs_plugin
def test_axes_and_numbers_of_gpus_are_as_asked_for():
    mesh = virtual_mesh("h100-sxm", num_gpus=64, replica=2, model=4)
    assert dict(mesh.shape) == {"replica": 2, "data": 8, "model": 4}
    assert virtual_mesh(H100, num_gpus=3).size == 3
    assert virtual_mesh("a100-80gb", num_gpus=1024).size == 1024


@needs_plugin
def test_own_hardware_compiles_under_its_own_figures():
    mine = dataclasses.replace(H100, name="mine", device_name="Mine 40 GB", memory_bytes=40 * 2**30)
    mesh = virtual_mesh(mine, num_gpus=8)
    assert mesh.devices.flat[0].device_kind == "Mine 40 GB"
    assert collectives(compile_step(mesh, jnp.bfloat16)) == collectives(compiled("h100-sxm"))


@pytest.mark.parametrize(
    ("name", "num_gpus", "axis_sizes", "text"),
    [
        ("h100-sxm", 1, (1, 1, 1), "1x1x1"),
        ("h100-sxm", 8, (1, 8, 1), "1x1x8"),
        ("h100-sxm", 64, (1, 64, 1), "8x1x8"),
        ("v100-sxm2-32gb", 400, (1, 400, 1), "25x1x16"),
        ("gb200", 72, (1, 72, 1), "1x1x72"),
        ("gb200", 144, (1, 144, 1), "2x1x72"),
        ("gb200", 64, (1, 64, 1), "2x1x32"),
        ("gb200", 64, (8, 8, 1), "2x1x32"),
        ("gb200", 576, (9, 64, 1), "16x1x36"),
        ("gb200", 48, (1, 48, 1), "1x1x48"),
    ],
)
def test_a_partition_is_a_node_but_where_xla_would_crash(name, num_gpus, axis_sizes, text):
    assert topology_text(GPUS[name], num_gpus, axis_sizes) == text


def run_python(code, **environment):
    kept = {name: value for name, value in os.environ.items() if name != "JAX_PLATFORMS"}
    return subprocess.run(
        [sys.executable, "-c", code], env=kept | environment, capture_output=True, text=True
    )


@needs_plugin
def test_a_small_all_reduce_over_64_gpus_of_one_nvlink_domain_compiles():
    """XLA of jax 0.12.0 kills the process on it where they are one partition."""
    done = run_python(
        """if True:
        import jax, jax.numpy as jnp
        from jax.sharding import NamedSharding, PartitionSpec as P
        from jzero.virtual import virtual_mesh
        mesh = virtual_mesh("gb200", num_gpus=64)
        total = lambda x: jax.lax.psum(x, "data")
        fn = jax.shard_map(total, mesh=mesh, in_specs=P("data"), out_specs=P(), check_vma=False)
        x = jax.ShapeDtypeStruct((64,), jnp.float32, sharding=NamedSharding(mesh, P("data")))
        print("all-reduce" in jax.jit(fn).lower(x).compile().as_text())
        """,
        JAX_PLATFORMS="cpu",
    )
    assert done.stdout.split() == ["True"], done.stderr[-2000:]


@needs_plugin
@pytest.mark.parametrize("first", ["jax.devices()", "None"])
def test_it_works_whether_or_not_jax_has_looked_for_gpus(first):
    """Without JAX_PLATFORMS jax leaves out the plugin on a machine that has no CUDA."""
    done = run_python(
        f"""if True:
        import os, jax
        from jzero.virtual import virtual_mesh
        {first}
        print(virtual_mesh("h100-sxm", num_gpus=8).size)
        print("JAX_SKIP_CUDA_CONSTRAINTS_CHECK" in os.environ)
        print(float(jax.jit(lambda x: x + 1)(1.0)))
        """
    )
    assert done.stdout.split() == ["8", "False", "2.0"], done.stderr[-2000:]


@pytest.mark.parametrize(
    ("gpu", "sizes", "told"),
    [
        ("h100", {"num_gpus": 8}, r"no GPU is called 'h100'; did you mean"),
        ("h100-sxm", {"num_gpus": 0}, r"num_gpus is 0; give an integer of at least 1"),
        ("h100-sxm", {"num_gpus": 8.0}, r"num_gpus is 8.0; give an integer of at least 1"),
        ("h100-sxm", {"num_gpus": 8, "model": 0}, r"model is 0; give an integer of at least 1"),
        ("h100-sxm", {"num_gpus": 12}, r"12 is not a multiple of the 8 .* h100-sxm; use 8 or 16"),
        ("gb200", {"num_gpus": 100}, r"100 is not a multiple of the 72 .* use 72 or 144"),
        ("h100-sxm", {"num_gpus": 8, "data": 4}, r"not make num_gpus 8; leave data out, or give 8"),
        ("h100-sxm", {"num_gpus": 8, "model": 3}, r"give a multiple of 3, such as 9"),
    ],
)
def test_sizes_are_refused_before_anything_is_loaded(gpu, sizes, told, monkeypatch):
    monkeypatch.setattr(virtual, "library_path", None)  # must not be called
    with pytest.raises(ValueError, match=told):
        virtual_mesh(gpu, **sizes)


def test_without_the_plugin_the_error_names_the_extra(monkeypatch):
    monkeypatch.setattr(virtual, "library_path", lambda: None)
    with pytest.raises(ValueError, match=r"CUDA plugin.* pip install 'jzero\[plan\]'"):
        virtual_mesh("h100-sxm", num_gpus=8)


def test_without_an_assembler_the_error_names_the_extra(monkeypatch):
    monkeypatch.setattr(virtual, "library_path", lambda: "there")
    monkeypatch.setattr(virtual, "ptxas_path", lambda: None)
    with pytest.raises(ValueError, match=r"ptxas.* missing; .* pip install 'jzero\[plan\]'"):
        virtual_mesh("h100-sxm", num_gpus=8)


def test_an_assembler_too_new_for_a_volta_is_refused_for_it_alone(monkeypatch):
    monkeypatch.setattr(virtual, "library_path", lambda: "there")
    monkeypatch.setattr(virtual, "ptxas_path", lambda: "/cuda/bin/ptxas")
    monkeypatch.setattr(virtual, "ptxas_release", lambda path: 13)
    monkeypatch.setattr(virtual, "_compile_only_devices", lambda *args: jax.devices())
    with pytest.raises(ValueError, match=r"/cuda/bin/ptxas is of CUDA 13.* nvidia-cuda-nvcc-cu12"):
        virtual_mesh("v100-sxm2-16gb", num_gpus=8)
    assert virtual_mesh("a100-80gb", num_gpus=8).size == 8


def test_the_assembler_is_looked_for_where_xla_looks(tmp_path, monkeypatch):
    found = tmp_path / "bin" / "ptxas"
    found.parent.mkdir()
    found.write_text("#!/bin/sh\necho Cuda compilation tools, release 12.9, V12.9.86\n")
    found.chmod(0o755)
    monkeypatch.setenv("CUDA_ROOT", str(tmp_path))
    assert virtual.ptxas_path() == str(found)
    assert virtual.ptxas_release(str(found)) == 12


@pytest.fixture
def chips(monkeypatch):
    """A plugin that carries descriptions of two chips."""
    big = dataclasses.replace(H100, device_name="Big", memory_bytes=141 * 2**30)
    other = dataclasses.replace(H100, device_name="Other", core_count=16)
    texts = tuple(f"{target.own_text(gpu)}# theirs {gpu.device_name}" for gpu in (other, big))
    monkeypatch.setattr(target, "library_path", lambda: "there")
    monkeypatch.setattr(target, "plugin_texts", lambda path: texts)


def test_the_plugins_description_of_the_chip_is_taken_with_our_figures(chips):
    found = target.target_text(H100)
    assert found == target.own_text(H100) + "# theirs Big"


def test_a_chip_that_the_plugin_does_not_know_is_described_by_us(chips):
    assert target.target_text(GPUS["b200"]) == target.own_text(GPUS["b200"])
    minor = dataclasses.replace(H100, compute_capability=(9, 1))
    assert target.target_text(minor) == target.own_text(minor)


@needs_plugin
@pytest.mark.parametrize("gpu", GPUS.values(), ids=GPUS)
def test_the_table_says_what_xla_says_of_the_same_gpu(gpu):
    texts = target.plugin_texts(target.library_path())
    named = re.compile(rf'device_description_str: "{gpu.device_name}( 141GB HBM3e)?"')
    same = [text for text in texts if named.search(text)]
    if not same:
        pytest.skip("no description of it in this version's plugin")
    told = target._figures(gpu)
    if gpu.name == "h200":
        told.pop("device_memory_size")  # 141 GiB there, of which the driver reports 139.8
    assert {name: target._read(same[0], name) for name in told} == told
