"""The script that holds the planner to a live GPU: all but the GPU is exercised here."""

import jax

from jzero.config import load_config
from jzero.gpus import GPUS
from jzero.recipe import make_setup
from scripts import plan_vs_gpu


def test_without_a_known_gpu_it_says_so(capsys):
    assert plan_vs_gpu.main(["configs/gpt2_124m.toml"]) == 2
    assert "no GPU of jzero's table is here, only cpu" in capsys.readouterr().out


def test_each_gpu_of_the_table_is_found_by_the_name_that_jax_prints():
    found = {gpu.name: plan_vs_gpu.find_own_gpu(gpu.device_name) for gpu in GPUS.values()}
    assert {name: gpu and gpu.device_name for name, gpu in found.items()} == {
        name: gpu.device_name for name, gpu in GPUS.items()
    }
    assert plan_vs_gpu.find_own_gpu("cpu") is None


def test_the_step_it_measures_is_that_of_the_configuration(tmp_path):
    path = tmp_path / "tiny.toml"
    path.write_text(
        "[model]\nvocab_size = 64\nnum_positions = 8\nnum_layers = 2\nnum_heads = 2\n"
        "embed_dim = 16\n[data]\nseq_len = 8\n[train]\ntrain_batch_size = 512\n"
    )
    config = plan_vs_gpu.with_settings(load_config(path), stage=3, micro_batch=2)
    setup = make_setup(config)
    assert (setup.zero.stage, setup.batch.train_batch_size) == (3, 2 * jax.device_count())
    peak, seconds = plan_vs_gpu.measured(setup, num_steps=2)
    assert peak is None and seconds > 0
