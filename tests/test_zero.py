"""The public surface of Zero: placing, viewing, reporting, and what it refuses."""

import copy
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

import jzero
from jzero.trees import named_leaves
from tests import toys

EXPLICIT = pytest.mark.parametrize("is_explicit", [False, True])


def mesh_of(is_explicit, num_devices=8):
    devices = jax.devices()[:num_devices]
    if is_explicit:
        return jax.make_mesh((num_devices,), ("data",), devices=devices)
    return jzero.make_mesh(devices=devices)


def arrays():
    rng = np.random.default_rng(0)
    draw = lambda *shape: rng.normal(size=shape).astype(np.float32)
    return {"w": draw(13, 7), "b": draw(5), "s": draw(), "even": draw(8, 16)}


def square_loss(params, batch):
    out = batch @ params["w"] * params["s"]
    return (out**2).mean() + (params["b"] ** 2).sum() + (params["even"] ** 2).mean()


def batch(num_rows=16):
    return np.random.default_rng(1).normal(size=(num_rows, 13)).astype(np.float32)


# Placing.


@EXPLICIT
@pytest.mark.parametrize("num_devices", [3, 8])
def test_place_gives_each_device_its_shard_and_zeros_in_the_padding(is_explicit, num_devices):
    params = arrays()
    zero = jzero.Zero(mesh_of(is_explicit, num_devices), 3, like=params)
    placed = zero.place(params)
    for name, leaf in zero.layout().items():
        shapes = {shard.data.shape for shard in placed[name].addressable_shards}
        assert shapes == {leaf.shard_shape}
        whole = np.asarray(placed[name])
        logical = whole[tuple(slice(0, n) for n in leaf.shape)]
        assert (logical == params[name]).all()
        assert np.abs(whole).sum() == pytest.approx(np.abs(logical).sum())


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_parameters_are_logical_and_replicated_at_rest_below_stage_3(stage):
    placed = jzero.Zero(jzero.make_mesh(), stage).place(arrays())
    assert placed["w"].shape == (13, 7)
    assert all(x.sharding.is_fully_replicated for x in placed.values())


@pytest.mark.parametrize("stage", [1, 3])
def test_donating_what_was_placed_leaves_the_original_alive(stage):
    original = jax.tree.map(jnp.asarray, arrays())
    zero = jzero.Zero(jzero.make_mesh(), stage, like=original)
    double = jax.jit(lambda p: jax.tree.map(lambda x: 2 * x, p), donate_argnums=0)
    double(zero.place(zero.place(original)))
    assert toys.max_difference(original, arrays()) == 0


def test_place_takes_what_is_already_at_rest():
    zero = jzero.Zero(jzero.make_mesh(), 3, like=arrays())
    again = zero.place(zero.place(arrays()))
    assert toys.max_difference(zero.gather(again), arrays()) == 0


@pytest.mark.parametrize("stage", [1, 3])
def test_init_gives_the_same_values_on_every_mesh(stage):
    want = toys.Toy(jax.random.key(0))
    for num_devices in (1, 3, 8):
        zero = jzero.Zero(toys.data_mesh(num_devices), stage, like=want)
        got = zero.gather(zero.init(toys.Toy, jax.random.key(0)))
        rounding = 1e-7  # a product fused or not into the normal draw
        assert toys.max_difference(nnx.state(got), nnx.state(want)) <= rounding
        if num_devices == 1:
            first = got
        assert toys.max_difference(nnx.state(got), nnx.state(first)) == 0


def test_init_of_a_plain_tree_is_born_partitioned():
    zero = jzero.Zero(jzero.make_mesh(), 3, like=arrays())
    params = zero.init(lambda: jax.tree.map(jnp.asarray, arrays()))
    assert params["w"].shape == (13, 8)
    assert params["w"].sharding.spec == P(None, "data")
    assert toys.max_difference(zero.gather(params), arrays()) == 0


def test_initialisation_holds_its_shards_and_at_most_one_leaf():
    def init(key):
        keys = jax.random.split(key, 4)
        return {f"w{i}": jax.random.normal(k, (512, 256)) for i, k in enumerate(keys)}

    shapes = jax.eval_shape(init, jax.random.key(0))
    zero = jzero.Zero(jzero.make_mesh(), 3, like=shapes)
    memory = _memory(lambda key: zero.init(init, key), jax.random.key(0))
    leaf_bytes = 512 * 256 * 4
    assert memory.output_size_in_bytes == pytest.approx(4 * leaf_bytes / 8, rel=0.01)
    assert memory.temp_size_in_bytes <= leaf_bytes
    tx = zero.optimizer(optax.adam(1e-3))
    memory = _memory(tx.init, zero.init(init, jax.random.key(0)))
    assert memory.output_size_in_bytes == pytest.approx(2 * 4 * leaf_bytes / 8, rel=0.01)
    assert memory.temp_size_in_bytes <= leaf_bytes


def _memory(fn, *args):
    return jax.jit(fn).lower(*args).compile().memory_analysis()


# A training step keeps everything where it was.


@EXPLICIT
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("start", ["place", "init"])
def test_five_steps_change_no_layout_and_compile_once(start, stage, is_explicit):
    params = arrays()
    zero = jzero.Zero(mesh_of(is_explicit), stage, like=params)
    tx = zero.optimizer(optax.adamw(1e-3))
    value_and_grad = zero.value_and_grad(square_loss)

    @jax.jit
    def step(params, state, rows):
        loss, grads = value_and_grad(params, rows)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    make = functools.partial(jax.tree.map, jnp.asarray, params)
    params = zero.place(params) if start == "place" else zero.init(make)
    state = tx.init(params)
    before = _description((params, state))
    for _ in range(5):
        params, state, _ = jax.block_until_ready(step(params, state, batch()))
        assert _description((params, state)) == before
    assert step._cache_size() == 1


def _description(tree):
    leaves, treedef = named_leaves(tree)
    rows = {n: (x.shape, x.dtype, str(x.sharding), x.weak_type) for n, x in leaves.items()}
    return rows, treedef


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_gradients_are_cut_as_the_state_is(stage):
    zero = jzero.Zero(jzero.make_mesh(), stage, like=arrays())
    _, grads = zero.value_and_grad(square_loss)(zero.place(arrays()), batch())
    for name, leaf in zero.layout().items():
        assert {s.data.shape for s in grads[name].addressable_shards} == {leaf.shard_shape}
    want = jax.grad(square_loss)(arrays(), batch())
    assert toys.max_difference(zero.gather(grads), want) <= 1e-6
    padding = np.asarray(grads["w"])[:, 7:]
    assert padding.shape == (13, 1)
    assert (padding == 0).all()


def test_updates_and_views_work_outside_jit():
    params = arrays()
    zero = jzero.Zero(jzero.make_mesh(), 3, like=params)
    tx = zero.optimizer(optax.sgd(0.1))
    placed = zero.place(params)
    loss, grads = zero.value_and_grad(square_loss)(placed, batch())
    updates, _ = tx.update(grads, tx.init(placed), placed)
    got = zero.gather(optax.apply_updates(placed, updates))
    want = jax.tree.map(lambda p, g: p - 0.1 * g, params, jax.grad(square_loss)(params, batch()))
    assert toys.max_difference(got, want) <= 1e-6
    assert float(loss) == pytest.approx(float(square_loss(params, batch())), rel=1e-6)


# Viewing.


@EXPLICIT
def test_gather_returns_logical_replicated_arrays(is_explicit):
    params = arrays()
    zero = jzero.Zero(mesh_of(is_explicit), 3, like=params)
    full = zero.gather(zero.place(params))
    assert all(x.sharding.is_fully_replicated for x in full.values())
    assert toys.max_difference(full, params) == 0


def test_gather_of_a_part_returns_that_part():
    model = toys.Toy(jax.random.key(0))
    zero = jzero.Zero(jzero.make_mesh(), 3, like=model)
    placed = zero.place(model)
    part = zero.gather(placed, where="layers")
    assert sorted(part) == ["bias", "down", "up"]
    assert (np.asarray(part["up"]) == np.asarray(model.layers.up[...])).all()
    assert zero.gather(placed, where="table").shape == (toys.VOCAB, toys.DIM)
    with pytest.raises(ValueError, match="where='layer' names no part of the tree"):
        zero.gather(placed, where="layer")


@pytest.mark.parametrize("is_explicit", [False])
def test_logical_is_cut_and_costs_no_collective(is_explicit):
    params = arrays()
    zero = jzero.Zero(mesh_of(is_explicit), 3, like=params)
    tx = zero.optimizer(optax.adam(1e-3))
    state = tx.init(zero.place(params))
    logical = zero.logical(state)
    assert logical[0].mu["w"].shape == (13, 7)
    assert logical[0].mu["even"].sharding.spec == P("data")

    def norm_free(state):
        return jax.tree.map(lambda x: x * 2, zero.logical(state)[0].mu["even"])

    text = jax.jit(norm_free).lower(state).compile().as_text()
    assert not any(word in text for word in ("all-gather", "all-reduce", "all-to-all"))


def test_a_reader_of_state_works_through_logical():
    params = arrays()
    tx = optax.contrib.schedule_free_adamw(1e-2)
    zero = jzero.Zero(jzero.make_mesh(), 3, like=params)
    mine = zero.optimizer(tx)
    placed = zero.place(params)
    value_and_grad = zero.value_and_grad(square_loss)
    state, plain, want = mine.init(placed), tx.init(params), params
    for _ in range(3):
        updates, state = mine.update(value_and_grad(placed, batch())[1], state, placed)
        placed = optax.apply_updates(placed, updates)
        updates, plain = tx.update(jax.grad(square_loss)(want, batch()), plain, want)
        want = optax.apply_updates(want, updates)
    read = optax.contrib.schedule_free_eval_params
    got = read(zero.logical(state), zero.logical(placed))
    assert toys.max_difference(got, read(plain, want)) <= 1e-6


def test_a_tree_of_unknown_shapes_is_refused_and_like_mends_it():
    zero = jzero.Zero(jzero.make_mesh(), 1)
    with pytest.raises(ValueError, match=r"logical shapes of this tree are not known.*like="):
        zero.gather({"w": jnp.ones((16, 3))})
    got = zero.logical({"w": jnp.ones((16, 3))}, like={"w": jnp.ones((13, 3))})
    assert got["w"].shape == (13, 3)


def test_nothing_is_left_on_the_users_module():
    model = toys.Toy(jax.random.key(0))
    zero = jzero.Zero(jzero.make_mesh(), 3, like=model)
    placed = zero.place(model)
    zero.value_and_grad(toys.toy_loss)(placed, toys.toy_batches(1, 16)[0])
    nnx.Optimizer(placed, optax.adam(1e-3), wrt=nnx.Param)
    copy.deepcopy(placed)
    assert "table" in repr(placed)
    for module in (model, placed):
        for _, variable in nnx.iter_graph(module):
            if isinstance(variable, nnx.Variable):
                assert "on_get_value" not in variable.get_metadata()


# Reporting.


def test_report_names_each_leaf_left_whole_and_why():
    params = {**arrays(), "count": jnp.arange(8), "none": jnp.zeros((0, 4))}
    text = str(jzero.Zero(jzero.make_mesh(), 1, min_size=6).report(params, optax.adam(1e-3)))
    for words in ("a scalar", "below min_size 6", "an integer: not trained", "empty"):
        assert words in text


def test_report_says_how_parameters_are_read():
    model = toys.Toy(jax.random.key(0))
    zero = jzero.Zero(jzero.make_mesh(), 3, like=model)
    assert "no loss traced yet" in str(zero.report(model))
    zero.value_and_grad(toys.toy_loss)(zero.place(model), toys.toy_batches(1, 16)[0])
    notes = {row[0]: row[-1] for row in zero.report(model).rows()}
    assert notes["layers.up"] == "gathered where it is read"
    assert notes["table"] == "gathered whole, once a microbatch"


# What is refused, before any compile.


@pytest.mark.parametrize("stage", [4, -1, "2", True, 2.0, None])
def test_a_stage_other_than_0_to_3_is_refused(stage):
    with pytest.raises(ValueError, match=r"stage is .*; use the integer 0, 1, 2 or 3"):
        jzero.Zero(jzero.make_mesh(), stage)


def test_stage_3_without_like_is_refused():
    with pytest.raises(ValueError, match="stage 3 needs the logical shapes.*like=params"):
        jzero.Zero(jzero.make_mesh(), 3)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"min_size": -1}, "min_size is -1; give a number of elements"),
        ({"reduce_dtype": "int8"}, "reduce_dtype 'int8' is no dtype to compute in"),
        ({"state_axes": ("replica", "data")}, "differs from axes=.*not supported yet"),
        ({"like": {}}, "the parameter tree has no leaves"),
        ({"like": {"a": 1.0, "b": "x"}}, "a is float '1.0'; b is str 'x'; wrap numbers"),
    ],
)
def test_options_that_cannot_be_honoured_are_refused(options, words):
    with pytest.raises(ValueError, match=words):
        jzero.Zero(jzero.make_mesh(), 1, **options)


def test_a_mesh_that_is_none_is_refused():
    with pytest.raises(ValueError, match=r"mesh is tuple .*; pass a jax Mesh"):
        jzero.Zero((8,), 1)


@pytest.mark.parametrize("make", [jnp.asarray, np.asarray])
def test_parameters_off_an_explicit_mesh_are_refused_with_the_mend(make):
    params = jax.tree.map(make, arrays())
    zero = jzero.Zero(mesh_of(True), 1, like=params)
    with pytest.raises(
        ValueError, match=r"explicit axes, but b, even, s, w are not on its 8.*place"
    ):
        zero.value_and_grad(square_loss)(params, batch())


def test_parameters_that_differ_from_like_are_all_named():
    zero = jzero.Zero(jzero.make_mesh(), 3, like=arrays())
    wrong = {"w": np.ones((13, 6), np.float32), "b": arrays()["b"], "extra": np.ones(3)}
    for call in (zero.place, lambda p: zero.value_and_grad(square_loss)(p, batch())):
        with pytest.raises(ValueError, match="extra is unexpected.*s is missing.*w has shape"):
            call(wrong)


def test_update_without_params_is_refused():
    tx = jzero.Zero(jzero.make_mesh(), 1).optimizer(optax.sgd(0.1))
    with pytest.raises(ValueError, match=r"update needs the parameters.*tx\.update\(grads"):
        tx.update(arrays(), tx.init(arrays()))


def test_a_state_of_other_parameters_is_refused():
    tx = jzero.Zero(jzero.make_mesh(), 1).optimizer(optax.adam(0.1))
    other = {**arrays(), "w": np.ones((99, 3), np.float32)}
    with pytest.raises(ValueError, match=r"state does not belong.*0\.mu\.w has shape"):
        tx.update(arrays(), tx.init(other), arrays())


def test_gradients_of_other_shapes_are_refused():
    tx = jzero.Zero(jzero.make_mesh(), 1).optimizer(optax.adam(0.1))
    other = {**arrays(), "w": np.ones((99, 3), np.float32)}
    with pytest.raises(ValueError, match=r"grads does not match.*w has shape \(99, 3\)"):
        tx.update(other, tx.init(arrays()), arrays())


def test_what_is_no_transform_is_refused():
    with pytest.raises(ValueError, match="optimizer needs an optax transform"):
        jzero.Zero(jzero.make_mesh(), 1).optimizer(3e-4)


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_leaves_are_gathered_one_by_one_as_all_of_them_are(stage):
    params = arrays()
    zero = jzero.Zero(mesh_of(False), stage, like=params)
    placed = zero.place(params)
    leaves = zero.gather_leaves(placed)
    assert next(leaves)[0] == "b"
    for name, x in zero.gather_leaves(placed):
        np.testing.assert_array_equal(x, params[name])
        assert x.sharding.is_fully_replicated
