"""Arrays on disk have logical shapes, and no damage to them goes unseen."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jzero.arrays import (
    MAX_NAME,
    StoredArrays,
    StoredLeaf,
    chunk_shape,
    chunks,
    folder_name,
    pieces_of,
    pieces_of_source,
    write_arrays,
)
from jzero.mesh import make_mesh
from jzero.source import Renamed, whole


def placed(x, *spec):
    return jax.device_put(x, NamedSharding(make_mesh(), P(*spec)))


def stored(folder, **pieces):
    write_arrays(folder, pieces)
    return StoredArrays(folder, {name: x.leaf for name, x in pieces.items()})


@pytest.fixture
def padded(tmp_path):
    """Thirteen logical rows of sixteen, over eight devices."""
    x = np.arange(80, dtype=np.float32).reshape(16, 5)
    return x[:13], stored(tmp_path, x=pieces_of(placed(x, "data"), (13, 5)))


def test_what_is_stored_has_the_logical_shape_and_no_padding(padded):
    x, arrays = padded
    assert arrays.leaves["x"].shape == (13, 5)
    np.testing.assert_array_equal(arrays.read("x", whole((13, 5))), x)


def test_any_piece_is_read_across_the_edges_of_shards(padded):
    x, arrays = padded
    np.testing.assert_array_equal(arrays.read("x", (slice(3, 12), slice(1, 4))), x[3:12, 1:4])


@pytest.mark.parametrize(
    "dtype", ["float64", "float32", "float16", "bfloat16", "int32", "uint32", "bool", "complex64"]
)
def test_every_dtype_comes_back_bit_for_bit_zeros_and_empty_arrays_too(tmp_path, dtype):
    with jax.enable_x64(dtype == "float64"):
        values = {
            "x": jnp.asarray(np.arange(12).reshape(3, 4) % 5 - 2, dtype),
            "zeros": jnp.zeros((2, 3), dtype),
            "empty": jnp.zeros((0, 3), dtype),
            "scalar": jnp.ones((), dtype),
        }
        pieces = {n: pieces_of(placed(x), x.shape) for n, x in values.items()}
    arrays = stored(tmp_path, **pieces)
    for name, x in values.items():
        got = arrays.read(name, whole(x.shape))
        assert got.dtype == x.dtype
        assert got.tobytes() == np.asarray(x).tobytes()


def test_a_typed_key_is_stored_as_its_data_with_its_implementation(tmp_path):
    key = placed(jax.random.key(3))
    pieces = pieces_of(key, ())
    assert pieces.leaf.key_impl == "threefry2x32"
    data = stored(tmp_path, key=pieces).read("key", whole(pieces.leaf.shape))
    np.testing.assert_array_equal(data, jax.random.key_data(key))


def test_what_is_copied_to_the_host_does_not_change_when_the_device_reuses_its_memory():
    x = placed(jnp.arange(64.0).reshape(8, 8), "data")
    pieces = pieces_of(x, (8, 8))
    jax.block_until_ready(jax.jit(lambda x: x * 0 - 1, donate_argnums=0)(x))
    got = np.concatenate([part for _, part in pieces.parts])
    np.testing.assert_array_equal(got, np.arange(64.0).reshape(8, 8))


def test_each_part_of_a_replicated_array_is_written_once():
    assert len(list(pieces_of(placed(jnp.ones((8, 2))), (8, 2)).parts)) == 1
    assert len(list(pieces_of(placed(jnp.ones((8, 2)), "data"), (8, 2)).parts)) == 8


def test_a_flipped_byte_is_found_and_its_array_and_file_are_named(padded):
    _, arrays = padded
    (file,) = arrays.directory.glob("x/c/2/0")
    content = bytearray(file.read_bytes())
    content[7] ^= 1
    file.write_bytes(content)
    (fault,) = arrays.damaged("x")
    assert "x in " in fault
    assert str(file) in fault
    with pytest.raises(ValueError, match="Digest mismatch"):
        arrays.read("x", whole((13, 5)))
    arrays.read("x", (slice(0, 4), slice(0, 5)))  # what is elsewhere is still read


def test_a_file_that_is_gone_is_an_error_and_never_zeros(padded):
    _, arrays = padded
    next(arrays.directory.glob("x/c/3/0")).unlink()
    assert "missing" in arrays.damaged("x")[0]
    with pytest.raises(ValueError, match=r"x in .*is missing"):
        arrays.read("x", whole((13, 5)))


@pytest.mark.parametrize(
    ("shard", "cut", "chunk"),
    [
        ((64, 64), [False, False], (16, 64)),  # a dim that one process has, in any pieces
        ((12, 256), [True, False], (4, 256)),  # even pieces of a shard
        ((127, 64), [True, False], (127, 8)),  # a prime is not cut into single rows
        ((0, 4), [True, False], (1, 4)),
        ((), [], ()),
    ],
)
def test_files_are_of_at_most_about_the_limit_and_end_where_shards_do(shard, cut, chunk):
    assert chunk_shape(shard, cut, 4, limit=4096) == chunk


def test_chunks_cover_an_array_once():
    leaf = StoredLeaf((5, 3), "int32", (2, 2))
    count = np.zeros((5, 3), int)
    for index in chunks(leaf):
        count[index] += 1
    assert (count == 1).all()


def test_a_source_is_written_chunk_by_chunk(tmp_path):
    """Nothing is read before it is written, and never more than a chunk."""
    seen = []

    class Rows:
        leaves = {"w": jax.ShapeDtypeStruct((3 << 20, 4), jnp.int32)}  # noqa: RUF012

        def read(self, name, index):
            seen.append(index[0].stop - index[0].start)
            rows = np.arange(index[0].start, index[0].stop, dtype=np.int32)
            return np.repeat(rows[:, None], 4, axis=1)

    pieces = pieces_of_source(Renamed(Rows(), {"v": "w"}), "v")
    assert seen == []
    arrays = stored(tmp_path, v=pieces)
    assert max(seen) <= 1 << 19
    assert arrays.read("v", (slice(2500000, 2500001), slice(0, 4))).tolist() == [[2500000] * 4]


def test_a_name_too_long_for_a_file_system_is_shortened_and_stays_its_own():
    names = {folder_name("a" * 300 + end) for end in "xy"}
    assert len(names) == 2
    assert max(map(len, names)) <= MAX_NAME


def test_a_folder_that_cannot_be_written_is_an_os_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        write_arrays(tmp_path / "file", {"x": pieces_of(placed(jnp.ones(3)), (3,))})
