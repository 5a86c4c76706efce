"""The table of GPUs: whole, positive and sourced; own hardware is read strictly."""

import dataclasses

import pytest

from jzero.gpus import GPUS, find_gpu, peak_flops, read_gpu


@pytest.mark.parametrize(
    ("device_kind", "dtype", "tflops"),
    [
        ("Tesla V100-SXM2-16GB", "float32", 15.7),
        ("Tesla V100-SXM2-16GB", "bfloat16", None),
        ("Tesla V100-PCIE-32GB", "float16", 112),
        ("NVIDIA A100-SXM4-80GB", "bfloat16", 312),
        ("NVIDIA A100 80GB PCIe", "float32", 156),
        ("NVIDIA H100 80GB HBM3", "float16", 989.4),
        ("NVIDIA H100 PCIe", "bfloat16", 756.5),
        ("NVIDIA H200", "bfloat16", 989.4),
        ("NVIDIA B200", "bfloat16", 2250),
        ("NVIDIA GB200", "float32", 1250),
        ("NVIDIA L4", "bfloat16", 121),
        ("NVIDIA L40S", "bfloat16", 362.05),
        ("NVIDIA GeForce RTX 3090", "float16", 71),
        ("NVIDIA GeForce RTX 4090", "float32", 82.6),
        ("NVIDIA GeForce RTX 3090 Ti", "float16", None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", "float16", None),
        ("NVIDIA H100 NVL", "bfloat16", None),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", "bfloat16", None),
        ("NVIDIA L40", "bfloat16", None),
        ("NVIDIA GH200 480GB", "bfloat16", None),
        ("NVIDIA H100 80GB HBM3", "float64", None),
        ("cpu", "float32", None),
    ],
)
def test_the_peak_is_that_of_the_very_chip_and_dtype_or_none(device_kind, dtype, tflops):
    assert peak_flops(device_kind, dtype) == (None if tflops is None else tflops * 1e12)


@pytest.mark.parametrize("gpu", GPUS.values(), ids=GPUS)
def test_every_gpu_has_a_source_and_the_peak_of_the_one_table(gpu):
    assert len(gpu.source) > 20
    assert gpu.peak_flops("float16") == peak_flops(gpu.device_name, "float16")
    assert gpu.peak_flops("float32") == peak_flops(gpu.device_name, "float32")
    assert gpu.bfloat16_flops_per_s == peak_flops(gpu.device_name, "bfloat16")


def test_the_table_has_the_gpus_of_the_time_under_their_names():
    assert list(GPUS) == [
        "v100-sxm2-16gb",
        "v100-sxm2-32gb",
        "a100-40gb",
        "a100-80gb",
        "h100-sxm",
        "h100-pcie",
        "h200",
        "b200",
        "gb200",
    ]
    assert all(name == gpu.name for name, gpu in GPUS.items())


@pytest.mark.parametrize(
    ("name", "link_gb", "node_gb", "gpus_per_node", "gib"),
    [
        ("v100-sxm2-16gb", 120, 100, 16, 16),
        ("v100-sxm2-32gb", 120, 100, 16, 32),
        ("a100-40gb", 240, 200, 8, 40),
        ("a100-80gb", 240, 200, 8, 80),
        ("h100-sxm", 370.8, 400, 8, 80),
        ("h100-pcie", 48, 400, 8, 80),
        ("h200", 370.8, 400, 8, 141),
        ("b200", 721.8, 400, 8, 180),
        ("gb200", 721.8, 3600, 72, 186),
    ],
)
def test_rates_are_nccls_and_the_nodes(name, link_gb, node_gb, gpus_per_node, gib):
    gpu = GPUS[name]
    assert gpu.link_bytes_per_s / 1e9 == pytest.approx(link_gb)
    assert gpu.node_bytes_per_s / 1e9 == pytest.approx(node_gb)
    assert gpu.gpus_per_node == gpus_per_node
    assert 0.97 * gib < gpu.memory_bytes / 2**30 < gib  # the driver keeps some of it


def test_a_volta_does_not_multiply_in_bfloat16():
    with pytest.raises(ValueError, match=r"v100-sxm2-16gb does not multiply in bfloat16; use floa"):
        GPUS["v100-sxm2-16gb"].peak_flops("bfloat16")


def test_an_unknown_name_is_answered_with_the_nearest_and_all():
    with pytest.raises(ValueError, match=r"'H200x'; did you mean 'h200'\? There are v100.*gb200"):
        find_gpu("H200x")
    with pytest.raises(ValueError, match=r"'tpu'; There are v100-sxm2-16gb,"):
        find_gpu("tpu")


@pytest.fixture
def write(tmp_path):
    def write(text):
        path = tmp_path / "mine.toml"
        path.write_text(text)
        return path

    return write


def test_own_hardware_is_a_gpu_of_the_table_with_what_differs(write):
    mine = read_gpu(write('base = "h100-sxm"\ngpus_per_node = 4\nnode_bytes_per_s = 50000000000'))
    changes = {"name": "mine", "gpus_per_node": 4, "node_bytes_per_s": 50e9}
    assert mine == dataclasses.replace(GPUS["h100-sxm"], **changes)
    assert read_gpu(write('base = "h200"\nname = "ours"')).name == "ours"
    capability = read_gpu(write('base = "h200"\ncompute_capability = [9, 1]')).compute_capability
    assert capability == (9, 1)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("gpus_per_node = 4", r'names no GPU to start from; write base = "h100-sxm"'),
        ('base = "h100"', r"no GPU is called 'h100'; did you mean"),
        ('base = "h200"\nmemory_byte = 1', r"'memory_byte', which no GPU has; did you mean 'memo"),
        ('base = "h200"\nzzz = 1', r"'zzz', which no GPU has; a GPU has name, device_name"),
        ('base = "h200"\ncore_count = "x"', r"core_count is 'x', of type str; give .* type int"),
        ('base = "h200"\ncore_count = 1.5', r"core_count is 1.5, of type float; give .* type int"),
        ('base = "h200"\ncore_count = 0', r"'mine': core_count is 0; give a number above 0"),
        ('base = "h200"\nlink_step_s = -1.0', r"link_step_s is -1.0; give a number above 0"),
        ('base = "h200"\nefficiency = 40', r"efficiency is 40.0; give a share of the peak"),
        ('base = "h200"\nmemory_efficiency = 2', r"memory_efficiency is 2.0; give a share"),
        ('base = "h200"\nclock_ghz = nan', r"clock_ghz is nan; give a finite number"),
        ('base = "h200"\ncompute_capability = [9]', r"is \(9,\); give major and minor"),
        ("base = ", r"is not TOML: .*; mend that line"),
    ],
)
def test_own_hardware_is_refused_with_the_mend(write, text, told):
    with pytest.raises(ValueError, match=told):
        read_gpu(write(text))


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"none\.toml cannot be read .* give a TOML file of a GPU"):
        read_gpu(tmp_path / "none.toml")
