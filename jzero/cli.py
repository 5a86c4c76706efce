"""The command line: `jzero train CONFIG --section.key value ...`, and what else there is."""

import difflib
import logging
import os
import sys
from collections.abc import Callable, Sequence

from jzero.arguments import HELP, parse_arguments
from jzero.arrays import DamagedError
from jzero.checkpoint_command import prepare_checkpoint
from jzero.huggingface_command import prepare_export, prepare_import
from jzero.model_commands import prepare_eval, prepare_sample
from jzero.plan_command import prepare_plan
from jzero.recipe import make_setup, trace_loss
from jzero.saving import SaveError
from jzero.train import prepare, run_job

USAGE = """\
usage: jzero COMMAND CONFIG [--section.key value ...]

commands:
  train CONFIG    train the model of a TOML file
  report CONFIG   print what is cut where, in bytes per device; nothing is run
  plan CONFIG     compile the step for GPUs that are not here: what fits, what is sent, how fast

  eval CHECKPOINT --data PATH       loss, perplexity and bits per byte, at any stage
  sample CHECKPOINT --prompt TEXT   what a trained model writes
  checkpoint inspect|verify DIR     what is saved there, and whether every byte is as written
  import hf DIR_OR_FILE OUT         a checkpoint of a Hugging Face GPT-2
  export hf CHECKPOINT OUT          a Hugging Face GPT-2 of a checkpoint

Every key of CONFIG can be set here too, as in
  jzero train configs/gpt2_demo.toml --zero.stage 3 --train.num_steps 100
`jzero COMMAND [CONFIG] --help` lists them: the sections are [model], [optimizer], [schedule],
[data], [precision], [zero], [mesh], [train] and [checkpoint]. --profile A:B stands for
--train.profile A:B.
With JZERO_TRACEBACK=1 in the environment an error shows where it was raised.
"""
OK, FAILED, USAGE_ERROR = 0, 1, 2
STOPPED = {None: OK, "SIGTERM": OK, "SIGINT": 130}  # by what ended a run early
MEND_DAMAGE = """\
`jzero checkpoint verify` says which steps are whole; name one of those, or remove the folder of the
damaged step to go on from the one before."""
LOUD_ONCE = ("train", "import")  # commands whose failed writes are told by jzero, not by Orbax


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command.

    Args:
      argv: the words after `jzero`; `sys.argv` where left out.

    Returns:
      Exit status: 0, also where SIGTERM ended a run that could save; 1 where training stopped on a
      loss that is not finite or a state that could not be saved, a checkpoint is damaged, or
      nothing that was planned fits; 2 where the command line, the configuration or the data cannot
      work, or nothing that was planned could be compiled; 130 where SIGINT ended a run.
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


def _run(command: str, words: Sequence[str]) -> int:
    """Parses and runs; only what a user can mend is caught, so a bug keeps its traceback."""
    try:
        start = COMMANDS[command](words)
    except ValueError as error:
        if os.environ.get("JZERO_TRACEBACK"):
            raise
        return _told(command, error, USAGE_ERROR)
    if command in LOUD_ONCE:
        logging.getLogger("absl").setLevel(logging.CRITICAL)
    try:
        return start()
    except BrokenPipeError:  # of `| head`, say, which has read enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return OK
    except KeyboardInterrupt:
        return _fail(f"jzero {command}: stopped at once", STOPPED["SIGINT"])
    except (FloatingPointError, SaveError, DamagedError) as error:
        return _told(command, error, FAILED)
    except (ValueError, OSError) as error:
        if command in ("train", "report") or os.environ.get("JZERO_TRACEBACK"):
            raise
        return _told(command, error, USAGE_ERROR)


def _told(command: str, error: Exception, status: int) -> int:
    mend = f"\n{MEND_DAMAGE}" if isinstance(error, DamagedError) else ""
    return _fail(f"jzero {command}: {error}{mend}", status)


def _train(words: Sequence[str]) -> Callable[[], int]:
    job = prepare(parse_arguments("train", words))

    def start() -> int:
        return STOPPED[run_job(job).stopped_by]

    return start


def _report(words: Sequence[str]) -> Callable[[], int]:
    setup = make_setup(parse_arguments("report", words))

    def start() -> int:
        trace_loss(setup)
        print(setup.zero.report(setup.abstract, setup.tx))
        return OK

    return start


COMMANDS: dict[str, Callable[[Sequence[str]], Callable[[], int]]] = {
    "train": _train,
    "report": _report,
    "plan": prepare_plan,
    "eval": prepare_eval,
    "sample": prepare_sample,
    "checkpoint": prepare_checkpoint,
    "import": prepare_import,
    "export": prepare_export,
}


def _unknown_command(words: Sequence[str]) -> str:
    if not words:
        return "jzero: a command is missing."
    near = difflib.get_close_matches(words[0], list(COMMANDS), 1)
    mend = f"; did you mean {near[0]!r}?" if near else "."
    return f"jzero: there is no command {words[0]!r}{mend}"


def _fail(message: str, status: int = USAGE_ERROR) -> int:
    print(message.rstrip(), file=sys.stderr)
    return status
