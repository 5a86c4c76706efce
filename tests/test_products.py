"""Matrix products in an update: what they send, and what the report says of it."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding

import jzero
from jzero.ledger import collectives
from jzero.products import gram_roots, has_only_local_ops, with_pinned_matrices
from tests import toys

LR = 1e-2
DIM = 16
SMALL = 64  # scalars such as norms, which are all-reduced


def stack(num_layers):
    draw = lambda *shape: np.random.default_rng(len(shape)).normal(size=shape).astype(np.float32)
    layers = {"down": draw(num_layers, 2 * DIM, DIM), "up": draw(num_layers, DIM, 2 * DIM)}
    return {"h": layers | {"bias": draw(num_layers, 2 * DIM)}, "wte": draw(64, DIM)}


def muon(**options):
    return optax.contrib.muon(LR, muon_weight_dimension_numbers=only_layers, **options)


def only_layers(tree):
    dims = optax.contrib.MuonDimensionNumbers(1, 2)
    return jax.tree.map(lambda x: dims if x.ndim == 3 else None, tree)


def compiled_update(zero, tx, tree):
    """Collectives of one update with gradients cut as `value_and_grad` gives them."""
    mine = zero.optimizer(tx)
    zero.value_and_grad(lambda p, b: 0.0)
    state = zero.abstract(jax.eval_shape(mine.init, tree))
    rows = zero.layout(tree).values()
    grads = [
        jax.ShapeDtypeStruct(
            leaf.rest_shape, leaf.dtype, sharding=NamedSharding(zero.mesh, leaf.spec(("data",)))
        )
        for leaf in rows
    ]
    grads = jax.tree.unflatten(jax.tree.structure(tree), grads)
    lowered = jax.jit(mine.update).lower(grads, state, zero.abstract(tree))
    return collectives(lowered.compile()).check()


def large(rows):
    return [row for row in rows if row.elements > SMALL]


def sizes(tree, *names):
    leaves = tree["h"] | {"wte": tree["wte"]}
    return sum(leaves[name].size for name in names)


PRECONDITIONED = [{}, {"preconditioning": "aol"}, {"ns_coeffs": "dion"}]


@pytest.mark.parametrize("options", PRECONDITIONED, ids=str)
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_muon_gathers_each_matrix_once_where_shards_do_not_divide_the_layers(stage, options):
    tree = stack(3)
    rows = compiled_update(jzero.Zero(jzero.make_mesh(), stage, like=tree), muon(**options), tree)
    updates = sizes(tree, "up", "down", "bias", "wte") if stage < 3 else 0
    assert {row.kind for row in large(rows)} == {"all-gather"}
    gathered = sum(row.elements * row.times for row in large(rows))
    assert gathered == sizes(tree, "up", "down") + updates


@pytest.mark.parametrize("stage", [1, 3])
def test_muon_swaps_layers_for_shards_where_shards_divide_the_layers(stage):
    tree = stack(8)
    rows = compiled_update(jzero.Zero(jzero.make_mesh(), stage, like=tree), muon(), tree)
    swapped = [row for row in rows if row.kind == "all-to-all"]
    assert sum(row.elements for row in swapped) == 2 * sizes(tree, "up", "down") / 8
    gathered = [row for row in large(rows) if row.kind == "all-gather"]
    updates = sizes(tree, "up", "down", "bias", "wte") if stage == 1 else 0
    assert sum(row.elements for row in gathered) == updates
    assert len(large(rows)) == len(swapped) + len(gathered)


@pytest.mark.parametrize("num_layers", [8, 16])
def test_layers_cut_between_layers_leave_muon_the_gather_of_updates_alone(num_layers):
    tree = stack(num_layers)
    zero = jzero.Zero(jzero.make_mesh(), 1, like=tree, cut_layers=True)
    assert {leaf.dim for name, leaf in zero.layout().items() if name.startswith("h.")} == {0}
    rows = large(compiled_update(zero, muon(), tree))
    assert {row.kind for row in rows} == {"all-gather"}
    assert all("shard_map/param[" in row.op_name for row in rows)
    assert all(row.op_name.endswith("/all_gather") and row.parameter for row in rows)
    assert sum(row.elements for row in rows) == sizes(tree, "up", "down", "bias", "wte")


def test_training_with_layers_cut_between_layers_equals_plain_optax():
    with jax.enable_x64(True):
        tree = jax.tree.map(lambda x: jnp.asarray(x, float), stack(8))
        zero = jzero.Zero(jzero.make_mesh(), 1, like=tree, cut_layers=True)
        batch = np.random.default_rng(0).integers(0, 64, (16,))
        want = trained(jax.value_and_grad(loss), muon(), tree, batch)
        got = trained(zero.value_and_grad(loss), zero.optimizer(muon()), zero.place(tree), batch)
        assert toys.max_difference(got[0], want[0]) <= 1e-10 * LR
        shard = optax.tree.get(got[1], "mu", filtering=lambda path, _: "muon" in str(path))
        assert shard["h"]["up"].addressable_shards[0].data.shape == (1, DIM, 2 * DIM)


def loss(params, tokens):
    layers = params["h"]
    x = params["wte"][tokens]
    for up, bias, down in zip(layers["up"], layers["bias"], layers["down"], strict=True):
        x = x + jnp.tanh(0.1 * x @ up + bias[None]) @ down
    return (x**2).mean()


def trained(value_and_grad, tx, params, batch):
    @jax.jit
    def step(params, state):
        _, grads = value_and_grad(params, batch)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    state = tx.init(params)
    for _ in range(3):
        params, state = jax.block_until_ready(step(params, state))
    return params, state


def test_the_gradients_of_layers_cut_between_layers_are_reduce_scattered_there():
    tree = stack(8)
    zero = jzero.Zero(jzero.make_mesh(), 1, like=tree, cut_layers=True)
    grad_fn = jax.jit(zero.value_and_grad(loss))
    lowered = grad_fn.lower(zero.abstract(tree), jax.ShapeDtypeStruct((16,), jnp.int32))
    rows = large(collectives(lowered.compile()).check())
    assert {row.kind for row in rows} == {"reduce-scatter"}
    grads = jax.tree.map(lambda x: x.sharding.spec, grad_fn(zero.place(tree), np.zeros(16, int))[1])
    assert grads["h"]["up"][0] == "data"


# The report.


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_the_report_adds_what_the_compiled_update_sends_besides_the_gather_of_updates(stage):
    tree = stack(3)
    zero = jzero.Zero(jzero.make_mesh(), stage, like=tree)
    rows = compiled_update(zero, muon(), tree)
    law = sum(leaf.rest_size for leaf in zero.layout().values()) * 4 * 7 / 8 if stage < 3 else 0
    report = zero.report(tree, muon())
    assert report.update_bytes == pytest.approx(rows.sent_bytes - law, abs=1)
    assert (
        report.update_bytes is not None
        and report.update_bytes >= sizes(tree, "up", "down") * 4 * 7 / 8
    )


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("name", ["adamw", "lamb", "lion", "adafactor", "novograd"])
def test_element_wise_updates_and_norms_add_nothing_and_compile_nothing(stage, name, monkeypatch):
    monkeypatch.setattr("jzero.sent.collectives", lambda text: pytest.fail("compiled"))
    tree = stack(3)
    tx = optax.chain(optax.clip_by_global_norm(1.0), getattr(optax, name)(LR))
    report = jzero.Zero(jzero.make_mesh(), stage, like=tree).report(tree, tx)
    assert report.update_bytes == 0
    assert ("the update adds", "0 B", "0 if element-wise") in report.totals()


@pytest.mark.parametrize("policy", ["bfloat16", "float16"])
def test_master_weights_and_loss_scales_add_nothing(policy, monkeypatch):
    monkeypatch.setattr("jzero.sent.collectives", lambda text: pytest.fail("compiled"))
    tree = jax.tree.map(lambda x: x.astype(policy), stack(3))
    tx = jzero.with_policy(optax.adamw(LR), jzero.policy(policy))
    assert jzero.Zero(jzero.make_mesh(), 1, like=tree).report(tree, tx).update_bytes == 0


def test_muon_cut_between_layers_adds_no_more_than_scalars():
    tree = stack(8)
    zero = jzero.Zero(jzero.make_mesh(), 1, like=tree, cut_layers=True)
    whole = jzero.Zero(jzero.make_mesh(), 1, like=tree)
    adds = [z.report(tree, muon()).update_bytes or 0 for z in (zero, whole)]
    assert adds[0] <= 2 * SMALL * 4
    assert adds[1] >= 2 * sizes(tree, "up", "down") / 8 * 4 * 7 / 8


def test_what_an_update_with_more_arguments_adds_is_not_known():
    tree = stack(3)
    report = jzero.Zero(jzero.make_mesh(), 1, like=tree).report(tree, optax.polyak_sgd())
    assert report.update_bytes is None
    assert ("the update adds", "not known", "0 if element-wise") in report.totals()


# The jaxpr.


def pinned_shapes(fn, *args):
    seen = []
    wrapped = with_pinned_matrices(fn, lambda x, dims: seen.append((x.shape, dims)) or x)
    got, want = jax.jit(wrapped)(*args), fn(*args)
    assert toys.max_difference(got, want) == 0
    return seen


@pytest.mark.parametrize(
    ("name", "fn"),
    [
        ("plain", lambda x: x @ x.T),
        ("transposed", lambda x: x.T @ x),
        ("called", lambda x: jax.jit(lambda y: y @ y.T)(2 * x)),
        ("scan", lambda x: jax.lax.scan(lambda c, _: (c @ c.T @ c, None), x, length=2)[0]),
        ("fori", lambda x: jax.lax.fori_loop(0, jnp.int32(2), lambda i, c: c @ c.T @ c, x)),
        ("cond", lambda x: jax.lax.cond(x[0, 0] > 0, lambda c: c @ c.T, lambda c: c @ c.T, x)),
    ],
)
def test_a_matrix_multiplied_with_itself_is_pinned_and_no_number_changes(name, fn):
    x = jnp.asarray(np.random.default_rng(0).normal(size=(3, 5)) / 5, jnp.float32)
    assert ((3, 5), ()) in pinned_shapes(fn, x), name


def test_batch_dims_are_told_through_transposes():
    gram = jax.vmap(lambda x: x.T @ x, in_axes=1)
    assert ((3, 2, 5), (1,)) in pinned_shapes(gram, jnp.ones((3, 2, 5)))


@pytest.mark.parametrize("fn", [lambda x: x.ravel() @ x.ravel(), lambda x: x @ jnp.ones((5, 2))])
def test_dot_products_and_other_products_are_left_to_xla(fn):
    assert pinned_shapes(fn, jnp.ones((3, 5))) == []


def test_only_arrays_of_some_size_make_an_op_not_local():
    jaxpr = jax.make_jaxpr(lambda x: jnp.sort(x * 2))(jnp.ones(8)).jaxpr
    assert has_only_local_ops(jaxpr, 9)
    assert not has_only_local_ops(jaxpr, 8)
    assert not gram_roots(jaxpr)
