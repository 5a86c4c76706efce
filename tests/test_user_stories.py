"""Users' own training loops (a script, Linen, plain functions, NNX) under ZeRO, few lines changed.

Each is trained beside the same loop in plain optax on one device. What is sent is read from the
compiled step, which also runs it: a compiled step refuses parameters or state that have drifted.
"""

import copy
import functools
import re
import runpy
import sys
from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState
from jax.core import Tracer

import jzero
from jzero.ledger import Ledger, collectives
from jzero.trees import named_leaves

SCRIPTS = Path(__file__).parents[1] / "scripts"
NUM_DEVICES = 8
VOCAB, DIM, HIDDEN, NUM_LAYERS = 29, 10, 21, 3  # nothing divides by 8
LR, STEPS = 1e-2, 4
LOSS_TOLERANCE = 1e-5  # float32 sums in another order
PARAM_TOLERANCE = 0.02 * LR  # Adam divides rounding by small moments: a share of the step
STAGES = pytest.mark.parametrize("stage", [1, 2, 3])
READS = pytest.mark.parametrize("has_block_params", [True, False], ids=["block_params", "bare"])


def make_tx():
    return optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(LR, eps=1e-4))


def make_batches():
    rng = np.random.default_rng(0)
    return [rng.integers(VOCAB, size=(2 * NUM_DEVICES, 7), dtype=np.int32) for _ in range(STEPS)]


def cross_entropy(logits, batch):
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch[:, 1:]).mean()


def train_alone(params, loss_fn):
    """Losses and parameters of plain optax on one device."""
    tx = make_tx()
    opt_state, losses = tx.init(params), []

    @jax.jit
    def step(params, opt_state, batch):
        loss, grads = jax.value_and_grad(loss_fn)(params, batch)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    for batch in make_batches():
        params, opt_state, loss = step(params, opt_state, batch)
        losses.append(float(loss))
    return losses, params


def assert_same_training(losses, params, want):
    np.testing.assert_allclose(losses, want[0], rtol=0, atol=LOSS_TOLERANCE)
    got, want = named_leaves(params)[0], named_leaves(want[1])[0]
    assert got.keys() == want.keys()
    for name, x in got.items():
        np.testing.assert_allclose(x, want[name], rtol=0, atol=PARAM_TOLERANCE, err_msg=name)


def sent(text, kind, *, in_loop):
    """Elements of what one collective moves in a step, in or outside of loops."""
    rows = tuple(row for row in collectives(text).check() if row.in_loop == in_loop)
    return round(Ledger(rows).wire(kind) * NUM_DEVICES / (NUM_DEVICES - 1))


def assert_law(text, layout, stage, *, is_read_in_loop):
    """Layers travel inside the loop where they are read there, everything else outside it."""
    sizes = {name: leaf.rest_size for name, leaf in layout.items()}
    layers = sum(size for name, size in sizes.items() if name.startswith("layers."))
    rest = sum(sizes.values()) - layers
    reduced = layers if is_read_in_loop else 0
    gathered = layers if is_read_in_loop and stage == 3 else 0
    assert sent(text, "reduce-scatter", in_loop=True) == reduced
    assert sent(text, "reduce-scatter", in_loop=False) == layers + rest - reduced
    # Forward and backward; the last bias of a layer is not needed backward.
    assert 1.9 * gathered <= sent(text, "all-gather", in_loop=True) <= 2 * gathered
    assert sent(text, "all-gather", in_loop=False) == layers + rest - gathered
    assert sent(text, "all-to-all", in_loop=True) + sent(text, "all-to-all", in_loop=False) == 0
    assert sent(text, "all-reduce", in_loop=True) == 0  # none of a gradient: the loss is outside


def notes(zero, params):
    """What the report says of each parameter of the layers."""
    return {row[-1] for row in zero.report(params).rows() if row[0].startswith("layers.")}


def assert_reported(zero, params, stage, *, is_read_in_loop):
    verb = "gathered" if stage == 3 else "reduced"
    if is_read_in_loop:
        assert notes(zero, params) == {f"{verb} where it is read"}
    else:
        (note,) = notes(zero, params)
        assert f"{verb} whole, outside its layers" in note
        assert "block_params" in note


# A script: scripts/train_flax.py and the diff beside it.


def read_diff():
    """Hunks of scripts/train_flax.diff, as (text before, text after)."""
    lines = (SCRIPTS / "train_flax.diff").read_text().splitlines(keepends=True)
    assert [line.split()[0] for line in lines[:2]] == ["---", "+++"]
    for hunk in re.split(r"^@@.*\n", "".join(lines[2:]), flags=re.MULTILINE)[1:]:
        marked = hunk.splitlines(keepends=True)
        yield tuple("".join(x[1:] for x in marked if x[0] in kinds) for kinds in (" -", " +"))


def patched_script(stage):
    text = (SCRIPTS / "train_flax.py").read_text()
    for before, after in read_diff():
        assert text.count(before) == 1, f"the diff no longer applies: {before}"
        text = text.replace(before, after)
    assert text.count("stage=2") == 1
    return text.replace("stage=2", f"stage={stage}")


def printed_losses(path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [str(path), "--steps", "12"])
    jax.config.update("jax_disable_most_optimizations", True)  # compiles faster
    try:
        runpy.run_path(str(path), run_name="__main__")
    finally:
        jax.config.update("jax_disable_most_optimizations", False)
    losses = [float(x) for x in re.findall(r"loss (\d+\.\d{6})$", capsys.readouterr().out, re.M)]
    assert len(losses) == 3
    return losses


def test_the_diff_changes_at_most_five_lines_of_a_script_that_knows_nothing_of_jzero():
    lines = (SCRIPTS / "train_flax.diff").read_text().splitlines()[2:]
    assert 0 < sum(line.startswith("+") for line in lines) <= 5
    assert sum(line.startswith("-") for line in lines) <= 5
    assert "import jzero" not in (SCRIPTS / "train_flax.py").read_text()


def test_the_script_with_the_diff_prints_the_same_losses_at_every_stage(
    tmp_path, monkeypatch, capsys
):
    want = printed_losses(SCRIPTS / "train_flax.py", monkeypatch, capsys)
    assert want[-1] < want[0] - 0.3
    for stage in (1, 2, 3):
        path = tmp_path / f"stage_{stage}.py"
        path.write_text(patched_script(stage))
        got = printed_losses(path, monkeypatch, capsys)
        np.testing.assert_allclose(got, want, rtol=0, atol=LOSS_TOLERANCE)


# Linen: a TrainState, layers scanned and recomputed.


class LinenBlock(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        h = nn.Dense(HIDDEN, name="up")(nn.LayerNorm(name="norm")(x))
        return x + nn.Dense(DIM, name="down")(nn.gelu(h)), None


class LinenNet(nn.Module):
    has_block_params: bool

    @nn.compact
    def __call__(self, tokens):
        block = LinenBlock
        if self.has_block_params:
            is_init = self.is_initializing()
            read = jzero.block_params
            block = nn.map_variables(block, "params", trans_in_fn=read, init=is_init)
        layers = nn.scan(
            nn.remat(block, prevent_cse=False),
            variable_axes={"params": 0},
            split_rngs={"params": True},
            length=NUM_LAYERS,
        )
        x, _ = layers(name="layers")(nn.Embed(VOCAB, DIM, name="embed")(tokens), None)
        return nn.Dense(VOCAB, name="head")(x)


def linen_loss(net):
    def loss_fn(params, batch):
        return cross_entropy(net.apply({"params": params}, batch[:, :-1]), batch)

    return loss_fn


@functools.cache
def linen_params():
    return jax.jit(LinenNet(False).init)(jax.random.key(0), make_batches()[0][:, :-1])["params"]


@functools.cache
def train_linen_alone():
    return train_alone(linen_params(), linen_loss(LinenNet(False)))


@STAGES
@READS
def test_linen_train_state_equals_one_device_and_block_params_moves_the_wire_into_the_loop(
    stage, has_block_params
):
    net = LinenNet(has_block_params)
    zero = jzero.Zero(jzero.make_mesh(), stage, like=linen_params())
    params = zero.place(linen_params())
    state = TrainState.create(apply_fn=net.apply, params=params, tx=zero.optimizer(make_tx()))

    @jax.jit
    def step(state, batch):
        loss, grads = zero.value_and_grad(linen_loss(net))(state.params, batch)
        return state.apply_gradients(grads=grads), loss

    compiled, losses = step.lower(state, make_batches()[0]).compile(), []
    for batch in make_batches():
        state, loss = compiled(state, batch)
        losses.append(float(loss))
    assert int(state.step) == STEPS
    assert_same_training(losses, zero.gather(state.params), train_linen_alone())
    assert_law(compiled.as_text(), zero.layout(), stage, is_read_in_loop=has_block_params)
    assert_reported(zero, state.params, stage, is_read_in_loop=has_block_params)


# A plain dict of arrays and a function, with a tied embedding.


def plain_params():
    rng = np.random.default_rng(2)
    shapes = {"up": (DIM, HIDDEN), "bias": (HIDDEN,), "down": (HIDDEN, DIM)}
    layers = {k: rng.normal(0, 0.3, (NUM_LAYERS, *s)) for k, s in shapes.items()}
    params = {"embed": rng.normal(size=(VOCAB, DIM)), "layers": layers}
    return jax.tree.map(functools.partial(jnp.asarray, dtype=jnp.float32), params)


def plain_loss(read):
    """The user's loss, whose block reads its weights with `read`."""

    def block(x, weights):
        w = read(weights)
        return x + jnp.tanh(x @ w["up"] + w["bias"][None, None]) @ w["down"], None

    def loss_fn(params, batch):
        x = params["embed"][batch[:, :-1]]
        x, _ = jax.lax.scan(jax.checkpoint(block, prevent_cse=False), x, params["layers"])
        return cross_entropy(x @ params["embed"].T, batch)

    return loss_fn


@functools.cache
def train_plain_alone():
    return train_alone(plain_params(), plain_loss(lambda w: w))


@STAGES
@READS
def test_plain_dict_and_function_equal_one_device_and_block_params_moves_the_wire_into_the_loop(
    stage, has_block_params
):
    zero = jzero.Zero(jzero.make_mesh(), stage, like=plain_params())
    tx = zero.optimizer(make_tx())
    loss_fn = plain_loss(zero.block_params if has_block_params else lambda w: w)
    params = zero.place(plain_params())
    opt_state = tx.init(params)

    @jax.jit
    def step(params, opt_state, batch):
        loss, grads = zero.value_and_grad(loss_fn)(params, batch)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    compiled, losses = step.lower(params, opt_state, make_batches()[0]).compile(), []
    for batch in make_batches():
        params, opt_state, loss = compiled(params, opt_state, batch)
        losses.append(float(loss))
    assert_same_training(losses, zero.gather(params), train_plain_alone())
    assert_law(compiled.as_text(), zero.layout(), stage, is_read_in_loop=has_block_params)
    assert_reported(zero, params, stage, is_read_in_loop=has_block_params)


# Flax NNX: an unmodified model in nnx.Optimizer.


class Block(nnx.Module):
    def __init__(self, rngs):
        self.norm = nnx.LayerNorm(DIM, rngs=rngs)
        self.up = nnx.Linear(DIM, HIDDEN, rngs=rngs)
        self.down = nnx.Linear(HIDDEN, DIM, rngs=rngs)

    def __call__(self, x):
        return x + self.down(nnx.gelu(self.up(self.norm(x))))


class Net(nnx.Module):
    def __init__(self, rngs):
        self.embed = nnx.Embed(VOCAB, DIM, rngs=rngs)
        self.layers = nnx.vmap(Block)(rngs.split(NUM_LAYERS))
        self.head = nnx.Linear(DIM, VOCAB, rngs=rngs)

    def __call__(self, tokens):
        @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        @nnx.remat(prevent_cse=False)
        def run(x, layer):
            return layer(x)

        return self.head(run(self.embed(tokens), self.layers))


@functools.cache
def make_net():
    return Net(nnx.Rngs(0))


def net_loss(model, batch):
    return cross_entropy(model(batch[:, :-1]), batch)


@functools.cache
def train_net_alone():
    graphdef, params, rest = nnx.split(make_net(), nnx.Param, ...)

    def loss_fn(params, batch):
        return net_loss(nnx.merge(graphdef, params, rest), batch)

    return train_alone(params, loss_fn)


@STAGES
def test_nnx_optimizer_equals_one_device_and_sends_layers_in_the_loop_unasked(stage):
    zero = jzero.Zero(jzero.make_mesh(), stage, like=make_net())
    model = zero.place(make_net())
    optimizer = nnx.Optimizer(model, zero.optimizer(make_tx()), wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer, batch):
        loss, grads = zero.value_and_grad(net_loss)(model, batch)
        optimizer.update(model, grads)
        return loss

    compiled = step.lower(model, optimizer, make_batches()[0]).compile()
    losses = [float(compiled(model, optimizer, batch)) for batch in make_batches()]
    whole = nnx.state(zero.gather(model), nnx.Param)
    assert_same_training(losses, whole, train_net_alone())
    assert_law(compiled.as_text(), zero.layout(), stage, is_read_in_loop=True)
    assert_reported(zero, model, stage, is_read_in_loop=True)


def assert_without_hooks(model):
    """No read hook and no tracer on any Variable of the user's model."""
    for path, variable in nnx.to_flat_state(nnx.state(model)):
        assert not variable.get_metadata("on_get_value", None), path
        assert not isinstance(variable.get_raw_value(), Tracer), path


@STAGES
def test_nnx_model_prints_copies_and_enters_a_new_optimizer_after_a_step(stage):
    zero = jzero.Zero(jzero.make_mesh(), stage, like=nnx.eval_shape(make_head))
    model = zero.place(make_head())
    optimizer = nnx.Optimizer(model, zero.optimizer(optax.sgd(LR)), wrt=nnx.Param)
    value_and_grad = zero.value_and_grad(head_loss)
    _, grads = value_and_grad(model, make_rows())
    optimizer.update(model, grads)
    assert_without_hooks(model)
    assert "Param" in repr(model)
    twin = copy.deepcopy(model)
    assert float(value_and_grad(twin, make_rows())[0]) == float(
        value_and_grad(model, make_rows())[0]
    )
    again = nnx.Optimizer(twin, zero.optimizer(optax.adam(LR)), wrt=nnx.Param)
    again.update(twin, value_and_grad(twin, make_rows())[1])
    assert_without_hooks(twin)


class Head(nnx.Module):
    """Batch statistics, dropout, and a part that can be frozen."""

    def __init__(self, rngs):
        self.body = nnx.Linear(6, HIDDEN, rngs=rngs)
        self.norm = nnx.BatchNorm(HIDDEN, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.head = nnx.Linear(HIDDEN, 3, rngs=rngs)

    def __call__(self, x):
        return self.head(self.dropout(self.norm(self.body(x))))


def make_head():
    return Head(nnx.Rngs(0))


def make_rows():
    rng = np.random.default_rng(3)
    return {"x": rng.normal(size=(32, 6)).astype(np.float32), "y": np.zeros((32, 3), np.float32)}


def head_loss(model, rows):
    return ((model(rows["x"]) - rows["y"]) ** 2).mean()


@STAGES
@pytest.mark.parametrize("num_microbatches", [1, 2])
def test_nnx_batch_statistics_and_dropout_move_on_in_the_users_model(stage, num_microbatches):
    zero = jzero.Zero(jzero.make_mesh(), stage, like=nnx.eval_shape(make_head))
    model, rows = zero.place(make_head()), make_rows()
    value_and_grad = zero.value_and_grad(head_loss, num_microbatches=num_microbatches)
    with jax.checking_leaks():
        first, _ = value_and_grad(model, rows)
    assert_without_hooks(model)
    pieces = make_head().body(rows["x"]).reshape(NUM_DEVICES, num_microbatches, -1, HIDDEN)
    mean, var = jnp.zeros(HIDDEN), jnp.ones(HIDDEN)
    for i in range(num_microbatches):  # each device's rows of a microbatch, averaged over devices
        mean = 0.99 * mean + 0.01 * pieces[:, i].mean(1).mean(0)
        var = 0.99 * var + 0.01 * pieces[:, i].var(1).mean(0)
    np.testing.assert_allclose(model.norm.mean[...], mean, rtol=0, atol=1e-6)
    np.testing.assert_allclose(model.norm.var[...], var, rtol=0, atol=1e-6)
    assert float(first) != float(value_and_grad(model, rows)[0])  # other units are dropped


def test_nnx_devices_and_microbatches_drop_other_units():
    zero = jzero.Zero(jzero.make_mesh(), stage=2)

    def loss_fn(model, ones):
        out = model.dropout(ones)
        return model.body.bias.sum(), out

    value_and_grad = zero.value_and_grad(loss_fn, num_microbatches=2, has_aux=True)
    (_, out), _ = value_and_grad(
        zero.place(make_head()), np.ones((2 * NUM_DEVICES, 40), np.float32)
    )
    assert len({row.tobytes() for row in np.asarray(out)}) == 2 * NUM_DEVICES


@STAGES
def test_frozen_nnx_params_get_no_gradient_no_state_and_send_no_reduction(stage):
    trained = nnx.All(nnx.Param, nnx.PathContains("head"))
    zero = jzero.Zero(jzero.make_mesh(), stage, like=nnx.eval_shape(make_head))
    model = zero.place(make_head())
    model.eval()
    optimizer = nnx.Optimizer(model, zero.optimizer(optax.adam(LR)), wrt=trained)

    @nnx.jit
    def step(model, optimizer, rows):
        loss, grads = zero.value_and_grad(head_loss, wrt=trained)(model, rows)
        optimizer.update(model, grads)
        return loss, grads

    compiled = step.lower(model, optimizer, make_rows()).compile()
    _, grads = compiled(model, optimizer, make_rows())
    assert set(named_leaves(grads)[0]) == {"head.bias", "head.kernel"}
    state = named_leaves(nnx.as_pure(optimizer.opt_state))[0]
    assert not [name for name in state if "body" in name or "norm" in name]
    sizes = [zero.layout()[name].rest_size for name in ("head.bias", "head.kernel")]
    assert sent(compiled.as_text(), "reduce-scatter", in_loop=False) == sum(sizes)

    alone = make_head()
    alone.eval()
    plain = nnx.Optimizer(alone, optax.adam(LR), wrt=trained)
    argument = nnx.DiffState(0, trained)
    plain.update(alone, nnx.grad(head_loss, argnums=argument)(alone, make_rows()))
    got, want = (named_leaves(nnx.state(x, nnx.Param))[0] for x in (zero.gather(model), alone))
    for name, x in got.items():
        is_trained = name.startswith("head.")
        np.testing.assert_allclose(x, want[name], rtol=0, atol=PARAM_TOLERANCE * is_trained)
    assert np.abs(got["head.kernel"] - make_head().head.kernel[...]).max() > LR / 2
