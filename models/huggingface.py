"""Hugging Face's GPT-2: its config.json as the model's arguments, its names for the parameters.

The parameters have the names of the checkpoint, but for its layers, which are stacked here:
"h.attn.c_attn.weight" (L, D, 3D) is "h.0.attn.c_attn.weight" (D, 3D) and those after it. A Conv1D
of Hugging Face holds its weight (in, out), as here.
"""

from collections.abc import Collection, Iterator, Mapping
from typing import Any

LAYERS = "h."
HEAD = "lm_head.weight"
# Argument: its name in config.json, and what both have where it is left out.
ARGUMENTS: dict[str, tuple[str, Any]] = {
    "vocab_size": ("vocab_size", 50257),
    "num_positions": ("n_positions", 1024),
    "num_layers": ("n_layer", 12),
    "num_heads": ("n_head", 12),
    "embed_dim": ("n_embd", 768),
    "layer_norm_eps": ("layer_norm_epsilon", 1e-5),
    "tied": ("tie_word_embeddings", True),
}
DROPOUTS = ("embd_pdrop", "attn_pdrop", "resid_pdrop")
ACTIVATIONS = ("gelu_new", "gelu_pytorch_tanh")  # one function under two names
# Switches that change what is computed: what they have to be, which is also what they are left out.
# Not among them: reorder_and_upcast_attn, by which attention scores are float32, as here.
SWITCHES = {
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
    "add_cross_attention": False,
}
END_OF_TEXT = 50256  # of GPT-2's own vocabulary


def arguments_from_huggingface(
    config: Mapping[str, Any], tensor_names: Collection[str]
) -> dict[str, Any]:
    """The arguments of the model that a config.json describes.

    Dropout is a setting of training, and not taken over.

    Args:
      config: fields of config.json; those left out have GPT-2's values.
      tensor_names: of the checkpoint, without the prefix "transformer." and without a head that
        is a copy of the token table.

    Raises:
      ValueError: it describes another model; all that differs is named.

    >>> arguments_from_huggingface({"model_type": "gpt2", "n_layer": 2}, ())["num_layers"]
    2
    """
    kind = config.get("model_type")
    if kind != "gpt2":
        made_by = ", ".join(config.get("architectures") or ()) or "no architectures"
        raise ValueError(
            f"config.json has model_type {kind!r} ({made_by}), and 'gpt2' is needed; give a GPT-2"
            " checkpoint, or name a model that reads this one."
        )
    found = {name: config.get(field, value) for name, (field, value) in ARGUMENTS.items()}
    sizes = ("vocab_size", "num_positions", "num_layers", "num_heads", "embed_dim")
    bad = [
        f"{ARGUMENTS[name][0]} is {found[name]!r}, and a whole number is needed"
        for name in sizes
        if type(found[name]) is not int
    ]
    bad += [] if bad else _differences(config, found["embed_dim"])
    if found["tied"] and HEAD in tensor_names:
        bad.append(
            f"tie_word_embeddings is true, but {HEAD} differs from wte.weight; set it to false to"
            f" keep that head, or remove {HEAD}"
        )
    if bad:
        raise ValueError(
            "config.json describes a model that is computed otherwise than GPT-2:\n  "
            + "\n  ".join(bad)
        )
    return found


def _differences(config: Mapping[str, Any], embed_dim: int) -> Iterator[str]:
    activation = config.get("activation_function", ACTIVATIONS[0])
    if activation not in ACTIVATIONS:
        yield f"activation_function is {activation!r}; needed is {' or '.join(ACTIVATIONS)}"
    n_inner = config.get("n_inner")
    if n_inner not in (None, 4 * embed_dim):
        yield f"n_inner is {n_inner}; needed is null or 4 n_embd = {4 * embed_dim}"
    for name, needed in SWITCHES.items():
        if bool(config.get(name, needed)) != needed:
            yield f"{name} is {str(not needed).lower()}; needed is {str(needed).lower()}"


def huggingface_config(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The config.json of a model, as transformers' GPT2LMHeadModel needs it.

    Args:
      arguments: of the model; those left out have its defaults.

    >>> config = huggingface_config({"num_layers": 2, "vocab_size": 257})
    >>> config["n_layer"], config["n_head"], config["eos_token_id"]
    (2, 12, None)
    """
    fields = {field: arguments.get(name, value) for name, (field, value) in ARGUMENTS.items()}
    # transformers would take GPT-2's own token for one that is left out, and warn where it is
    # beyond the vocabulary.
    end = END_OF_TEXT if fields["vocab_size"] > END_OF_TEXT else None
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "activation_function": ACTIVATIONS[0],
        "n_inner": None,
        "initializer_range": 0.02,
        "bos_token_id": end,
        "eos_token_id": end,
        "use_cache": True,
        **SWITCHES,
        **dict.fromkeys(DROPOUTS, arguments.get("dropout", 0.0)),
        **fields,
    }


def huggingface_names(name: str, num_layers: int) -> list[str]:
    """The checkpoint's names, without a prefix, of one parameter: one, or one for each layer.

    >>> huggingface_names("h.ln_1.bias", 2), huggingface_names("wte.weight", 2)
    (['h.0.ln_1.bias', 'h.1.ln_1.bias'], ['wte.weight'])
    """
    if not name.startswith(LAYERS):
        return [name]
    return [f"{LAYERS}{i}.{name.removeprefix(LAYERS)}" for i in range(num_layers)]
