"""`jzero plan`: its own flags, and what it prints and writes."""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from jzero.announcement import GPU, NUM_GPUS, check_announcement
from jzero.arguments import parse_arguments
from jzero.config import Config
from jzero.gpus import GPUS, Gpu, find_gpu, read_gpu
from jzero.layout import STAGES
from jzero.plan import Request, make_plan
from jzero.plan_figures import Plan, fits_any
from jzero.plan_formula import Formula, formula_plan, of_config
from jzero.plan_plot import check_plot_path, plot
from jzero.plan_table import render, to_json
from jzero.terminal import format_count
from jzero.virtual import check_cluster, topology_text

FITS, NOTHING_FITS, NOTHING_COMPILED = 0, 1, 2
DESCRIPTION = """\
Compiles the training step of CONFIG for GPUs that are not here, and prints for each stage what one
of them holds and sends, whether it fits, the largest micro batch that does, and estimated times.
Every key of CONFIG can be set too, as in --train.micro_batch 4; --zero.stage stands for --stage.
Exit status 0 where a stage fits, 1 where none does, 2 where none could be compiled or the words are
wrong.
"""
EXAMPLES = """\
examples:
  jzero plan configs/gpt2_1558m.toml --gpu h100-sxm --num-gpus 64
  jzero plan configs/gpt2_1558m.toml --gpu v100-sxm2-32gb --num-gpus 16 --stage 2 3 --json plan.json
  jzero plan --formula --params 1e12 --gpu h100-sxm --num-gpus 1024
  jzero plan --check
"""


def prepare_plan(words: Sequence[str]) -> Callable[[], int]:
    """Reads the words after `jzero plan`; every check of them comes here.

    Returns:
      What plans and prints; it returns the exit status, 1 where nothing fits and 2 where nothing
      could be compiled.

    Raises:
      ValueError: flags that cannot be honoured.
      SystemExit: help was asked for (0), or a flag is wrong (2); the reason is printed.
    """
    parser = _parser()
    path = [words[0]] if words and not words[0].startswith("-") else []
    flags, rest = parser.parse_known_args(words[len(path) :])
    unknown = [word for word in rest if word.startswith("--") and "." not in word.split("=")[0]]
    if unknown:
        parser.error(f"there is no flag {unknown[0]}; those of CONFIG are --section.key")
    if flags.check:
        if len(words) > 1:
            parser.error("--check stands alone; leave the other words out")
        return _check
    if rest and not path:
        raise ValueError(
            f"{rest[0]} has no CONFIG before it; CONFIG comes first, as in jzero plan "
            "configs/gpt2_124m.toml --gpu h100-sxm --num-gpus 8 --train.micro_batch 4."
        )
    flags.stage, rest = _stages(flags.stage, rest)
    config = parse_arguments("plan", [*path, *rest]) if path else None
    if config is None and flags.params is None:
        raise ValueError(
            "CONFIG is missing; give the path of a TOML file, as in jzero plan "
            "configs/gpt2_124m.toml --gpu h100-sxm --num-gpus 8, or --formula --params 7.5e9."
        )
    _check_flags(flags, config)
    gpu = _gpu(flags)
    topology_text(gpu, flags.num_gpus)
    plan = _by_formula(flags, gpu, config) if flags.formula else _by_compiling(flags, gpu, config)
    return lambda: _show(plan(), flags)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="jzero plan",
        usage="jzero plan CONFIG --gpu NAME --num-gpus N [flags] [--section.key value ...]",
        description=DESCRIPTION,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--gpu", metavar="NAME", help=f"one of {', '.join(GPUS)}")
    add("--hardware", metavar="FILE.toml", help='a GPU of your own: base = "h100-sxm", and changes')
    add("--num-gpus", type=int, metavar="N", help="GPUs of the run: part of a node, or whole nodes")
    add("--stage", type=int, nargs="+", choices=range(4), help="default: all")
    add("--num-tokens", type=float, metavar="T", help="tokens of the whole run, for the hours")
    add("--capacity", type=float, metavar="BYTES", help="default: its memory less 6 %%")
    add("--no-search", action="store_true", help="do not look for the largest micro batch")
    add("--jobs", type=int, metavar="N", help="compiles at the same time; default: 2")
    add("--json", type=Path, metavar="FILE", help="also write every figure with its source")
    add("--plot", type=Path, metavar="FILE.png", help="also draw bytes and wire by stage")
    add("--formula", action="store_true", help="compile nothing: model states and the law alone")
    add("--params", type=float, metavar="P", help="with --formula: parameters, without CONFIG")
    add("--model-parallel", type=int, metavar="M", help="with --formula: GPUs that share a copy")
    add("--check", action="store_true", help="hold the time model to published measurements")
    return parser


def _stages(given: Sequence[int] | None, rest: Sequence[str]) -> tuple[list[int], list[str]]:
    """The stages to plan, and the flags of CONFIG with a stage that its other flags can have.

    `--zero.stage` is another word for `--stage`, and what is for one stage alone is planned there.
    """
    own, rest = _taken("--zero.stage", rest)
    stages = list(dict.fromkeys(range(len(STAGES)) if given is None else given))
    if own is not None:
        if own not in map(str, range(len(STAGES))):
            raise ValueError(f"--zero.stage is {own!r}; use 0, 1, 2 or 3, or --stage for several.")
        if given is not None and stages != [int(own)]:
            raise ValueError(
                f"--stage {' '.join(map(str, stages))} and --zero.stage {own} both say what is "
                "planned; leave one out."
            )
        stages = [int(own)]
    for key, stage in (("keep_gathered", 3), ("cut_layers", 1)):
        if _taken(f"--zero.{key}", rest)[0] == "True":
            rest = [*rest, "--zero.stage", str(stage if stage in stages else stages[0])]
    return stages, rest


def _taken(flag: str, words: Sequence[str]) -> tuple[str | None, list[str]]:
    """What a flag is set to, the last time it is, and the words without it."""
    value, kept, left = None, [], iter(words)
    for word in left:
        name, has_value, told = word.partition("=")
        if name.replace("-", "_") == flag.replace("-", "_"):
            value = told if has_value else next(left, "")
        else:
            kept.append(word)
    return value, kept


def _check_flags(flags: argparse.Namespace, config: Config | None) -> None:
    if flags.gpu is not None and flags.hardware is not None:
        raise ValueError("--gpu and --hardware both say what the GPUs are; leave one out.")
    if flags.num_gpus is None or (flags.gpu is None and flags.hardware is None):
        raise ValueError(
            "--num-gpus and one of --gpu and --hardware are needed, as in --gpu h100-sxm "
            f"--num-gpus 64; --gpu is one of {', '.join(GPUS)}."
        )
    for name in ("num_gpus", "jobs", "capacity", "num_tokens", "params", "model_parallel"):
        value = getattr(flags, name)
        if value is not None and not 0 < value < math.inf:
            raise ValueError(f"{_spelled(name)} is {value:g}; give a finite number above 0.")
    _check_formula(flags)
    if flags.params is not None and config is not None:
        raise ValueError("--params and CONFIG both say how large the model is; leave one out.")
    if flags.num_tokens and config is None:
        raise ValueError("--num-tokens needs the batch of a CONFIG; give one, or leave it out.")
    _check_paths(flags)


def _check_formula(flags: argparse.Namespace) -> None:
    """Refuses what only the other of the two kinds of plan knows."""
    if flags.formula:
        for name in ("no_search", "jobs"):
            if getattr(flags, name):
                mend = "leave one of them out"
                raise ValueError(f"--formula compiles nothing for {_spelled(name)}; {mend}.")
        return
    for name in ("params", "model_parallel"):
        if getattr(flags, name) is not None:
            raise ValueError(f"{_spelled(name)} is for --formula; add it, or leave it out.")


def _spelled(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _check_paths(flags: argparse.Namespace) -> None:
    if flags.plot:
        try:
            check_plot_path(flags.plot)
        except ImportError as error:
            raise ValueError(f"--plot {flags.plot}: {error}, or leave --plot out.") from error
    if flags.json and not flags.json.resolve().parent.is_dir():
        raise ValueError(f"--json {flags.json}: the folder does not exist; make it first.")
    if flags.json and flags.json.is_dir():
        raise ValueError(f"--json {flags.json} is a folder; name a file in it.")


def _gpu(flags: argparse.Namespace) -> Gpu:
    return read_gpu(flags.hardware) if flags.hardware else find_gpu(flags.gpu)


def _by_compiling(flags: argparse.Namespace, gpu: Gpu, config: Config | None) -> Callable[[], Plan]:
    assert config is not None
    sizes = config.mesh
    axes = {"replica": sizes.replica, "data": sizes.data, "model": sizes.model}
    check_cluster(gpu, flags.num_gpus, **axes)
    request = Request(
        config,
        gpu,
        flags.num_gpus,
        stages=tuple(flags.stage),
        finds_largest=not flags.no_search,
        num_tokens=flags.num_tokens,
        capacity_bytes=flags.capacity,
        num_jobs=flags.jobs or Request.num_jobs,
    )
    return lambda: make_plan(request, lambda line: print(line, file=sys.stderr, flush=True))


def _by_formula(flags: argparse.Namespace, gpu: Gpu, config: Config | None) -> Callable[[], Plan]:
    request = Formula(
        flags.params or 1.0,
        gpu,
        flags.num_gpus,
        stages=tuple(flags.stage),
        capacity_bytes=flags.capacity,
        model_parallel=flags.model_parallel or 1,
        num_tokens=flags.num_tokens,
    )
    if config is not None:
        request = of_config(config, request)
    return lambda: formula_plan(request)


def _show(plan: Plan, flags: argparse.Namespace) -> int:
    print(render(plan), end="")
    if flags.json:
        flags.json.write_text(json.dumps(to_json(plan), indent=1, allow_nan=False) + "\n")
    if flags.plot:
        plot(plan, flags.plot)
    if all(stage.failure for stage in plan.stages):
        return NOTHING_COMPILED
    return FITS if fits_any(plan) else NOTHING_FITS


def _check() -> int:
    """Prints the time model beside the measurements of the announcement."""
    print(f"Samples/s on {NUM_GPUS} x {GPU}: Microsoft's announcement of ZeRO, and the time model.")
    titles = ("model", "Megatron-LM", "model's", "ZeRO", "model's", "ratio", "model's", "error")
    line = "{:>8}" + "{:>13}" * 4 + "{:>9}" * 3
    print(line.format(*titles))
    for row in check_announcement():
        rates = (row.megatron_published, row.megatron_model, row.zero_published, row.zero_model)
        ratios = (f"{row.ratio_published:.2f}", f"{row.ratio_model:.2f}", f"{row.error:+.0%}")
        cells = (format_count(row.num_params), *(f"{rate:.2f}" for rate in rates), *ratios)
        print(line.format(*cells))
    print("Nothing of the model is fitted to these rows; a plan's times can be off as far.")
    return FITS
