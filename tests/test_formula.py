"""The formulas are the paper's, entry by entry."""

import inspect
import json
import math
from pathlib import Path

import numpy as np
import pytest

from jzero.formula import largest_model, state_bytes

PAPER = json.loads((Path(__file__).parent / "data" / "zero_paper.json").read_text())
STAGE_OF = {"baseline": 0, "pos": 1, "pos_g": 2, "pos_g_p": 3}
SIZES = {"7.5B": 7.5e9, "128B": 128e9, "1T": 1e12}
EXACT = 1e-12  # the tables hold the formulas' own values: rounding of float64 alone

TABLE_1 = [
    (SIZES[size], int(shards.removeprefix("N=")), STAGE_OF[name], gigabytes)
    for entry, row in PAPER["table1_gb"].items()
    for size, shards in [entry.split("/")]
    for name, gigabytes in row.items()
]
TABLE_2 = [
    (int(degree), STAGE_OF[name], row["gpus"], row[name])
    for degree, row in PAPER["table2_billion_params"].items()
    for name in STAGE_OF
]
GOOD = {
    state_bytes: {"num_params": 1e9, "num_shards": 8, "stage": 2},
    largest_model: {"memory_bytes": 32e9, "num_shards": 8, "stage": 2},
}
BAD = {
    "num_params": (0, -1e9, math.nan, math.inf, "7.5e9"),
    "memory_bytes": (0, -1, math.nan, math.inf),
    "num_shards": (0, -8, 8.0, "8"),
    "model_parallel": (0, 1.5),
    "stage": (-1, 4, 2.0, "3", None),
    "param_bytes": (-1, math.nan, math.inf),
    "grad_bytes": (-2, math.nan),
    "optimizer_bytes": (-12, math.inf),
}
REFUSED = [
    pytest.param(call, name, value, id=f"{call.__name__}-{name}-{value}")
    for call in GOOD
    for name in inspect.signature(call).parameters
    for value in BAD[name]
]


def test_the_tables_are_whole():
    assert (len(TABLE_1), len(TABLE_2)) == (3 * 6 * 4, 5 * 4)


@pytest.mark.parametrize(("num_params", "num_shards", "stage", "gigabytes"), TABLE_1)
def test_model_states_are_table_1(num_params, num_shards, stage, gigabytes):
    total = state_bytes(num_params, num_shards=num_shards, stage=stage).total
    assert total == pytest.approx(gigabytes * 1e9, rel=EXACT)


@pytest.mark.parametrize(("model_parallel", "stage", "num_gpus", "billions"), TABLE_2)
def test_the_largest_model_is_table_2(model_parallel, stage, num_gpus, billions):
    shards = num_gpus // model_parallel
    largest = largest_model(32e9, num_shards=shards, stage=stage, model_parallel=model_parallel)
    assert largest == pytest.approx(billions * 1e9, rel=EXACT)


@pytest.mark.parametrize("stage", range(4))
def test_the_largest_model_fills_the_memory(stage):
    sizes = {"param_bytes": 4, "grad_bytes": 4, "optimizer_bytes": 8, "model_parallel": 3}
    largest = largest_model(80e9, num_shards=7, stage=stage, **sizes)
    total = state_bytes(largest, num_shards=7, stage=stage, **sizes).total
    assert total == pytest.approx(80e9, rel=EXACT)


def test_each_class_is_cut_from_its_stage_on():
    whole, shard = (2.0, 4.0, 12.0), (0.25, 0.5, 1.5)
    for stage in range(4):
        found = state_bytes(1, num_shards=8, stage=stage, grad_bytes=4)
        is_cut = (stage >= 3, stage >= 2, stage >= 1)
        expected = (s if c else w for w, s, c in zip(whole, shard, is_cut, strict=True))
        assert tuple(found) == tuple(expected), stage


def test_one_device_cuts_nothing():
    for stage in range(4):
        assert state_bytes(1e9, num_shards=1, stage=stage).total == 16e9


def test_integers_of_numpy_are_counts_too():
    assert state_bytes(np.int64(16), num_shards=np.int32(8), stage=np.int8(3)).total == 32


@pytest.mark.parametrize(("call", "name", "value"), REFUSED)
def test_what_is_out_of_range_is_named_with_its_value_and_the_mend(call, name, value):
    call(**GOOD[call])
    with pytest.raises(ValueError, match=rf"^{name} .*; (give|use) .*\.$") as error:
        call(**{**GOOD[call], name: value})
    assert repr(value) in str(error.value)


def test_a_model_without_bytes_has_no_largest_size():
    with pytest.raises(ValueError, match=r"all 0.*give the bytes of at least one"):
        largest_model(1, num_shards=1, stage=0, param_bytes=0, grad_bytes=0, optimizer_bytes=0)
