"""GPT-2, its loss and its layer loop: against Hugging Face's numbers, and against themselves."""

import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from jzero.huggingface import open_huggingface
from jzero.source import whole
from models.gpt2 import GPT2
from models.layers import dropout, run_layers, wide_einsum
from models.loss import cross_entropy

FIXTURE = Path(__file__).parents[1] / "data" / "tiny_gpt2"
LOGIT_TOLERANCE = 3e-5  # torch's own float32 logits are 2.8e-6 from its float64 ones
GRAD_NORM_TOLERANCE = 1e-4  # relative
LOSS_TOLERANCE = 1e-5  # after up to five AdamW steps
CHUNK_TOLERANCE = 1e-6  # another order of a float32 sum
BF16_RELATIVE = 2**-7  # two roundings to bfloat16's 8 bits

SMALL: dict[str, Any] = {
    "vocab_size": 32,
    "num_positions": 12,
    "num_layers": 3,
    "num_heads": 2,
    "embed_dim": 16,
}

call = nnx.jit(lambda model, tokens, key=None: model(tokens, key=key))


def small_model(seed=0, **changes):
    return GPT2(**(SMALL | changes), rngs=nnx.Rngs(seed))


def small_tokens(shape=(2, 12)):
    return jnp.asarray(np.random.default_rng(7).integers(0, SMALL["vocab_size"], shape))


def dotted(path):
    return ".".join(map(str, path))


def by_name(state):
    return {dotted(path): leaf[...] for path, leaf in nnx.to_flat_state(state)}


def loss_and_grads(model, tokens):
    """Loss and gradients by name, compiled."""
    graphdef, params = nnx.split(model, nnx.Param)

    @jax.jit
    @jax.value_and_grad
    def of_params(params):
        return nnx.merge(graphdef, params).loss(tokens)

    loss, grads = of_params(params)
    return loss, by_name(grads)


@functools.cache
def small_loss_and_grads():
    return loss_and_grads(small_model(), small_tokens())


def assert_equal_trees(left, right, atol=0.0):
    assert left.keys() == right.keys()
    for name in left:
        np.testing.assert_allclose(left[name], right[name], rtol=0, atol=atol, err_msg=name)


@functools.cache
def fixture_reference():
    return dict(np.load(FIXTURE / "ref.npz"))


@functools.cache
def fixture_model():
    source = open_huggingface(FIXTURE)
    graphdef, state = nnx.split(nnx.eval_shape(lambda: GPT2(**source.arguments, rngs=nnx.Rngs(0))))

    def load(path, variable):
        return variable.replace(jnp.asarray(source.read(dotted(path), whole(variable.shape))))

    loaded = {path: load(path, variable) for path, variable in nnx.to_flat_state(state)}
    return nnx.merge(graphdef, nnx.from_flat_state(loaded))


# Against Hugging Face


def test_logits_equal_huggingface():
    reference = fixture_reference()
    logits = call(fixture_model(), reference["input_ids"])
    np.testing.assert_allclose(logits, reference["logits"], rtol=0, atol=LOGIT_TOLERANCE)


def is_decayed(params):
    """Matrices, as torch counts dims: a layer of the stack has one dim less than its Variable."""
    flat = dict(nnx.to_flat_state(params))
    flags = {p: v.replace(v.ndim - (p[0] == "h") >= 2) for p, v in flat.items()}
    return nnx.from_flat_state(flags)


@functools.cache
def fixture_training():
    """Six losses, each before its AdamW step, and the first step's gradients."""
    tokens = fixture_reference()["input_ids"]
    graphdef, params = nnx.split(fixture_model(), nnx.Param)
    adamw = optax.adamw(1e-3, b1=0.9, b2=0.95, eps=1e-8, weight_decay=0.1, mask=is_decayed(params))
    tx = optax.chain(optax.clip_by_global_norm(1.0), adamw)

    @jax.jit
    def step(params, opt_state):
        loss, grads = jax.value_and_grad(lambda p: nnx.merge(graphdef, p).loss(tokens))(params)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss, grads

    opt_state, losses, all_grads = tx.init(params), [], []
    for _ in range(6):
        params, opt_state, loss, grads = jax.block_until_ready(step(params, opt_state))
        losses.append(loss)
        all_grads.append(grads)
    return losses, by_name(all_grads[0])


def test_loss_and_each_gradient_equal_huggingface():
    reference = fixture_reference()
    losses, grads = fixture_training()
    np.testing.assert_allclose(losses[0], reference["loss"], rtol=0, atol=LOSS_TOLERANCE)
    checked = 0
    for name, expected in reference.items():
        if not name.startswith("grad/"):
            continue
        path = name.removeprefix("grad/transformer.").split(".")
        if path[0] == "h":
            grad = grads[".".join(["h", *path[2:]])][int(path[1])]
        else:
            grad = grads[dotted(path)]
        norm, norm_expected = np.linalg.norm(grad), np.linalg.norm(expected)
        np.testing.assert_allclose(norm, norm_expected, rtol=GRAD_NORM_TOLERANCE, err_msg=name)
        distance = np.linalg.norm(grad - expected)
        assert distance <= GRAD_NORM_TOLERANCE * norm_expected, name
        checked += 1
    assert checked == 28  # 12 a layer, and 4


def test_six_adamw_losses_equal_huggingface():
    losses, _ = fixture_training()
    np.testing.assert_allclose(
        losses, fixture_reference()["adamw/losses"], rtol=0, atol=LOSS_TOLERANCE
    )


# Sizes and initial weights


@pytest.mark.parametrize(
    ("num_layers", "num_heads", "embed_dim", "num_params"),
    [
        (12, 12, 768, 124_439_808),
        (24, 16, 1024, 354_823_168),
        (36, 20, 1280, 774_030_080),
        (48, 25, 1600, 1_557_611_200),
    ],
)
def test_the_four_sizes_have_gpt2s_parameter_counts(num_layers, num_heads, embed_dim, num_params):
    sizes = {"num_layers": num_layers, "num_heads": num_heads, "embed_dim": embed_dim}
    model = nnx.eval_shape(lambda: GPT2(**sizes, rngs=nnx.Rngs(0)))
    leaves = jax.tree.leaves(nnx.state(model, nnx.Param))
    assert sum(leaf.size for leaf in leaves) == num_params


def test_same_key_gives_same_weights_jitted_or_not_and_another_key_gives_others():
    eager = by_name(nnx.state(small_model()))
    jitted = by_name(nnx.state(nnx.jit(small_model)()))
    other = by_name(nnx.state(small_model(1)))
    for name, leaf in eager.items():
        np.testing.assert_allclose(leaf, jitted[name], rtol=1e-6, err_msg=name)
        is_drawn = name.endswith("weight") and "ln_" not in name
        assert np.array_equal(leaf, other[name]) != is_drawn, name


def test_initial_weights_are_gpt2s():
    flat = {name: np.asarray(leaf) for name, leaf in by_name(nnx.state(small_model())).items()}
    for name, leaf in flat.items():
        if name.endswith("bias"):
            assert (leaf == 0).all(), name
        elif "ln_" in name:
            assert (leaf == 1).all(), name
        else:
            stddev = 0.02 / 6**0.5 if "c_proj" in name else 0.02  # 6 = 2 branches of 3 layers
            error = stddev / leaf.size**0.5
            np.testing.assert_allclose(leaf.std(), stddev, rtol=0, atol=3 * error, err_msg=name)
            assert abs(leaf.mean()) < 3 * error, name
    first, second = flat["h.attn.c_attn.weight"][:2]
    assert abs(np.corrcoef(first.ravel(), second.ravel())[0, 1]) < 0.15  # layers differ


def test_an_untied_model_starts_with_the_tied_ones_weights_and_a_head_of_its_own():
    untied, tied = (by_name(nnx.state(small_model(tied=flag))) for flag in (False, True))
    head = untied.pop("lm_head.weight")
    assert head.shape == tied["wte.weight"].shape
    assert not np.array_equal(head, tied["wte.weight"])
    assert_equal_trees(untied, tied)


def test_16_bit_weights_start_as_the_rounded_float32_ones():
    half = by_name(nnx.state(small_model(param_dtype="bfloat16")))
    whole = by_name(nnx.state(small_model()))
    assert_equal_trees(half, {name: leaf.astype("bfloat16") for name, leaf in whole.items()})


# The untied head


def untied_model():
    """The small model with a head that has the token table's values."""
    model = small_model(tied=False)
    model.lm_head.weight[...] = model.wte.weight[...]
    return model


def test_an_untied_head_takes_its_part_of_the_tied_gradient():
    loss, expected = small_loss_and_grads()
    untied_loss, grads = loss_and_grads(untied_model(), small_tokens())
    np.testing.assert_allclose(untied_loss, loss, rtol=0, atol=CHUNK_TOLERANCE)
    assert np.abs(grads["lm_head.weight"]).max() > 1e-3 < np.abs(grads["wte.weight"]).max()
    grads["wte.weight"] += grads.pop("lm_head.weight")
    assert_equal_trees(grads, expected, atol=CHUNK_TOLERANCE)


def test_an_untied_head_alone_makes_the_logits():
    model = untied_model()
    model.lm_head.weight[...] = 2 * model.lm_head.weight[...]
    doubled = 2 * call(small_model(), small_tokens())
    np.testing.assert_allclose(call(model, small_tokens()), doubled, rtol=0, atol=CHUNK_TOLERANCE)


# Loss


def loss_inputs(dtype=jnp.float32):
    rng = np.random.default_rng(0)
    hidden = jnp.asarray(rng.normal(size=(2, 11, 8)), dtype)
    head = jnp.asarray(rng.normal(size=(13, 8)), "float32")
    return hidden, head, jnp.asarray(rng.integers(0, 13, (2, 11)))


def test_whole_loss_equals_optax():
    hidden, head, targets = loss_inputs()
    expected = optax.softmax_cross_entropy_with_integer_labels(hidden @ head.T, targets).mean()
    np.testing.assert_allclose(
        cross_entropy(hidden, head, targets), expected, rtol=0, atol=CHUNK_TOLERANCE
    )


@pytest.mark.parametrize("chunk", [1, 3, 4, 11, 64])
def test_chunked_loss_and_gradients_equal_the_whole_ones(chunk):
    hidden, head, targets = loss_inputs()
    value_and_grad = jax.jit(jax.value_and_grad(cross_entropy, (0, 1)), static_argnames="chunk")
    whole, whole_grads = value_and_grad(hidden, head, targets)
    chunked, grads = value_and_grad(hidden, head, targets, chunk=chunk)
    np.testing.assert_allclose(chunked, whole, rtol=0, atol=CHUNK_TOLERANCE)
    for grad, expected in zip(grads, whole_grads, strict=True):
        np.testing.assert_allclose(grad, expected, rtol=0, atol=CHUNK_TOLERANCE)


def subjaxprs(jaxpr):
    yield jaxpr
    for eqn in jaxpr.eqns:
        for value in jax.tree.leaves(list(eqn.params.values()), is_leaf=is_jaxpr):
            if is_jaxpr(value):
                yield from subjaxprs(getattr(value, "jaxpr", value))


def is_jaxpr(value):
    return hasattr(value, "eqns") or hasattr(value, "jaxpr")


def all_eqns(fn, *args):
    return [eqn for jaxpr in subjaxprs(jax.make_jaxpr(fn)(*args).jaxpr) for eqn in jaxpr.eqns]


@pytest.mark.parametrize(("chunk", "num_positions"), [(None, 11), (4, 4)])
def test_no_more_than_a_chunk_of_logits_exists(chunk, num_positions):
    hidden, head, targets = loss_inputs()
    grad = jax.grad(functools.partial(cross_entropy, chunk=chunk), argnums=(0, 1))
    shapes = {v.aval.shape for eqn in all_eqns(grad, hidden, head, targets) for v in eqn.outvars}
    largest = max((s for s in shapes if s[-1:] == (13,)), key=np.prod)
    assert largest == (2, num_positions, 13)


def test_the_models_loss_works_in_chunks_of_loss_chunk():
    model, tokens = small_model(loss_chunk=4), small_tokens()
    eqns = all_eqns(lambda tokens: model.loss(tokens), tokens)
    shapes = {v.aval.shape for eqn in eqns for v in eqn.outvars}
    assert {s for s in shapes if len(s) == 3 and s[-1] == 32} == {(2, 4, 32), (2, 3, 32)}


@pytest.mark.parametrize("chunk", [None, 4])
def test_16_bit_loss_is_float32_and_multiplies_in_16_bits_forward_and_backward(chunk):
    hidden, head, targets = loss_inputs(jnp.bfloat16)
    value_and_grad = jax.jit(
        jax.value_and_grad(functools.partial(cross_entropy, chunk=chunk), (0, 1))
    )
    loss, (hidden_grad, head_grad) = value_and_grad(hidden, head, targets)
    assert (loss.dtype, hidden_grad.dtype, head_grad.dtype) == ("float32", "bfloat16", "float32")
    eqns = all_eqns(value_and_grad, hidden, head, targets)
    dots = [eqn for eqn in eqns if eqn.primitive.name == "dot_general"]
    assert len(dots) >= 3
    assert {v.aval.dtype for eqn in dots for v in eqn.invars} == {jnp.dtype("bfloat16")}
    whole, grads = jax.jit(jax.value_and_grad(cross_entropy, (0, 1)))(
        hidden.astype("float32"), head.astype("bfloat16").astype("float32"), targets
    )
    np.testing.assert_allclose(loss, whole, rtol=1e-6)  # products of 16-bit numbers are exact
    for grad, expected in zip((hidden_grad, head_grad), grads, strict=True):
        np.testing.assert_allclose(grad.astype("float32"), expected, rtol=BF16_RELATIVE, atol=1e-3)


def test_float64_stays_float64():
    with jax.enable_x64(True):
        wide: dict[str, Any] = {"param_dtype": "float64", "compute_dtype": "float64"}
        graphdef, state = nnx.split(nnx.eval_shape(lambda: small_model(**wide, loss_chunk=5)))
        state = jax.tree.map(lambda leaf: leaf.astype("float64"), nnx.state(small_model()))
        tokens = small_tokens((2, 11))

        def nudged(nudge):
            model = nnx.merge(graphdef, jax.tree.map(lambda leaf: leaf + 0, state))
            model.wpe.weight[...] += jnp.zeros((12, 16)).at[3, 5].set(nudge)
            return model

        outputs = jax.eval_shape(lambda: (nudged(0.0)(tokens), nudged(0.0).hidden(tokens)))
        assert {leaf.dtype for leaf in outputs} == {jnp.dtype("float64")}
        value_and_grad = jax.jit(jax.value_and_grad(lambda nudge: nudged(nudge).loss(tokens)))
        loss, slope = value_and_grad(0.0)
        assert loss.dtype == slope.dtype == jnp.float64
        difference = (value_and_grad(1e-6)[0] - value_and_grad(-1e-6)[0]) / 2e-6
        # A float32 step anywhere would leave 1e-7 / 1e-6 = 1e-1 in the difference.
        np.testing.assert_allclose(difference, slope, rtol=1e-6)


def test_loss_says_what_is_wrong_with_its_inputs():
    hidden, head, targets = loss_inputs()
    with pytest.raises(ValueError, match="chunk 0 is below 1; give a number of positions"):
        cross_entropy(hidden, head, targets, chunk=0)
    with pytest.raises(ValueError, match=r"targets \(2, 10\) do not fit; give shapes"):
        cross_entropy(hidden, head, targets[:, 1:])
    with pytest.raises(ValueError, match=r"targets \(2, 0\) hold no target.*at least one row"):
        cross_entropy(hidden[:, :0], head, targets[:, :0])


def test_a_token_beyond_the_vocabulary_gives_nan_not_another_tokens_number():
    hidden, head, targets = loss_inputs()
    assert np.isnan(cross_entropy(hidden, head, targets.at[0, 3].set(13)))
    logits = call(small_model(), small_tokens().at[0, 11].set(32))
    assert np.isnan(logits[0, 11]).all()
    assert np.isfinite(logits[1]).all()


# The loop over layers


def stacked(num_layers=3):
    @nnx.vmap
    def make(scale):
        return nnx.Dict(scale=nnx.Param(scale))

    return make(jnp.arange(1.0, num_layers + 1))


def test_layers_run_in_order_each_with_its_key_and_its_aux():
    keys = jax.random.split(jax.random.key(0), 3)

    def block(layer, x, key):
        return 10 * x + layer.scale[...], jax.random.key_data(key)

    x, auxs = run_layers(block, stacked(), jnp.array(0.0), keys=keys, has_aux=True)
    assert x == 123
    np.testing.assert_array_equal(auxs, jax.random.key_data(keys))


@pytest.mark.parametrize("remat", ["none", "full"])
def test_what_a_layer_writes_into_its_variables_stays(remat):
    layers = stacked()
    layers["seen"] = nnx.BatchStat(jnp.zeros(3))

    def block(layer, x, key):
        layer.seen[...] += x
        return x * layer.scale[...]

    run_layers(block, layers, jnp.array(1.0), remat=remat)
    np.testing.assert_array_equal(layers["seen"][...], [1, 1, 2])


def test_the_loop_puts_out_activations_only_no_weights():
    graphdef, params = nnx.split(small_model())
    eqns = all_eqns(lambda p: nnx.merge(graphdef, p).hidden(small_tokens()), params)
    (scan,) = [eqn for eqn in eqns if eqn.primitive.name == "scan"]
    assert [v.aval.shape for v in scan.outvars] == [(2, 12, 16)]


def test_unknown_remat_is_refused():
    with pytest.raises(ValueError, match="remat 'half' is unknown; use one of none, full, dots"):
        run_layers(lambda layer, x, key: x, stacked(), jnp.array(0.0), remat="half")


@pytest.mark.parametrize("remat", ["none", "dots"])
def test_remat_changes_no_gradient(remat):
    full, full_grads = small_loss_and_grads()
    loss, grads = loss_and_grads(small_model(remat=remat), small_tokens())
    np.testing.assert_allclose(loss, full, rtol=0, atol=CHUNK_TOLERANCE)
    assert_equal_trees(grads, full_grads, atol=CHUNK_TOLERANCE)


def test_remat_saves_what_it_says():
    tokens = small_tokens()

    def saved(remat):
        """Stacked (L, B, T, ...) arrays that go from the forward loop to the backward loop."""
        graphdef, params = nnx.split(small_model(remat=remat))
        eqns = all_eqns(jax.grad(lambda p: nnx.merge(graphdef, p).loss(tokens)), params)
        forward, *_ = [eqn for eqn in eqns if eqn.primitive.name == "scan"]
        shapes = [v.aval.shape for v in forward.outvars]
        return [shape for shape in shapes if shape[:3] == (3, 2, 11)]

    assert saved("full") == [(3, 2, 11, 16)]
    with_weights = sorted(saved("dots"), key=np.prod)
    assert (3, 2, 11, 64) in with_weights
    assert (3, 2, 2, 11, 11) not in with_weights
    assert len(saved("none")) > len(with_weights) > 1


def unrolled(block_fn, layers, x, *, remat="full", keys=None, has_aux=False):
    graphdef, state = nnx.split(layers)
    for i in range(SMALL["num_layers"]):
        layer = nnx.merge(graphdef, jax.tree.map(lambda leaf, i=i: leaf[i], state))
        x = block_fn(layer, x, None if keys is None else keys[i])
    return x


def test_lent_loop_gives_the_numbers_of_the_models_own():
    lent = nnx.jit(lambda model, tokens: model(tokens, run_layers=unrolled))
    model, tokens = small_model(), small_tokens()
    np.testing.assert_allclose(lent(model, tokens), call(model, tokens), atol=CHUNK_TOLERANCE)


@pytest.mark.parametrize("method", ["__call__", "hidden", "loss"])
def test_lent_loop_is_given_remat_and_a_key_for_each_layer(method):
    given = []

    def spy(block_fn, layers, x, *, remat="full", keys=None, has_aux=False):
        given.append((remat, None if keys is None else keys.shape, has_aux))
        return unrolled(block_fn, layers, x, remat=remat, keys=keys, has_aux=has_aux)

    for rate, key in ((0.3, jax.random.key(0)), (0.3, None), (0.0, jax.random.key(0))):
        run = getattr(small_model(dropout=rate, remat="dots"), method)
        jax.eval_shape(functools.partial(run, key=key, run_layers=spy), small_tokens())
    assert given == [("dots", (3,), False), ("dots", None, False), ("dots", None, False)]


# Read hooks, shard_map


@pytest.mark.parametrize(("loss_chunk", "tied"), [(None, True), (5, True), (5, False)])
def test_weights_are_read_inside_the_loop_and_each_table_once(loss_chunk, tied):
    model = small_model(loss_chunk=loss_chunk, tied=tied)
    reads = {}

    def hook(variable, value, name):
        reads.setdefault(name, []).append(value.shape)
        return value

    for path, variable in nnx.iter_graph(model):
        if isinstance(variable, nnx.Param):
            name = dotted(path)
            variable.set_metadata(on_get_value=functools.partial(hook, name=name))
    graphdef, state = nnx.split(model)
    reads.clear()
    jax.make_jaxpr(lambda state: nnx.merge(graphdef, state).loss(small_tokens()))(state)
    assert reads.keys() == {dotted(path) for path, _ in nnx.to_flat_state(state)}
    assert reads["wte.weight"] == [(32, 16)]
    assert tied or reads["lm_head.weight"] == [(32, 16)]
    assert set(reads["h.attn.c_attn.weight"]) == {(16, 48)}  # no leading layer dim


def test_shards_gathered_by_a_read_hook_give_the_gradients_of_one_device():
    loss, expected = small_loss_and_grads()
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))

    def gather(variable, value):
        return jax.lax.all_gather(value, "data", axis=value.ndim - 1, tiled=True)

    state = nnx.state(small_model())
    specs = jax.tree.map(lambda leaf: P(*[None] * (leaf.ndim - 1), "data"), state)
    hooked = small_model(loss_chunk=5)
    for _, variable in nnx.iter_graph(hooked):
        if isinstance(variable, nnx.Param):
            variable.set_metadata(on_get_value=gather)
    graphdef, hooked_state = nnx.split(hooked)

    def local(values, tokens):
        params = jax.tree.unflatten(jax.tree.structure(hooked_state), jax.tree.leaves(values))
        loss, grads = jax.value_and_grad(lambda p: nnx.merge(graphdef, p).loss(tokens))(params)
        grads = [grad / 2 for grad in jax.tree.leaves(grads)]
        return jax.lax.pmean(loss, "data"), grads

    out_specs = (P(), jax.tree.leaves(specs, is_leaf=lambda s: isinstance(s, P)))
    step = jax.jit(
        jax.shard_map(
            local, mesh=mesh, in_specs=(specs, P("data")), out_specs=out_specs, check_vma=False
        )
    )
    sharded_loss, grads = jax.block_until_ready(step(state, small_tokens()))
    names = [dotted(path) for path, _ in nnx.to_flat_state(state)]
    np.testing.assert_allclose(sharded_loss, loss, rtol=0, atol=CHUNK_TOLERANCE)
    assert_equal_trees(dict(zip(names, grads, strict=True)), expected, atol=CHUNK_TOLERANCE)


def test_loss_works_under_nnx_transforms_and_with_the_model_closed_over():
    model, tokens = small_model(), small_tokens()
    grads = nnx.eval_shape(nnx.jit(nnx.grad(lambda model: model.loss(tokens))), model)
    shapes = jax.tree.map(jnp.shape, nnx.state(model))
    assert jax.tree.map(lambda leaf: leaf.shape, grads) == shapes
    for wrap in (jax.jit, nnx.jit):
        assert jax.eval_shape(wrap(lambda tokens: model.loss(tokens)), tokens).shape == ()


# Dropout and attention


def test_dropout_follows_its_key_and_does_nothing_without_one():
    model, plain, tokens = small_model(dropout=0.3), small_model(), small_tokens()
    first = call(model, tokens, jax.random.key(0))
    np.testing.assert_array_equal(first, call(model, tokens, jax.random.key(0)))
    assert not np.allclose(first, call(model, tokens, jax.random.key(1)))
    np.testing.assert_array_equal(call(model, tokens), call(plain, tokens))
    np.testing.assert_array_equal(call(plain, tokens, jax.random.key(0)), call(plain, tokens))


def test_embeddings_attention_and_both_branches_draw_their_own_dropout():
    model, tokens = small_model(dropout=0.3), small_tokens()
    eqns = all_eqns(lambda key: model(tokens, key=key), jax.random.key(0))
    drawn = [eqn.outvars[0].aval.shape for eqn in eqns if eqn.primitive.name == "random_bits"]
    assert drawn == [(2, 12, 16), (2, 2, 12, 12), (2, 12, 16), (2, 12, 16)]


def test_dropout_keeps_the_expected_value_and_the_dtype():
    dropped = dropout(jnp.ones(20_000, jnp.bfloat16), 0.25, jax.random.key(0))
    assert dropped.dtype == jnp.bfloat16
    assert set(np.unique(dropped.astype(float))) == {0.0, float(jnp.bfloat16(4 / 3))}
    np.testing.assert_allclose((dropped == 0).mean(), 0.25, atol=0.02)


@pytest.mark.parametrize("seed", [None, 0])
def test_no_position_sees_a_later_one(seed):
    key = None if seed is None else jax.random.key(seed)
    model, tokens = small_model(dropout=0.3), small_tokens()
    changed = call(model, tokens.at[:, 8].set(0), key)
    original = call(model, tokens.at[:, 8].set(1), key)
    np.testing.assert_array_equal(changed[:, :8], original[:, :8])
    assert not np.allclose(changed[:, 8:], original[:, 8:])


def test_wide_einsum_has_the_gradients_of_einsum():
    q, k = jnp.asarray(np.random.default_rng(0).normal(size=(2, 2, 5, 3, 4)), "bfloat16")

    def summed(einsum, q, k):
        return jnp.sin(einsum("bthk,bshk->bhts", q, k)).sum()

    found = jax.grad(functools.partial(summed, wide_einsum), (0, 1))(q, k)
    wide = (q.astype("float32"), k.astype("float32"))
    expected = jax.grad(functools.partial(summed, jnp.einsum), (0, 1))(*wide)
    for grad, grad_expected in zip(found, expected, strict=True):
        np.testing.assert_allclose(grad.astype("float32"), grad_expected, rtol=0, atol=0.1)


# Mistakes


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"embed_dim": 50, "num_heads": 12}, "embed_dim 50 is not .* num_heads 12; use 48 or 60"),
        ({"embed_dim": 5, "num_heads": 12}, "embed_dim 5 is not .*; use 12, or another"),
        ({"num_layers": 0}, "num_layers 0 is below 1; give a positive number"),
        ({"loss_chunk": 0}, "loss_chunk 0 is below 1; give a positive number"),
        ({"remat": "some"}, "remat 'some' is unknown; use one of none, full, dots"),
        ({"dropout": 1.0}, r"dropout 1.0 is outside \[0, 1\); give the share"),
        ({"dropout": -0.1}, r"dropout -0.1 is outside \[0, 1\)"),
        ({"layer_norm_eps": 0.0}, "layer_norm_eps 0.0 is not above 0; GPT-2 has 1e-5"),
        ({"param_dtype": "int8"}, "param_dtype 'int8' is unknown; use one of float16, bfloat16"),
        ({"compute_dtype": "half"}, "compute_dtype 'half' is unknown; use one of float16"),
        ({"param_dtype": "float64"}, "param_dtype float64 needs jax_enable_x64; set it, or use"),
    ],
)
def test_a_bad_argument_is_refused_before_any_array_is_made(changes, message):
    no_rngs: Any = None  # whatever drew from it would raise AttributeError
    with pytest.raises(ValueError, match=message):
        GPT2(**changes, rngs=no_rngs)


@pytest.mark.parametrize("method", ["__call__", "hidden", "loss"])
def test_tokens_that_do_not_fit_are_refused(method):
    run = getattr(small_model(), method)
    long = "tokens are 14 long, but the model has num_positions 12; cut the sequence or raise"
    with pytest.raises(ValueError, match=long):
        run(small_tokens((2, 15 if method == "loss" else 14)))
    with pytest.raises(ValueError, match=r"shape \(2, \d+\) and dtype float32; give integers"):
        run(small_tokens().astype("float32"))


def test_loss_of_single_tokens_is_refused():
    with pytest.raises(ValueError, match="hold no target, so there is no mean"):
        small_model().loss(small_tokens((2, 1)))
