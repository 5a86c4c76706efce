"""jzero.tokens and jzero.data: what is read, in which order, and what is refused."""

import hashlib
import itertools
import re
import struct
import sysconfig
import threading
from pathlib import Path

import numpy as np
import pytest

from jzero.data import Batches, bigram_bits, prefetch
from jzero.tokens import (
    _stdlib_files,
    check_vocab,
    list_files,
    open_tokens,
    split,
    write_llmc_bin,
    write_nanogpt_bin,
)


def nanogpt(path, ids):
    write_nanogpt_bin(path, np.asarray(ids))
    return open_tokens(str(path))


def text(path, content):
    path.write_bytes(content)
    return open_tokens(str(path))


def refuses(*pieces):
    """The message holds each piece, in this order."""
    return pytest.raises(ValueError, match="(?s)" + ".*".join(map(re.escape, pieces)))


@pytest.fixture
def counting(tmp_path):
    """Ids 0 to 100: with seq_len 4, window i begins with 4 i."""
    return nanogpt(tmp_path / "counting.bin", range(101))


# --- files


def test_nanogpt_file_is_raw_little_endian_uint16(tmp_path):
    write_nanogpt_bin(tmp_path / "a.bin", [1, 258, 65535])
    assert (tmp_path / "a.bin").read_bytes() == b"\x01\x00\x02\x01\xff\xff"


def test_llmc_file_is_256_int32_of_header_then_uint16(tmp_path):
    write_llmc_bin(tmp_path / "a.bin", [1, 258, 65535])
    expected = struct.pack("<256i", 20240520, 1, 3, *[0] * 253) + b"\x01\x00\x02\x01\xff\xff"
    assert (tmp_path / "a.bin").read_bytes() == expected


@pytest.mark.parametrize(("write", "hint"), [(write_nanogpt_bin, None), (write_llmc_bin, 50257)])
def test_what_is_written_is_read_back(tmp_path, write, hint, monkeypatch):
    monkeypatch.setattr("jzero.tokens.CHUNK", 7)  # several pieces
    ids = np.random.default_rng(0).integers(0, 65536, 100)
    write(tmp_path / "a.bin", ids)
    tokens = open_tokens(str(tmp_path / "a.bin"))
    assert (tokens.size, tokens.vocab_size_hint, tokens[:].dtype) == (100, hint, np.int32)
    np.testing.assert_array_equal(tokens[:], ids)
    write(tmp_path / "again.bin", tokens)
    assert (tmp_path / "again.bin").read_bytes() == (tmp_path / "a.bin").read_bytes()


def test_llama3_file_is_read_as_uint32(tmp_path):
    header = struct.pack("<256i", 20240801, 7, 2, *[0] * 253)
    (tmp_path / "a.bin").write_bytes(header + struct.pack("<2I", 128000, 5))
    tokens = open_tokens(str(tmp_path / "a.bin"))
    assert (tokens[:].tolist(), tokens.vocab_size_hint) == ([128000, 5], 128256)


def test_text_file_is_its_bytes(tmp_path):
    content = "é\n".encode() + bytes(range(1, 256))
    tokens = text(tmp_path / "a.txt", content)
    assert bytes(tokens[:].astype(np.uint8)) == content
    assert tokens.vocab_size_hint == 256


def test_folder_of_texts_is_joined_by_relative_path_without_hidden_files(tmp_path):
    (tmp_path / "b").mkdir()
    (tmp_path / ".git").mkdir()
    files = {"c.txt": b"3", "a.md": b"1", "b/x.txt": b"2", "b.txt": b"", ".env": b"H"}
    for name, content in {**files, ".git/config": b"H"}.items():
        (tmp_path / name).write_bytes(content)
    assert open_tokens(str(tmp_path))[:].tolist() == list(b"123")


def test_binary_files_in_a_folder_are_skipped_and_counted(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"text")
    (tmp_path / "b.png").write_bytes(b"\x89PNG\x00")
    (tmp_path / "c.npy").write_bytes(b"NUMPY\x00")
    with pytest.warns(UserWarning, match="skipped 2 binary files"):
        assert open_tokens(str(tmp_path))[:].tolist() == list(b"text")


@pytest.mark.parametrize("path", ["", "*.bin", "shard_[01].bin"])
def test_folder_or_glob_of_shards_is_one_stream_of_both_formats(tmp_path, path):
    write_llmc_bin(tmp_path / "shard_1.bin", [4, 5])
    write_nanogpt_bin(tmp_path / "shard_0.bin", [1, 2, 3])
    tokens = open_tokens(str(tmp_path / path))
    assert tokens[:].tolist() == [1, 2, 3, 4, 5]
    assert tokens.vocab_size_hint is None  # unknown for nanoGPT's, so for both


def test_glob_leaves_folders_out_and_home_is_expanded(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "folder.bin").mkdir()
    write_nanogpt_bin(tmp_path / "a.bin", [7])
    assert open_tokens("~/*.bin")[:].tolist() == [7]


def test_every_slice_of_a_stream_over_files_equals_numpys(tmp_path):
    for name, content in [("a", b"012"), ("b", b""), ("c", b"3"), ("d", b"456789")]:
        (tmp_path / name).write_bytes(content)
    tokens, plain = open_tokens(str(tmp_path)), np.frombuffer(b"0123456789", np.uint8)
    for start, stop in itertools.product([None, *range(-12, 13)], repeat=2):
        np.testing.assert_array_equal(tokens[start:stop], plain[start:stop])
    train, val = split(tokens, 0.7)
    for start, stop in itertools.product([None, *range(-8, 9)], repeat=2):
        np.testing.assert_array_equal(train[start:stop], plain[:3][start:stop])
        np.testing.assert_array_equal(val[start:stop], plain[3:][start:stop])


def test_token_files_are_mapped_and_never_read_whole(tmp_path):
    with (tmp_path / "huge.bin").open("wb") as stream:
        stream.truncate(1 << 40)  # a sparse terabyte
    tokens = open_tokens(str(tmp_path / "huge.bin"))
    batches = Batches(tokens, seq_len=1024, global_batch_size=2, seed=0)
    assert (tokens.size, batches[0].shape) == (1 << 39, (2, 1025))


def test_stdlib_corpus_is_the_sources_in_hash_order_without_tests():
    root = Path(sysconfig.get_path("stdlib"))
    names = [file.relative_to(root).as_posix() for file in list_files("python-stdlib")]
    assert {"argparse.py", "json/decoder.py", "pydoc_data/topics.py"} <= set(names)
    folders = {part for name in names for part in name.split("/")[:-1]}
    assert not folders & {"site-packages", "dist-packages", "__pycache__"}
    assert not folders & {"test", "tests", "idle_test"}
    assert names == sorted(names, key=lambda name: hashlib.sha256(name.encode()).digest())


def test_stdlib_corpus_order_does_not_depend_on_where_python_lives(tmp_path):
    for root in ("one", "two"):
        for name in ("a.py", "b.py", "pkg/c.py", "pkg/d.py", "pkg/test/e.py", "notes.txt"):
            (tmp_path / root / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / root / name).write_text(name)
    one, two = (
        [f.relative_to(tmp_path / root).as_posix() for f in _stdlib_files(tmp_path / root)]
        for root in ("one", "two")
    )
    assert one == two
    assert sorted(one) == ["a.py", "b.py", "pkg/c.py", "pkg/d.py"] != one


def test_max_bytes_keeps_the_beginning():
    first = list_files("python-stdlib")[0].read_bytes()
    tokens = open_tokens("python-stdlib", max_bytes=100)
    assert tokens[:].tolist() == list(first[:100])
    assert open_tokens("python-stdlib").size > 5_000_000


# --- refusals of files


@pytest.mark.parametrize(
    ("name", "pieces"),
    [
        ("missing.txt", ("missing.txt", "does not exist", "give a text file")),
        ("*.bin", ("*.bin", "does not exist", "glob of .bin shards")),
        ("empty", ("empty", "holds no files", "give a text file")),
        ("empty.txt", ("empty.txt", "holds no bytes", "give a text file")),
        ("image.png", ("image.png", "is binary", "NULs", "give a text file")),
        ("empty_bin/a.bin", ("a.bin", "is empty", "leave it out")),
        ("odd/a.bin", ("a.bin", "3 bytes, an odd number", "name it .txt")),
        ("mixed", ("mixes token files (a.bin)", "(notes.txt)", "name one kind", "*.bin")),
    ],
)
def test_bad_path_is_refused(tmp_path, name, pieces):
    for folder in ("empty", "empty_bin", "odd", "mixed"):
        (tmp_path / folder).mkdir()
    (tmp_path / "empty.txt").touch()
    (tmp_path / "image.png").write_bytes(b"\x00")
    (tmp_path / "empty_bin" / "a.bin").touch()
    (tmp_path / "odd" / "a.bin").write_bytes(b"abc")
    (tmp_path / "mixed" / "a.bin").write_bytes(b"ab")
    (tmp_path / "mixed" / "notes.txt").write_bytes(b"ab")
    with refuses(*pieces):
        open_tokens(str(tmp_path / name))


def test_empty_path_is_not_the_working_directory():
    with refuses("data path is empty", "give a text file"):
        open_tokens("")


@pytest.mark.parametrize(
    ("header", "num_bytes", "pieces"),
    [
        ((20240520, 1, 4), 6, ("promises [4] tokens", "holds 3", "download it again")),
        ((20240520, 1, 2), 6, ("promises [2] tokens", "holds 3", "download it again")),
        ((20240520, 1, 2), 5, ("promises [2] tokens", "holds 2.5", "download it again")),
        ((20240520, 1, 0), 0, ("promises [0] tokens", "holds 0", "download it again")),
        ((20240801, 7, 3), 6, ("promises [3] tokens", "holds 1.5", "download it again")),
        ((20240520, 2, 3), 6, ("magic 20240520 with version [2], not 1", "version 1")),
        ((20240801, 1, 3), 12, ("magic 20240801 with version [1], not 7", "version 7")),
    ],
)
def test_llmc_header_that_contradicts_the_file_is_refused(tmp_path, header, num_bytes, pieces):
    content = struct.pack("<256i", *header, *[0] * 253) + b"\x01" * num_bytes
    (tmp_path / "a.bin").write_bytes(content)
    with refuses("a.bin", *pieces):
        open_tokens(str(tmp_path / "a.bin"))


def test_llmc_file_cut_within_its_header_is_refused(tmp_path):
    for num_ints in (1, 2, 3):
        content = struct.pack("<3i", 20240520, 1, 0)[: 4 * num_ints]
        (tmp_path / "a.bin").write_bytes(content)
        with refuses("a.bin", "again"):
            open_tokens(str(tmp_path / "a.bin"))


def test_cap_is_refused_where_it_means_nothing(tmp_path, counting):
    with refuses("max_bytes 10 caps texts", "leave it out"):
        open_tokens(str(counting.parts[0].path), max_bytes=10)
    with refuses("max_bytes 0 keeps nothing", "1 or more"):
        open_tokens("python-stdlib", max_bytes=0)


def test_python_without_sources_is_refused(tmp_path):
    with refuses("no .py sources below", str(tmp_path), "use a Python that ships them"):
        _stdlib_files(tmp_path)


@pytest.mark.parametrize("write", [write_nanogpt_bin, write_llmc_bin])
@pytest.mark.parametrize(
    ("ids", "pieces"),
    [
        ([1, 2, 65536], ("id 65536 at position 2", "does not fit uint16", "at most 65536 ids")),
        ([1, -1], ("id -1 at position 1", "does not fit uint16")),
        ([], ("no tokens to write", "at least one")),
        ([[1, 2]], ("int64(1, 2)", "one row of integer ids")),
        ([1.0], ("float64(1,)", "one row of integer ids")),
    ],
)
def test_ids_that_do_not_fit_are_refused_and_no_file_is_left(tmp_path, write, ids, pieces):
    with refuses("a.bin", *pieces):
        write(tmp_path / "a.bin", ids)
    assert list(tmp_path.iterdir()) == []


def test_position_of_a_bad_id_counts_from_the_start_of_the_stream(tmp_path, monkeypatch):
    monkeypatch.setattr("jzero.tokens.CHUNK", 4)
    with refuses("id 70000 at position 9"):
        write_nanogpt_bin(tmp_path / "a.bin", [1] * 9 + [70000])


def test_more_tokens_than_llmcs_header_counts_are_refused(tmp_path):
    with refuses(f"{2**31} tokens do not fit", "write shards"):
        write_llmc_bin(tmp_path / "a.bin", range(2**31))


# --- split, vocabulary, bigram


@pytest.mark.parametrize(("fraction", "num_val"), [(0.1, 10), (0.5, 50), (0.007, 1)])
def test_validation_is_the_end_of_the_stream(counting, fraction, num_val):
    train, val = split(counting, fraction)
    assert val[:].tolist() == list(range(101 - num_val, 101))
    assert train[:].tolist() == list(range(101 - num_val))


@pytest.mark.parametrize("fraction", [0.0, 1.0, -0.1, 0.001, 0.999, float("nan"), float("inf")])
def test_split_that_leaves_a_side_empty_is_refused(counting, fraction):
    with refuses(f"val_fraction {fraction} of 101 tokens", "between 0 and 1"):
        split(counting, fraction)


def test_vocabulary_check_names_file_position_id_and_need(tmp_path, monkeypatch):
    monkeypatch.setattr("jzero.tokens.CHUNK", 4)
    write_nanogpt_bin(tmp_path / "a.bin", [1, 2, 3])
    write_nanogpt_bin(tmp_path / "b.bin", [1, 2, 3, 1, 2, 3, 60, 1, 1, 99, 1, 1, 1])
    tokens = open_tokens(str(tmp_path))
    check_vocab(tokens, 100)
    with refuses(str(tmp_path / "b.bin"), "id 60 at position 6", "vocab_size 50", "100 or more"):
        check_vocab(tokens, 50)
    with refuses("id 99 at position 9", "vocab_size 99", "100 or more"):
        check_vocab(tokens, 99)


def test_vocabulary_check_stays_within_its_split(counting):
    train, val = split(counting, 0.5)
    check_vocab(train, 51)
    with refuses("id 51 at position 51", "101 or more"):
        check_vocab(val, 51)
    with refuses("id 50 at position 50", "set the model's vocab_size to 51"):
        check_vocab(train, 50)


def test_vocabulary_check_of_bytes_is_exact_at_255(tmp_path):
    tokens = text(tmp_path / "a.txt", b"a\xff")
    check_vocab(tokens, 256)
    with refuses("id 255 at position 1", "set the model's vocab_size to 256"):
        check_vocab(tokens, 255)


def test_vocabulary_check_sees_ids_beyond_int32(tmp_path):
    header = struct.pack("<256i", 20240801, 7, 2, *[0] * 253)
    (tmp_path / "a.bin").write_bytes(header + struct.pack("<2I", 1, 2**32 - 1))
    with refuses(f"id {2**32 - 1} at position 1"):
        check_vocab(open_tokens(str(tmp_path / "a.bin")), 128256)


def test_bigram_bits_equal_the_figure_by_hand(tmp_path):
    train, val = (
        nanogpt(tmp_path / "t.bin", [0, 1, 0, 1, 1]),
        nanogpt(tmp_path / "v.bin", [0, 1, 1, 0]),
    )
    # counts: 01 twice, 10 once, 11 once; smoothed p(1|0) = 3/4, p(1|1) = p(0|1) = 2/4
    assert bigram_bits(train, val, 2) == pytest.approx((np.log2(4 / 3) + 1 + 1) / 3, abs=1e-12)


def test_bigram_bits_do_not_depend_on_the_chunk(tmp_path, monkeypatch):
    train, val = split(text(tmp_path / "a.txt", b"the cat sat on the mat. " * 20), 0.2)
    whole = bigram_bits(train, val)
    monkeypatch.setattr("jzero.tokens.CHUNK", 7)
    monkeypatch.setattr("jzero.data.CHUNK", 7)
    assert bigram_bits(train, val) == whole < 8


def test_bigram_refuses_what_it_cannot_count(counting, tmp_path):
    with refuses("vocab_size 50257", "bytes (256)"):
        bigram_bits(counting, counting, 50257)
    with refuses("id 100 at position 100", "101 or more"):
        bigram_bits(counting, counting, 100)
    with refuses("val has 1 token", "raise val_fraction"):
        bigram_bits(counting, nanogpt(tmp_path / "one.bin", [1]))


# --- batches


def starts(batches, num_steps):
    return np.concatenate([batches[step][:, 0] // 4 for step in range(num_steps)]).tolist()


def test_window_overlaps_the_next_by_its_last_target(counting):
    batches = Batches(counting, seq_len=4, global_batch_size=2, seed=0, shuffle=False)
    assert batches[0].tolist() == [[0, 1, 2, 3, 4], [4, 5, 6, 7, 8]]
    assert batches[0].dtype == np.int32


@pytest.mark.parametrize(("num_tokens", "num_windows"), [(100, 24), (101, 25), (104, 25)])
def test_window_without_its_last_target_is_left_out(tmp_path, num_tokens, num_windows):
    tokens = nanogpt(tmp_path / "a.bin", range(num_tokens))
    batches = Batches(tokens, seq_len=4, global_batch_size=1, seed=0)
    assert sorted(starts(batches, len(batches))) == list(range(num_windows))


def test_each_window_comes_once_an_epoch_and_epochs_differ_in_order(counting):
    batches = Batches(counting, seq_len=4, global_batch_size=5, seed=3)
    assert len(batches) == 5
    order = starts(batches, 15)
    epochs = [order[:25], order[25:50], order[50:]]
    assert all(sorted(epoch) == list(range(25)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs} | {tuple(range(25))}) == 4


def test_epochs_follow_without_a_gap_where_the_batch_does_not_divide_them(counting):
    batches = Batches(counting, seq_len=4, global_batch_size=7, seed=3)
    assert len(batches) == 3
    order = starts(batches, 25)
    assert all(sorted(order[i : i + 25]) == list(range(25)) for i in range(0, 175, 25))


def test_data_smaller_than_a_batch_repeats_within_it(tmp_path):
    batches = Batches(nanogpt(tmp_path / "a.bin", range(9)), seq_len=4, global_batch_size=3, seed=0)
    assert len(batches) == 1
    assert sorted(starts(batches, 2)) == [0, 0, 0, 1, 1, 1]


def test_batch_is_a_function_of_seed_and_step_alone(counting):
    def make(seed=7):
        return Batches(counting, seq_len=4, global_batch_size=6, seed=seed)

    forward = [make()[step] for step in range(10)]
    batches = make()
    for step in (9, 0, 5, 5, 3):
        np.testing.assert_array_equal(batches[step], forward[step])
    assert starts(make(8), 10) != starts(make(), 10)


def test_order_of_a_seed_is_frozen(counting):
    batches = Batches(counting, seq_len=4, global_batch_size=5, seed=0)
    assert starts(batches, 1) == [15, 4, 10, 19, 8]


@pytest.mark.parametrize("num_processes", [1, 2, 3, 6])
def test_shares_of_the_processes_make_the_single_process_batch(counting, num_processes):
    def make(**kwargs):
        return Batches(counting, seq_len=4, global_batch_size=6, seed=1, **kwargs)

    shares = [make(process_index=i, num_processes=num_processes) for i in range(num_processes)]
    for step in (0, 4, 11):
        parts = [share[step] for share in shares]
        assert all(part.shape == (6 // num_processes, 5) for part in parts)
        np.testing.assert_array_equal(np.concatenate(parts), make()[step])


def test_iterating_gives_one_epoch(counting):
    batches = Batches(counting, seq_len=4, global_batch_size=5, seed=3)
    epoch = list(batches)
    assert len(epoch) == 5
    np.testing.assert_array_equal(np.stack(epoch), np.stack([batches[i] for i in range(5)]))


def test_prefetch_yields_the_batches_from_its_start_step(counting):
    batches = Batches(counting, seq_len=4, global_batch_size=6, seed=1)
    for step, batch in zip(range(13, 40), prefetch(batches, 13), strict=False):
        np.testing.assert_array_equal(batch, batches[step])


class Recorder(Batches):
    """Notes each step read, and fails at step 9."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.fifth = threading.Event()

    def __getitem__(self, step):
        if step == 5:
            self.fifth.set()
        if step == 9:
            raise OSError("disk gone at step 9")
        return super().__getitem__(step)


def test_prefetch_reads_ahead_of_the_consumer(counting):
    batches = Recorder(counting, seq_len=4, global_batch_size=6, seed=1)
    ahead = prefetch(batches, 3)
    next(ahead)  # step 3
    assert batches.fifth.wait(timeout=30)


def test_prefetch_raises_what_reading_raised_at_its_step(counting):
    ahead = prefetch(Recorder(counting, seq_len=4, global_batch_size=6, seed=1), 7)
    assert [next(ahead).shape for _ in range(2)] == [(6, 5), (6, 5)]
    with pytest.raises(OSError, match="disk gone at step 9"):
        next(ahead)


@pytest.mark.parametrize(
    ("change", "pieces"),
    [
        ({"seq_len": 101}, ("seq_len 101 needs at least 102 tokens", "has 101", "1 to 100")),
        ({"seq_len": 0}, ("seq_len 0 needs", "1 to 100")),
        ({"global_batch_size": 0}, ("global_batch_size 0", "1 or more")),
        ({"global_batch_size": 6, "num_processes": 4}, ("6 is not divisible", "4; use 4 or 8")),
        ({"global_batch_size": 3, "num_processes": 4}, ("3 is not divisible", "4; use 4")),
        ({"process_index": 2, "num_processes": 2}, ("process_index 2", "0 to num_processes - 1")),
        ({"process_index": -1}, ("process_index -1", "0 to num_processes - 1")),
        ({"num_processes": 0}, ("num_processes 0", "0 to num_processes - 1")),
        ({"seed": -1}, ("seed -1 is out of range", "0 to 4294967295")),
        ({"seed": 2**32}, ("seed 4294967296 is out of range", "0 to 4294967295")),
    ],
)
def test_bad_batch_settings_are_refused(counting, change, pieces):
    with refuses(*pieces):
        Batches(counting, **{"seq_len": 4, "global_batch_size": 4, "seed": 0, **change})


def test_longest_sequence_that_the_data_holds_is_one_window(counting):
    batches = Batches(counting, seq_len=100, global_batch_size=1, seed=0)
    assert batches[0].tolist() == [list(range(101))]


def test_negative_steps_are_refused(counting):
    batches = Batches(counting, seq_len=4, global_batch_size=4, seed=0)
    with refuses("step -1 is negative", "count from 0"):
        batches[-1]
    with refuses("start_step -1 is negative", "count from 0"):
        prefetch(batches, -1)


def test_tokens_are_taken_by_slices_alone(counting):
    with pytest.raises(
        TypeError, match=re.escape("tokens[3] is not a slice; use tokens[i : i + 1]")
    ):
        counting[3]
    with refuses("step 2", "[::2]"):
        counting[::2]
