"""CONFIG and the flags after it: a configuration from the command line."""

from collections.abc import Sequence
from typing import Any

import tyro

from jzero.config import Config, parse_config
from jzero.schema import read_toml

HELP = ("-h", "--help")
NAMING = (("model", "target"), ("optimizer", "name"), ("schedule", "name"))  # decide the flags
OK = 0


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
    return parse_flags(command, {} if path is None else read_toml(path), flags, path)


def parse_flags(
    command: str, tables: dict[str, Any], flags: Sequence[str], path: str | None
) -> Config:
    """Sets what flags say over the tables of a file.

    Args:
      command: for the help text.
      tables: from section to key to value.
      flags: `--section.key value`, any number.
      path: where the tables come from; None where there are none, to show help alone.
    """
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
