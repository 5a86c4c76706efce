"""Tokens of a text come from files at hand, and nothing is downloaded."""

import json

import pytest

from jzero import tokenizer
from jzero.tokenizer import END_OF_TEXT, Bytes, Ids, byte_pairs, find_tokenizer

LETTERS = {letter: byte for letter, byte in tokenizer._letters().items()}
ALPHABET = sorted(LETTERS, key=LETTERS.get)
MERGES = ["h e", "l l", "he ll", "Ġ w"]
VOCAB = {letter: i for i, letter in enumerate(ALPHABET)} | {
    "he": 256, "ll": 257, "hell": 258, "Ġw": 259, END_OF_TEXT: 260
}  # fmt: skip


def test_bytes_are_text_and_back_and_marks_beyond_them_are_nothing():
    text = "aé\n語"
    assert Bytes().decode(Bytes().encode(text).tolist()) == text
    assert Bytes(258).ends == (256, 257)
    assert Bytes(258).decode([97, 256, 98]) == "ab"


def test_ids_are_numbers_and_anything_else_is_refused():
    assert Ids().encode("3 14").tolist() == [3, 14]
    with pytest.raises(ValueError, match=r"the prompt has 'def', .*vocab\.json and merges\.txt"):
        Ids().encode("3 def")


def write_files(folder, kind):
    if kind == "two files":
        (folder / "vocab.json").write_text(json.dumps(VOCAB))
        (folder / "merges.txt").write_text("\n".join(["#version: 0.2", *MERGES, ""]))
        return
    vocab = {token: index for token, index in VOCAB.items() if token != END_OF_TEXT}
    model = {"type": "BPE", "vocab": vocab, "merges": [pair.split(" ") for pair in MERGES]}
    added = [{"content": END_OF_TEXT, "id": 260}]
    (folder / "tokenizer.json").write_text(json.dumps({"model": model, "added_tokens": added}))


@pytest.mark.parametrize("kind", ["two files", "one file"])
def test_byte_pairs_of_a_folder_merge_in_their_order(tmp_path, kind):
    write_files(tmp_path, kind)
    found = find_tokenizer(tmp_path, is_bytes=True, vocab_size=261)
    ids = found.encode("hello wé").tolist()
    assert ids == [258, VOCAB["o"], 259, *(VOCAB[ALPHABET[b]] for b in "é".encode())]
    assert found.decode([*ids, 260]) == "hello wé"
    assert found.encode(END_OF_TEXT).tolist() == [260]
    assert (found.start, found.ends) == (260, (260,))
    assert found.decode([258, 263]) == "hell"  # a padded vocabulary has ids of no text


def test_without_files_tokens_are_bytes_or_numbers(tmp_path):
    assert find_tokenizer(None, is_bytes=True, vocab_size=257) == Bytes(257)
    assert find_tokenizer(tmp_path, is_bytes=False, vocab_size=50257) == Ids()


@pytest.mark.parametrize(
    ("vocab", "merges", "message"),
    [
        (VOCAB, ["l l", "h e"], "do not follow the order of its merges"),
        (VOCAB, [*MERGES, "x y"], "do not follow the order of its merges"),
        ({k: v for k, v in VOCAB.items() if k != "a"}, MERGES, "lacks 1 single bytes"),
        ({k: v for k, v in VOCAB.items() if k != END_OF_TEXT}, MERGES, "lacks <|endoftext|>"),
    ],
)
def test_another_kind_of_tokenizer_is_refused(vocab, merges, message):
    with pytest.raises(ValueError, match=message.replace("|", r"\|")):
        byte_pairs(vocab, merges, name="folder")


def test_a_tokenizer_that_is_no_byte_pairs_is_refused(tmp_path):
    (tmp_path / "tokenizer.json").write_text(json.dumps({"model": {"type": "Unigram"}}))
    with pytest.raises(ValueError, match="is of type Unigram; GPT-2's tokenizer is BPE"):
        find_tokenizer(tmp_path, is_bytes=False, vocab_size=None)


@pytest.mark.parametrize(
    "change",
    [
        {"pre_tokenizer": {"type": "Sequence"}},
        {"pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": True}},
        {"pre_tokenizer": {"type": "ByteLevel", "use_regex": False}},
        {"normalizer": {"type": "NFC"}},
    ],
)
def test_a_tokenizer_that_splits_otherwise_is_refused(tmp_path, change):
    write_files(tmp_path, "one file")
    file = tmp_path / "tokenizer.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(ValueError, match=r"tokenizer\.json splits or changes text otherwise"):
        find_tokenizer(tmp_path, is_bytes=False, vocab_size=None)


def test_a_named_folder_without_a_tokenizer_is_refused(tmp_path):
    with pytest.raises(ValueError, match="has no tokenizer; name a folder with vocab.json"):
        find_tokenizer(tmp_path, is_bytes=True, vocab_size=None, must_have=True)


def test_without_tiktoken_the_message_says_how_to_get_it(monkeypatch):
    def missing(name):
        raise ImportError(name)

    monkeypatch.setattr(tokenizer.importlib, "import_module", missing)
    with pytest.raises(ValueError, match=r"needs tiktoken; run pip install 'jzero\[data\]'"):
        byte_pairs(VOCAB, MERGES, name="folder")
