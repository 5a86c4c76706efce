"""The command line: `jzero train CONFIG --section.key value ...`, and what else there is."""

import difflib
import os
import sys
from collections.abc import Callable, Sequence

import tyro

from jzero.config import Config, parse_config
from jzero.recipe import make_setup, trace_loss
from jzero.schema import read_toml
from jzero.train import prepare, run_job

USAGE = """\
usage: jzero COMMAND CONFIG [--section.key value ...]

commands:
  train CONFIG    train the model of a TOML file
  report CONFIG   print what is cut where, in bytes per device; nothing is run

Every key of CONFIG can be set here too, as in
  jzero train configs/gpt2_demo.toml --zero.stage 3 --train.num_steps 100
`jzero COMMAND [CONFIG] --help` lists them: the sections are [model], [optimizer], [schedule],
[data], [precision], [zero], [mesh] and [train]. --profile A:B stands for --train.profile A:B.
With JZERO_TRACEBACK=1 in the environment an error shows where it was raised.
"""
HELP = ("-h", "--help")
NAMING = (("model", "target"), ("optimizer", "name"), ("schedule", "name"))  # decide the flags
OK, FAILED, USAGE_ERROR = 0, 1, 2


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command.

    Args:
      argv: the words after `jzero`; `sys.argv` where left out.

    Returns:
      Exit status: 0, 1 where training stopped on a loss that is not finite, 2 where the command
      line, the configuration or the data cannot work.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    if words[:1] and words[0] in HELP:
        print(USAGE, end="")
        return OK
    if not words or words[0] not in COMMANDS:
        return _fail(f"{_unknown_command(words)}\n\n{USAGE}")
    # A console script does not look there, and models and user modules live there.
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        return _run(words[0], words[1:])
    except SystemExit as stop:  # of tyro, which has printed why
        return stop.code if isinstance(stop.code, int) else USAGE_ERROR


def parse_arguments(command: str, words: Sequence[str]) -> Config:
    """Reads CONFIG, and sets what the flags after it say.

    Args:
      command: for the help text.
      words: CONFIG, then flags. Without CONFIG they may only ask for help.

    Raises:
      ValueError: CONFIG is missing, or as `jzero.config.load_config`.
      SystemExit: help was asked for (0), or a flag is wrong (2); tyro has printed it.
    """
    path, flags = _split_path(command, words)
    tables = {} if path is None else read_toml(path)
    for section, key in NAMING:
        value = _flag_value(flags, f"--{section}.{key}")
        if value is not None and isinstance(tables.setdefault(section, {}), dict):
            tables[section][key] = value
    absent = tyro.MISSING
    try:
        config = parse_config(tables, source=path or "defaults", absent=absent)
    except ValueError:
        if path is not None:
            raise
        print(__doc__)  # help without CONFIG, where the default model is not importable
        raise SystemExit(OK) from None
    return tyro.cli(
        type(config),
        default=config,
        args=flags,
        prog=f"jzero {command} {path or 'CONFIG'}",
        description="Keys of the configuration, with the values they have now.",
        use_underscores=True,
        config=(tyro.conf.FlagConversionOff,),
    )


def _run(command: str, words: Sequence[str]) -> int:
    """Parses and runs; only what a user can mend is caught, so a bug keeps its traceback."""
    try:
        start = COMMANDS[command](parse_arguments(command, words))
    except ValueError as error:
        if os.environ.get("JZERO_TRACEBACK"):
            raise
        return _fail(f"jzero {command}: {error}")
    try:
        start()
    except FloatingPointError as error:
        return _fail(f"jzero {command}: {error}", FAILED)
    return OK


def _train(config: Config) -> Callable[[], object]:
    job = prepare(config)
    return lambda: run_job(job)


def _report(config: Config) -> Callable[[], object]:
    setup = make_setup(config)

    def start() -> None:
        trace_loss(setup)
        print(setup.zero.report(setup.abstract, setup.tx))

    return start


COMMANDS: dict[str, Callable[[Config], Callable[[], object]]] = {
    "train": _train,
    "report": _report,
}


def _split_path(command: str, words: Sequence[str]) -> tuple[str | None, list[str]]:
    words = ["--train.profile" + w[9:] if _is_flag(w, "--profile") else w for w in words]
    if words and not words[0].startswith("-"):
        return words[0], words[1:]
    if any(word in HELP for word in words):
        return None, ["--help"]
    raise ValueError(
        f"CONFIG is missing; give the path of a TOML file: jzero {command} configs/gpt2_demo.toml"
    )


def _is_flag(word: str, flag: str) -> bool:
    return word == flag or word.startswith(f"{flag}=")


def _flag_value(words: Sequence[str], flag: str) -> str | None:
    """What a flag is set to, the last time it is."""
    values = None
    for word, following in zip(words, [*words[1:], None], strict=False):
        if _is_flag(word, flag):
            values = following if word == flag else word.partition("=")[2]
    return values


def _unknown_command(words: Sequence[str]) -> str:
    if not words:
        return "jzero: a command is missing."
    near = difflib.get_close_matches(words[0], list(COMMANDS), 1)
    mend = f"; did you mean {near[0]!r}?" if near else "."
    return f"jzero: there is no command {words[0]!r}{mend}"


def _fail(message: str, status: int = USAGE_ERROR) -> int:
    print(message.rstrip(), file=sys.stderr)
    return status
