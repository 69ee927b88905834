"""GPT-2 in the format of Hugging Face's transformers library: published ones in, ours out.

Parameters have the names that Hugging Face gives them, except that it calls `weight` what
Flax calls `kernel`, `embedding`, or `scale`, and keeps query, key, and value in `c_attn`.
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
from safetensors.numpy import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

from trainkit import paths, tokenizers
from trainkit.config import TrainingConfig

_SIZES = {"block_size": "n_positions"}  # ours: theirs
_SIZES |= {name: name for name in ("vocab_size", "n_layer", "n_head", "n_embd")}
# What makes another function of the same weights
_FUNCTION = ["model_type", "activation_function", "layer_norm_epsilon"]
_FUNCTION += ["scale_attn_weights", "scale_attn_by_inverse_layer_idx"]
_SAMPLE = "The quick brown fox\n  jumps over 1,234 lazy dogs: naïve façades."
_MASK = re.compile(r"h\.\d+\.attn\.(masked_)?bias")  # of old files: no weight


def published_shape(name: str, tokenizer: str) -> dict[str, int]:
    """The shape of a Hugging Face GPT-2, a folder or a model on the hub, as configuration keys.

    Args:
        tokenizer: that of the configuration, as `tokenizers.load` takes it.

    Raises:
        ValueError: it is another kind of model, or its folder has another tokenizer.
    """
    import transformers  # slow, and workers don't need it

    folder = _folder(name)
    if (folder / "tokenizer.json").exists():
        both = tokenizers.load(str(folder)), tokenizers.load(tokenizer)
        ids = [[x.eot_token, *x.encode_ordinary(_SAMPLE)] for x in both]
        if ids[0] != ids[1]:
            raise ValueError(
                f"init_from: {name} has a tokenizer.json of other tokens than tokenizer, "
                f"{tokenizer}. Set tokenizer to that folder"
            )
    theirs = transformers.GPT2Config.from_json_file(folder / "config.json")
    usual = transformers.GPT2Config()
    for key in _FUNCTION:
        found, value = getattr(theirs, key), getattr(usual, key)
        if found != value:
            raise ValueError(f"init_from: {name} has {key} {found!r}, not {value!r}")
    return {ours: getattr(theirs, key) for ours, key in _SIZES.items()}


def load_weights(config: TrainingConfig, model: nnx.Module) -> nnx.Module:
    """`model` with the weights of `config.init_from`, on the devices where its own are.

    Raises:
        ValueError: the file has other tensors than `model`, or unties the head from the table.
    """
    path = _folder(str(config.init_from))
    files = [load_file(file) for file in sorted(path.glob("*.safetensors"))]
    stored = {k.removeprefix("transformer."): x for f in files for k, x in f.items()}
    tensors = {k: x for k, x in stored.items() if not _MASK.fullmatch(k)}
    for key, x in tensors.items():
        if not jnp.issubdtype(x.dtype, jnp.floating):
            raise ValueError(
                f"init_from: {path} has {key} as {x.dtype}, expected floats"
            )
        tensors[key] = x.astype(np.float32)
    head = tensors.pop("lm_head.weight", None)
    expected = {k: x.shape for k, x in jax.eval_shape(_to_tensors, model).items()}
    found = {key: tensor.shape for key, tensor in tensors.items()}
    if others := _differences(found, expected):
        raise ValueError(f"init_from: {path} has {others}")
    if head is not None and not np.array_equal(head, tensors["wte.weight"]):
        raise ValueError(f"init_from: lm_head in {path} isn't wte, as in GPT-2")
    # `_to_tensors` cuts and joins, so its transpose joins and cuts.
    shardings = jax.tree.map(lambda x: x.sharding, (model,))
    to_model = jax.linear_transpose(_to_tensors, model)
    return jax.jit(to_model, out_shardings=shardings)(tensors)[0]


def export(model: nnx.Module, folder: str | Path) -> Path:
    """Write a folder that `transformers.AutoModelForCausalLM.from_pretrained` reads.

    It is there as a whole or not at all, and has the tokenizer if that is a tokenizer.json.

    Raises:
        OSError: the folder isn't empty.
        ValueError: the model has other parameters than a GPT-2.
    """
    import transformers

    config = model.config  # type: ignore[attr-defined] # create_model sets it
    tokenizer = tokenizers.load(config.tokenizer)
    tensors = {f"transformer.{k}": np.asarray(x) for k, x in _to_tensors(model).items()}
    sizes: dict[str, Any] = {
        theirs: getattr(config, ours) for ours, theirs in _SIZES.items()
    }
    settings = transformers.GPT2Config(
        **sizes,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=tokenizer.eot_token,
        eos_token_id=tokenizer.eot_token,
        architectures=["GPT2LMHeadModel"],
        dtype="float32",
    )
    found = {k: x.shape for k, x in tensors.items()}
    if others := _differences(found, _shapes(settings)):
        raise ValueError(f"the model is no GPT-2: it has {others}")
    folder = Path(folder).expanduser()
    with paths.new_folder(folder) as new:
        save_file(tensors, new / "model.safetensors", metadata={"format": "pt"})
        (new / "model.safetensors").chmod(0o644)  # or only this user can read it
        settings.save_pretrained(new)
        if isinstance(tokenizer, tokenizers.HuggingFaceTokenizer):
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


def _differences(found: dict, expected: dict) -> str:
    """The first shapes that aren't as expected, by name."""
    names = sorted({name for name, _ in found.items() ^ expected.items()})
    shapes = (f"{n} {found.get(n)}, expected {expected.get(n)}" for n in names[:3])
    return "; ".join(shapes)


def _shapes(config) -> dict[str, tuple[int, ...]]:
    """Of the parameters of a transformers.GPT2Config, by their names in a file."""
    D = config.n_embd
    norms = {"weight": (D,), "bias": (D,)}
    parts: dict[str, tuple[int, ...]] = {
        "wte.weight": (config.vocab_size, D),
        "wpe.weight": (config.n_positions, D),
    }
    parts |= {f"ln_f.{name}": shape for name, shape in norms.items()}
    linears = {"attn.c_attn": (D, 3 * D), "attn.c_proj": (D, D)}
    linears |= {"mlp.c_fc": (D, 4 * D), "mlp.c_proj": (4 * D, D)}
    for i in range(config.n_layer):
        for norm in ("ln_1", "ln_2"):
            parts |= {f"h.{i}.{norm}.{name}": shape for name, shape in norms.items()}
        for linear, shape in linears.items():
            parts |= {
                f"h.{i}.{linear}.weight": shape,
                f"h.{i}.{linear}.bias": shape[1:],
            }
    return {f"transformer.{name}": shape for name, shape in parts.items()}


def _to_tensors(model: nnx.Module) -> dict[str, jax.Array]:
    """The parameters as tensors under the names of Hugging Face, without padding."""
    parts: dict[str, dict[str, jax.Array]] = defaultdict(dict)
    for path, x in nnx.to_flat_state(nnx.state(model)):
        *modules, module, leaf = map(str, path)
        theirs = "c_attn" if module in ("query", "key", "value") else module
        kind = "bias" if leaf == "bias" else "weight"
        name = ".".join([*modules, theirs, kind])
        if module in parts[name]:
            raise ValueError(f"the model is no GPT-2: two of its arrays are {name}")
        parts[name][module] = x[...]
    tensors = {}
    for name, found in parts.items():
        qkv = [found[part] for part in ("query", "key", "value") if part in found]
        tensors[name] = jnp.concatenate(qkv or [*found.values()], axis=-1)
    if "wte.weight" in tensors:
        rows = model.config.vocab_size  # type: ignore[attr-defined] # create_model sets it
        tensors["wte.weight"] = tensors["wte.weight"][:rows]
    return tensors


def _folder(name: str) -> Path:
    """The folder with a model's config.json and weights, which a hub may have."""
    if Path(name).is_absolute():
        return Path(name)
    files = ["config.json", "model*.safetensors", "tokenizer.json"]
    return Path(
        snapshot_download(name, allow_patterns=[*files, "tokenizer_config.json"])
    )
