"""scripts/prepare_data.py: exact files, local vocabularies, and what is refused."""

import base64
import importlib.util
import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import numpy as np
import pytest

from jzero.tokens import open_tokens

ROOT = Path(__file__).parent.parent
SCRIPT = ROOT / "scripts" / "prepare_data.py"


def load_script():
    spec = importlib.util.spec_from_file_location("prepare_data", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


script = load_script()


def byte_order():
    """GPT-2's order of the single bytes: the printable ones come first."""
    printable = [b for b in range(256) if chr(b).isprintable() and chr(b) != " "]
    return printable + [b for b in range(256) if b not in printable]


def spelled():
    """How GPT-2's files spell each byte: itself where printable, else from U+0100 on."""
    order = byte_order()
    num_printable = order.index(0)
    letters = [chr(b) for b in order[:num_printable]]
    return dict(zip(order, letters + [chr(256 + i) for i in range(256)], strict=False))


MERGES = [(b"l", b"o"), (b"lo", b"w"), (b" ", b"low")]
RANKS = {bytes([b]): i for i, b in enumerate(byte_order())} | {
    first + second: 256 + i for i, (first, second) in enumerate(MERGES)
}
EOT = 259


def write_vocabulary(folder, bpe="vocab.bpe", encoder="encoder.json", merges=MERGES):
    folder.mkdir(exist_ok=True)
    letters = spelled()

    def spell(token):
        return "".join(letters[b] for b in token)

    lines = [f"{spell(first)} {spell(second)}" for first, second in merges]
    (folder / bpe).write_text("\n".join(["#version: 0.2", *lines, ""]), encoding="utf-8")
    ids = {spell(token): rank for token, rank in RANKS.items()} | {"<|endoftext|>": EOT}
    (folder / encoder).write_text(json.dumps(ids), encoding="utf-8")
    return folder


def write_tiktoken_file(folder):
    folder.mkdir(exist_ok=True)
    lines = [base64.b64encode(token) + b" %d" % rank for token, rank in RANKS.items()]
    (folder / "tiny.tiktoken").write_bytes(b"\n".join(lines))
    return folder


@pytest.fixture
def tiktoken(tmp_path, monkeypatch):
    """tiktoken with its cache inside the test's folder."""
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path / "cache"))
    return pytest.importorskip("tiktoken")


@pytest.fixture
def texts(tmp_path):
    """Two documents: "low low" and "lo"."""
    folder = tmp_path / "texts"
    folder.mkdir()
    (folder / "a.txt").write_bytes(b"low low")
    (folder / "b.txt").write_bytes(b"lo")
    return folder


STREAM = [257, 258, EOT, 256]


def run(*args):
    script.main([str(arg) for arg in args])


def fails(capsys, *args):
    """The message that the script ends with."""
    with pytest.raises(SystemExit) as ended:
        run(*args)
    assert capsys.readouterr().out == ""
    return str(ended.value.code)


def ids_of(folder):
    return [open_tokens(str(folder / name))[:].tolist() for name in ("train.bin", "val.bin")]


# --- what is written


def test_bytes_are_written_exactly_with_the_end_as_validation(tmp_path, texts):
    run(texts, "--out", tmp_path / "deep" / "out", "--val-fraction", 0.3)
    out = tmp_path / "deep" / "out"
    assert (out / "train.bin").read_bytes() == b"l\0o\0w\0 \0l\0o\0"
    assert (out / "val.bin").read_bytes() == b"w\0l\0o\0"
    assert sorted(os.listdir(out)) == ["train.bin", "val.bin"]


def test_llmc_format_carries_its_header(tmp_path, texts):
    run(texts, "--out", tmp_path, "--val-fraction", 0.3, "--format", "llmc")
    content = (tmp_path / "val.bin").read_bytes()
    assert np.frombuffer(content[:1024], "<i4").tolist() == [20240520, 1, 3] + [0] * 253
    assert content[1024:] == b"w\0l\0o\0"


@pytest.mark.parametrize(
    "write",
    [
        write_vocabulary,
        lambda folder: write_vocabulary(folder, "merges.txt", "vocab.json"),
        write_tiktoken_file,
        lambda folder: write_tiktoken_file(folder) / "tiny.tiktoken",
    ],
    ids=["openai", "huggingface", "tiktoken_folder", "tiktoken_file"],
)
def test_local_vocabulary_gives_its_ids_with_end_of_text_between_documents(
    tmp_path, texts, tiktoken, write
):
    args = ["--tokenizer", "gpt2", "--bpe-dir", write(tmp_path / "bpe"), "--val-fraction", 0.25]
    run(texts, "--out", tmp_path / "out", *args)
    assert ids_of(tmp_path / "out") == [STREAM[:3], STREAM[3:]]


def test_changed_vocabulary_is_not_taken_from_tiktokens_cache(tmp_path, tiktoken):
    folder = write_vocabulary(tmp_path / "bpe")
    assert script.load_gpt2(str(folder)).encode_ordinary("low") == [257]
    write_vocabulary(folder, merges=[(b"l", b"o"), (b"o", b"w"), (b" ", b"low")])
    with pytest.raises(ValueError, match="do not belong together"):
        script.load_gpt2(str(folder))
    single = write_tiktoken_file(tmp_path / "single") / "tiny.tiktoken"
    assert script.load_gpt2(str(single)).encode_ordinary("low") == [257]
    single.write_bytes(single.read_bytes().rsplit(b"\n", 1)[0])
    assert script.load_gpt2(str(single)).n_vocab == EOT


def test_local_pattern_splits_as_tiktokens_gpt2_does(tiktoken):
    pattern = pytest.importorskip("tiktoken_ext.openai_public").r50k_pat_str
    merged = {b"ab": 256, b"  ": 257, b"\n\n": 258, b"'s": 259, b"12": 260, b" a": 261, b"!?": 262}
    ranks = {bytes([b]): b for b in range(256)} | merged
    ours, theirs = (
        tiktoken.Encoding("x", pat_str=p, mergeable_ranks=ranks, special_tokens={})
        for p in (script.GPT2_PATTERN, pattern)
    )
    text = "ab's  ab   a\n\n  12ab!?'ll é \n a'S \t\n\n 12 end \n\n"
    assert ours.encode_ordinary(text) == theirs.encode_ordinary(text)
    assert set(merged.values()) <= set(ours.encode_ordinary(text))


def test_special_token_spelled_in_a_text_is_ordinary_text(tmp_path, tiktoken):
    (tmp_path / "a.txt").write_text("<|endoftext|>")
    encoding = script.load_gpt2(str(write_vocabulary(tmp_path / "bpe")))
    [ids] = script.encode_documents([tmp_path / "a.txt"], encoding)
    assert EOT not in ids
    assert encoding.decode(ids.tolist()) == "<|endoftext|>"


def test_report_counts_tokens_and_gives_toml_for_the_config(tmp_path, texts, capsys):
    out = tmp_path / "quo\"te'd"
    run(texts, "--out", out, "--val-fraction", 0.3)
    counts, lines = capsys.readouterr().out.split("For the config:\n")
    assert counts.splitlines() == [f"{out}/train.bin: 6 tokens", f"{out}/val.bin: 3 tokens"]
    assert tomllib.loads(lines) == {
        "data": {"path": f"{out}/train.bin", "val_path": f"{out}/val.bin"},
        "model": {"vocab_size": 256},
    }


def test_script_runs_from_the_command_line(tmp_path, texts):
    command = [sys.executable, SCRIPT, texts, "--out", tmp_path / "out", "--val-fraction", "0.3"]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    # jax's CUDA plugin, where it is installed, says that there is no driver.
    said = [x for x in done.stderr.splitlines() if "absl::Init" not in x and "cudart" not in x]
    assert (done.returncode, said) == (0, [])
    assert ids_of(tmp_path / "out") == [list(b"low lo"), list(b"wlo")]


# --- what is refused


def test_no_network_says_which_files_to_put_where(tmp_path, texts, tiktoken, monkeypatch, capsys):
    def unreachable(name):
        raise OSError("no route")

    monkeypatch.setattr(tiktoken, "get_encoding", unreachable)
    message = fails(capsys, texts, "--out", tmp_path, "--tokenizer", "gpt2")
    for piece in ("was not downloaded", "vocab.bpe and encoder.json", "--bpe-dir FOLDER"):
        assert piece in message


def test_missing_tiktoken_names_the_extra(tmp_path, texts, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "tiktoken", None)
    message = fails(capsys, texts, "--out", tmp_path, "--tokenizer", "gpt2")
    assert "pip install 'jzero[data]'" in message and "--tokenizer bytes" in message


def test_bytes_need_no_tiktoken(tmp_path, texts, monkeypatch):
    monkeypatch.setitem(sys.modules, "tiktoken", None)
    run(texts, "--out", tmp_path / "out", "--val-fraction", 0.3)
    assert ids_of(tmp_path / "out")[1] == list(b"wlo")


@pytest.mark.parametrize("num_files", [0, 2])
def test_folder_without_one_vocabulary_is_refused(tmp_path, texts, tiktoken, capsys, num_files):
    (tmp_path / "bpe").mkdir()
    for i in range(num_files):
        (tmp_path / "bpe" / f"{i}.tiktoken").touch()
    args = ["--tokenizer", "gpt2", "--bpe-dir", tmp_path / "bpe"]
    message = fails(capsys, texts, "--out", tmp_path / "out", *args)
    assert f"holds {num_files} vocabularies, not one; put vocab.bpe" in message


@pytest.mark.parametrize("ranks", [[*range(256), 300], range(255), []])
def test_vocabulary_with_gaps_or_without_all_bytes_is_refused(tmp_path, tiktoken, ranks):
    words = [bytes([i]) if i < 256 else b"ab" for i in ranks]
    lines = [base64.b64encode(w) + b" %d" % i for w, i in zip(words, ranks, strict=True)]
    (tmp_path / "bad.tiktoken").write_bytes(b"\n".join(lines))
    with pytest.raises(ValueError, match=f"its {len(lines)} ranks are not .*--bpe-dir FOLDER"):
        script.load_gpt2(str(tmp_path / "bad.tiktoken"))


def test_home_is_expanded(tmp_path, tiktoken, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    write_vocabulary(tmp_path / "bpe")
    assert script.load_gpt2("~/bpe").eot_token == EOT


def test_text_that_is_not_utf8_is_refused_by_name(tmp_path, texts, tiktoken, capsys):
    (texts / "latin.txt").write_bytes(b"caf\xe9")
    args = ["--tokenizer", "gpt2", "--bpe-dir", write_vocabulary(tmp_path / "bpe")]
    message = fails(capsys, texts, "--out", tmp_path / "out", *args)
    assert "latin.txt is not UTF-8 (byte 3); convert it" in message
    assert not (tmp_path / "out").exists()


def test_ids_beyond_uint16_are_refused_and_never_wrap(tmp_path, texts, monkeypatch, capsys):
    class Wide:
        eot_token, n_vocab = 100257, 100258

        def encode_ordinary(self, text):
            return [1, 2, 3]

    monkeypatch.setattr(script, "load_gpt2", lambda bpe_dir: Wide())
    args = ["--tokenizer", "gpt2", "--val-fraction", 0.2]
    message = fails(capsys, texts, "--out", tmp_path / "out", *args)
    assert "token id 100257 at position 3 does not fit uint16" in message
    assert list((tmp_path / "out").iterdir()) == []


@pytest.mark.parametrize(
    ("args", "piece"),
    [
        (["missing.txt"], "does not exist; give a text file"),
        (["texts", "--bpe-dir", "x"], "--bpe-dir is for --tokenizer gpt2; add that"),
        (["texts", "--val-fraction", "0"], "val_fraction 0.0 of 9 tokens"),
        (["tokens.bin"], "holds tokens already; give it to jzero train"),
    ],
)
def test_bad_input_ends_with_the_mend(tmp_path, texts, monkeypatch, capsys, args, piece):
    (tmp_path / "tokens.bin").write_bytes(b"ab")
    monkeypatch.chdir(tmp_path)
    assert piece in fails(capsys, *args, "--out", "out")
