"""Tables 1 and 2 of the ZeRO paper, as `jzero plan --formula` prints them into JSON."""

import json
import pathlib

import pytest

from jzero.cli import main

PAPER = json.loads((pathlib.Path(__file__).parent / "data" / "zero_paper.json").read_text())
STAGES = {"baseline": 0, "pos": 1, "pos_g": 2, "pos_g_p": 3}
EXACT = 1e-12
COUNTS = {"7.5B": "7.5e9", "128B": "128e9", "1T": "1e12"}


def planned(tmp_path, *words):
    path = tmp_path / "plan.json"
    status = main(["plan", "--formula", "--gpu", "v100-sxm2-32gb", *words, "--json", str(path)])
    stages = json.loads(path.read_text())["stages"]
    return status, {stage["stage"]: stage["figures"] for stage in stages}


@pytest.mark.parametrize("case", PAPER["table1_gb"])
def test_every_entry_of_table_1_is_the_plans_peak(case, tmp_path):
    size, degree = case.split("/N=")
    _, stages = planned(tmp_path, "--params", COUNTS[size], "--num-gpus", degree)
    for name, gigabytes in PAPER["table1_gb"][case].items():
        figure = stages[STAGES[name]]["peak_bytes"]
        assert figure["value"] == pytest.approx(gigabytes * 1e9, rel=EXACT)
        assert figure["source"] == "formula"


@pytest.mark.parametrize("degree", PAPER["table2_billion_params"])
def test_every_entry_of_table_2_is_the_plans_largest_model(degree, tmp_path):
    row = PAPER["table2_billion_params"][degree]
    words = ("--params", "1e9", "--num-gpus", str(row["gpus"]), "--model-parallel", degree)
    status, stages = planned(tmp_path, *words, "--capacity", "32e9")
    assert status == 0
    for name, stage in STAGES.items():
        found = stages[stage]["largest_params"]["value"]
        assert found == pytest.approx(row[name] * 1e9, rel=EXACT)


@pytest.mark.parametrize(("capacity", "status"), [("32e9", 0), ("1e9", 1)])
def test_the_exit_status_says_whether_anything_fits(capacity, status, tmp_path):
    words = ("--params", "7.5e9", "--num-gpus", "64", "--capacity", capacity)
    assert planned(tmp_path, *words)[0] == status
