"""CONFIG and the flags after it: what the other tests of the command line leave out."""

import pytest

from jzero.arguments import parse_arguments
from jzero.schema import own_arguments

CONFIG = "configs/gpt2_demo.toml"


@pytest.mark.parametrize("command", ["train", "plan"])
@pytest.mark.parametrize("words", [[], ["--zero.stage", "3"]])
def test_without_config_the_command_to_write_is_named(command, words):
    with pytest.raises(ValueError, match=rf"CONFIG is missing; .*: jzero {command} configs/"):
        parse_arguments(command, words)


def test_the_last_of_two_flags_counts_in_either_spelling():
    words = ["--zero.stage", "1", "--zero.stage=3", "--train.seed=4", "--train.seed", "5"]
    found = parse_arguments("plan", [CONFIG, *words])
    assert (found.zero.stage, found.train.seed) == (3, 5)


@pytest.mark.parametrize("last", [["--schedule.name=WarmupLR"], ["--schedule.name", "WarmupLR"]])
def test_the_last_name_decides_which_flags_there_are(last, tmp_path):
    path = tmp_path / "empty.toml"
    path.write_text("")
    words = ["--schedule.name", "constant", *last, "--schedule.warmup_num_steps", "9"]
    found = parse_arguments("plan", [str(path), *words])
    assert found.schedule.name == "WarmupLR"
    assert own_arguments(found.schedule)["warmup_num_steps"] == 9


def test_a_section_that_is_no_table_is_an_error_of_the_file(tmp_path):
    path = tmp_path / "odd.toml"
    path.write_text('schedule = "constant"\n')
    with pytest.raises(ValueError, match=r"odd\.toml: .*schedule"):
        parse_arguments("plan", [str(path), "--schedule.name", "cosine"])


@pytest.mark.parametrize("word", ["-h", "--help"])
def test_help_names_the_command_that_it_is_of(word, capsys):
    with pytest.raises(SystemExit) as stop:
        parse_arguments("report", [word])
    assert not stop.value.code
    assert "jzero report CONFIG" in capsys.readouterr().out
