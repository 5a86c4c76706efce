"""Imports run one way, and the model is the proof that a model needs no redesign."""

import ast
import pathlib

import pytest

ROOT = pathlib.Path(__file__).parent.parent
# A module may import those to its left.
ORDER = [
    "layout",
    "formula",
    "mesh",
    "trees",
    "held",
    "reads",
    "losses",
    "outputs",
    "gradients",
    "stack",
    "prefetch",
    "layers",
    "memo",
    "precision",
    "scaling",
    "skips",
    "policies",
    "terminal",
    "hlo",
    "groups",
    "collective",
    "cover",
    "walk",
    "ledger",
    "products",
    "optimizer",
    "sent",
    "report",
    "zero",
    "source",
    "arrays",
    "manifest",
    "ownership",
    "restore",
    "checkpoint",
    "options",
    "metrics",
    "tokens",
    "schedules",
    "schema",
    "gpus",
    "target",
    "virtual",
    "timing",
    "announcement",
    "config",
    "rates",
    "data",
    "recipe",
    "state",
    "resume",
    "saving",
    "stopping",
    "safetensors_files",
    "safetensors_writer",
    "huggingface_files",
    "huggingface",
    "weights",
    "evaluate",
    "runlog",
    "tokenizer",
    "generate",
    "sample",
    "train",
    "compile_step",
    "arguments",
    "loaded",
    "model_commands",
    "checkpoint_command",
    "huggingface_command",
    "plan_figures",
    "plan_table",
    "plan_plot",
    "plan",
    "plan_formula",
    "plan_command",
    "cli",
]


def imported(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{name.name}" for name in node.names)
        elif isinstance(node, ast.Import):
            yield from (name.name for name in node.names)


def tops(path):
    return {name.split(".")[0] for name in imported(path)}


@pytest.mark.parametrize("path", sorted((ROOT / "jzero").glob("*.py")), ids=lambda p: p.stem)
def test_the_library_imports_only_what_is_before_it(path):
    assert not tops(path) & {"models", "configs", "scripts", "tests"}
    if path.stem in ("__init__", "__main__"):
        return
    before = ORDER[: ORDER.index(path.stem)]
    inner = [name.split(".")[1] for name in imported(path) if name.startswith("jzero.")]
    assert set(inner) & set(ORDER) <= set(before)


@pytest.mark.parametrize("path", sorted((ROOT / "models").glob("*.py")), ids=lambda p: p.stem)
def test_models_never_import_jzero(path):
    assert "jzero" not in tops(path)


def test_every_module_of_the_library_is_in_the_order():
    modules = {path.stem for path in (ROOT / "jzero").glob("*.py")} - {"__init__", "__main__"}
    assert modules == set(ORDER)
