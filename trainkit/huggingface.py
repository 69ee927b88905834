"""Models in the format of Hugging Face's transformers library: published ones in, ours out.

A model's method `to_hugging_face` returns arguments of its configuration there, and its
parameters as tensors under the names there; examples/llama.py has one. A model without the
method is a GPT-2.
"""

import re
from collections import defaultdict
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from huggingface_hub import snapshot_download
from safetensors import safe_open
from safetensors.numpy import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

from trainkit import paths, tokenization
from trainkit.config import TrainingConfig

_SIZES = {  # ours: theirs, of any kind of model
    "vocab_size": "vocab_size",
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_embd": "hidden_size",
}
# Arguments that may differ without making another function of the same tokens
_LIMITS = re.compile(r".*_pdrop|max_position_embeddings")
_TOKENIZERS = "tokenizer.json", "vocab.json"  # today's form, and an old one
_SAMPLE = "The quick brown fox\n  jumps over 1,234 lazy dogs: naïve façades."
_CONSTANT = re.compile(r".*(attn\.(masked_)?bias|rotary_emb\.inv_freq)")  # of old files


def published_shape(name: str, tokenizer: str) -> dict[str, int]:
    """The shape of a Hugging Face model, a folder or one on the hub, as configuration keys.

    Args:
        tokenizer: that of the configuration, as `tokenization.load` takes it.

    Raises:
        ValueError: its folder has another tokenizer, or no model that transformers knows.
    """
    import transformers  # slow, and workers don't need it

    folder = _folder(name)
    if any((folder / name).exists() for name in _TOKENIZERS):
        both = tokenization.load(str(folder)), tokenization.load(tokenizer)
        ids = [[x.eot_token, *x.encode_ordinary(_SAMPLE)] for x in both]
        if ids[0] != ids[1]:
            raise ValueError(
                f"init_from: {name} has a tokenizer of other tokens than tokenizer, "
                f"{tokenizer}. Set tokenizer to that folder"
            )
    theirs = transformers.AutoConfig.from_pretrained(folder)
    shape = {ours: getattr(theirs, key) for ours, key in _SIZES.items()}
    if hasattr(theirs, "n_positions"):  # of a GPT-2, which has a table of them
        shape["block_size"] = theirs.n_positions
    return shape


def check(config: TrainingConfig, model: nnx.Module) -> None:
    """Refuse an `init_from` that isn't of the model's kind, without reading its tensors.

    Args:
        model: its arrays may be shapes.

    Raises:
        ValueError: setting by setting, or tensor by tensor, what it is, and what it should be.
    """
    import transformers

    folder = _folder(str(config.init_from))
    theirs = transformers.AutoConfig.from_pretrained(folder)
    arguments, shapes = _described(model)
    ours = transformers.AutoConfig.for_model(**arguments)
    for key in arguments:
        found, value = getattr(theirs, key, None), getattr(ours, key)
        if found != value and not _LIMITS.fullmatch(key):
            raise ValueError(
                f"init_from: {folder} has {key} {found!r}, and the model {value!r}"
            )
    found = {}
    for path in _files(folder):
        with safe_open(path, "np") as file:
            found |= {x: tuple(file.get_slice(x).get_shape()) for x in file.keys()}
    _compare(folder, _to_names(found, shapes), shapes)


def load_weights(config: TrainingConfig, model: nnx.Module) -> nnx.Module:
    """`model` with the weights of `config.init_from`, on the devices where its own are.

    Raises:
        ValueError: the files have other tensors than `model`, or another head than its own.
    """
    folder = _folder(str(config.init_from))
    _, shapes = _described(model)
    stored = {k: x for path in _files(folder) for k, x in load_file(path).items()}
    tensors = _to_names(stored, shapes)
    _compare(folder, {name: x.shape for name, x in tensors.items()}, shapes)
    for name, x in tensors.items():
        if not jnp.issubdtype(x.dtype, jnp.floating):
            raise ValueError(
                f"init_from: {folder} has {name} as {x.dtype}, expected floats"
            )
    if _HEAD not in shapes and _HEAD in tensors:
        head = tensors.pop(_HEAD)
        if not any(np.array_equal(head, x) for x in tensors.values()):
            raise ValueError(
                f"init_from: {_HEAD} in {folder} isn't the embeddings, as in the model"
            )
    tensors = {name: x.astype(np.float32) for name, x in tensors.items()}
    # What cuts, joins, and turns has a transpose that joins, cuts, and turns back.
    shardings = jax.tree.map(lambda x: x.sharding, (model,))
    to_model = jax.linear_transpose(lambda model: _to_hugging_face(model)[1], model)
    return jax.jit(to_model, out_shardings=shardings)(tensors)[0]


def export(model: nnx.Module, folder: str | Path) -> Path:
    """Write a folder that `transformers.AutoModelForCausalLM.from_pretrained` reads.

    It is there as a whole or not at all, and has the tokenizer if that is a tokenizer.json.
    PyTorch must be installed, which tells transformers' own shapes.

    Raises:
        OSError: the folder isn't empty.
        ValueError: the model has other parameters than transformers' model of its kind.
    """
    import torch
    import transformers

    config = model.config  # type: ignore[attr-defined] # create_model sets it
    tokenizer = tokenization.load(config.tokenizer)
    arguments, arrays = _to_hugging_face(model)
    settings = transformers.AutoConfig.for_model(
        **arguments,
        bos_token_id=tokenizer.eot_token,
        eos_token_id=tokenizer.eot_token,
        dtype="float32",
    )
    with torch.device("meta"):  # shapes, without arrays
        peer = transformers.AutoModelForCausalLM.from_config(settings)
    settings.architectures = [type(peer).__name__]
    expected = {name: tuple(x.shape) for name, x in peer.named_parameters()}
    tensors = {name: np.asarray(x) for name, x in arrays.items()}
    if others := differences({k: x.shape for k, x in tensors.items()}, expected):
        raise ValueError(f"the model is no {type(peer).__name__}: it has {others}")
    folder = Path(folder).expanduser()
    with paths.new_folder(folder) as new:
        save_file(tensors, new / "model.safetensors", metadata={"format": "pt"})
        (new / "model.safetensors").chmod(0o644)  # or only this user can read it
        settings.save_pretrained(new)
        if isinstance(tokenizer, tokenization.HuggingFaceTokenizer):
            end = tokenizer.decode([tokenizer.eot_token])
            plain = Tokenizer.from_str(tokenizer.tokenizer.to_str())
            # Nothing before or after a text, whatever the template in its file adds.
            plain.post_processor = TemplateProcessing(single="$A", pair="$A $B")
            transformers.PreTrainedTokenizerFast(
                tokenizer_object=plain,
                bos_token=end,
                eos_token=end,
                model_max_length=config.block_size,
            ).save_pretrained(new)
    return folder


_HEAD = "lm_head.weight"  # of every kind; a file may have it where it is the embeddings


def differences(found: dict, expected: dict) -> str:
    """The first, by name, that aren't as expected; "" if all are."""
    names = sorted({name for name, _ in found.items() ^ expected.items()})
    return "; ".join(
        f"{n} {found.get(n)}, expected {expected.get(n)}" for n in names[:3]
    )


def _to_hugging_face(model: nnx.Module) -> tuple[dict[str, Any], dict[str, jax.Array]]:
    own = getattr(model, "to_hugging_face", None)
    return own() if own else _gpt2(model)


def _described(model: nnx.Module) -> tuple[dict[str, Any], dict[str, tuple[int, ...]]]:
    """The same with shapes, of a model whose arrays may be shapes."""
    arguments: dict[str, Any] = {}

    def tensors(model):
        found, arrays = _to_hugging_face(model)
        arguments.update(found)
        return arrays

    shapes = jax.eval_shape(tensors, model)
    return arguments, {name: x.shape for name, x in shapes.items()}


def _gpt2(model: nnx.Module) -> tuple[dict[str, Any], dict[str, jax.Array]]:
    """GPT-2's parameters have its names there, except that they call `weight` what Flax calls
    `kernel`, `embedding`, or `scale`, and keep query, key, and value in `c_attn`.
    """
    config = model.config  # type: ignore[attr-defined] # create_model sets it
    arguments = {
        "model_type": "gpt2",
        "vocab_size": config.vocab_size,
        "n_positions": config.block_size,
        "n_layer": config.n_layer,
        "n_head": config.n_head,
        "n_embd": config.n_embd,
        "activation_function": "gelu_new",
        "layer_norm_epsilon": 1e-5,
        "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": False,
        "tie_word_embeddings": True,
        "embd_pdrop": config.dropout,
        "resid_pdrop": config.dropout,
        "attn_pdrop": 0.0,
    }
    parts: dict[str, dict[str, jax.Array]] = defaultdict(dict)
    for path, x in nnx.to_flat_state(nnx.state(model)):
        *modules, module, leaf = map(str, path)
        theirs = "c_attn" if module in ("query", "key", "value") else module
        kind = "bias" if leaf == "bias" else "weight"
        name = ".".join(["transformer", *modules, theirs, kind])
        if module in parts[name]:
            raise ValueError(f"the model is no GPT-2: two of its arrays are {name}")
        parts[name][module] = x[...]
    tensors = {}
    for name, found in parts.items():
        qkv = [found[part] for part in ("query", "key", "value") if part in found]
        tensors[name] = jnp.concatenate(qkv or [*found.values()], axis=-1)
        if name == "transformer.wte.weight":
            tensors[name] = tensors[name][: config.vocab_size]  # without padding
    return arguments, tensors


def _to_names(stored: dict[str, Any], expected: dict) -> dict[str, Any]:
    """What files have, under the names of `expected`: some lack its prefix, as OpenAI's own."""
    prefixes = {name.partition(".")[0] for name in expected}
    found = {}
    for key, x in stored.items():
        names = [key, *(f"{prefix}.{key}" for prefix in prefixes)]
        name = next((name for name in names if name in expected), key)
        if not _CONSTANT.fullmatch(name) or name in expected:
            found[name] = x
    return found


def _compare(folder: Path, found: dict, expected: dict) -> None:
    """Refuse files with other tensors than the model's."""
    if _HEAD not in expected:
        found = {name: shape for name, shape in found.items() if name != _HEAD}
    if others := differences(found, expected):
        raise ValueError(f"init_from: {folder} has {others}")


def _files(folder: Path) -> list[Path]:
    """Of a model's weights, which may be cut into several."""
    if files := sorted(folder.glob("*.safetensors")):
        return files
    raise FileNotFoundError(f"init_from: {folder} has no file *.safetensors")


def _folder(name: str) -> Path:
    """The folder with a model's config.json and weights, which a hub may have."""
    if Path(name).is_absolute():
        return Path(name)
    files = ["config.json", "model*.safetensors", *_TOKENIZERS]
    return Path(
        snapshot_download(name, allow_patterns=[*files, "tokenizer_config.json"])
    )
