"""Models of Hugging Face's transformers library: published ones in, trained ones out.

GPT-2's parameters have the names that Hugging Face gives them, except that it calls
`weight` what Flax calls `kernel`, `embedding`, or `scale`.
"""

import base64
import json
import os
import tempfile
from pathlib import Path

import jax
import numpy as np
import transformers
from flax import nnx
from huggingface_hub import snapshot_download
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file
from transformers.convert_slow_tokenizer import TikTokenConverter

from trainkit import tokenizers
from trainkit.config import ModelConfig, TrainingConfig

# What a GPT-2 says of itself; a key that its config.json lacks has this value.
EXPECTED = {
    "model_type": "gpt2",
    "activation_function": "gelu_new",
    "layer_norm_epsilon": 1e-5,
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
    "tie_word_embeddings": True,
}
SIZES = {  # ours: theirs
    "vocab_size": "vocab_size",
    "block_size": "n_positions",
    "n_layer": "n_layer",
    "n_head": "n_head",
    "n_embd": "n_embd",
}
END = ("bos_token_id", "eos_token_id")


def find_folder(name: str) -> Path:
    """The folder with a Hugging Face model's config.json and weights.

    Args:
        name: a folder, or a model on the hub, which is downloaded.

    Raises:
        FileNotFoundError: `name` is an absolute path, and nothing is there.
        ConnectionError: the hub doesn't have it, or can't be reached.
    """
    if Path(name).is_dir():
        return Path(name)
    if os.path.isabs(name):
        raise FileNotFoundError(f"init_from: there is no folder {name} on this node")
    try:
        files = ["config.json", "*.safetensors"]
        return Path(snapshot_download(name, allow_patterns=files))
    except (OSError, ValueError) as error:
        raise ConnectionError(
            f"init_from: cannot get {name!r} from the Hugging Face hub ({error}). Check the "
            "name and the network, or name a folder that all nodes share."
        ) from error


def published_shape(name: str) -> dict[str, int]:
    """The `ModelConfig` fields of a Hugging Face GPT-2.

    Raises:
        ValueError: it is another kind of model, or its config.json is damaged.
    """
    path = find_folder(name) / "config.json"
    try:
        theirs = dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise ValueError(
            f"init_from: {path} can't be read as JSON ({error})"
        ) from error
    refuse_others(name, theirs, EXPECTED)
    missing = [key for key in SIZES.values() if key not in theirs]
    if missing:
        raise ValueError(f"init_from: {name}/config.json has no {', '.join(missing)}")
    return {ours: theirs[key] for ours, key in SIZES.items()}


def refuse_others(name: str, theirs: dict, expected: dict) -> None:
    """Raise a ValueError if a model says something else of itself than `expected`."""
    for key, value in expected.items():
        if (found := theirs.get(key, value)) != value:
            raise ValueError(
                f"init_from: {name} has {key} {found!r}, expected {value!r}"
            )


def load_weights(config: TrainingConfig, params: nnx.State) -> nnx.State:
    """`params` with their values replaced by those of the model `config.init_from`.

    Every worker reads the whole file, and each of its devices takes its part.

    Raises:
        FileNotFoundError, ValueError: a file is missing or damaged, or a tensor is missing
            or has another shape.
    """
    folder = find_folder(config.init_from)
    tensors = {}
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise FileNotFoundError(f"init_from: {folder} holds no *.safetensors file")
    for file in files:
        try:
            tensors |= load_file(file)
        except SafetensorError as error:
            raise ValueError(
                f"init_from: {file} can't be read ({error}); it may be cut off. Get it anew."
            ) from error
    tensors = {
        name.removeprefix("transformer."): value for name, value in tensors.items()
    }

    def load_param(path, param):
        name, shape = tensor_of(path, param.shape)
        if name not in tensors:
            raise ValueError(f"init_from: {folder} has no tensor {name}")
        value = tensors[name]
        if name == "wte.weight":
            value = np.pad(value, ((0, config.padded_vocab_size - len(value)), (0, 0)))
        if value.shape != shape:
            raise ValueError(
                f"init_from: {name} in {folder} has the shape {tensors[name].shape}, "
                f"expected {shape}"
            )
        value = value.reshape(param.shape).astype(param.dtype)
        return param.replace(
            jax.make_array_from_callback(value.shape, param.sharding, value.__getitem__)
        )

    return nnx.from_flat_state(
        [(p, load_param(p, v)) for p, v in nnx.to_flat_state(params)]
    )


def tensor_of(path: tuple, shape: tuple) -> tuple[str, tuple]:
    """The name and the shape of the Hugging Face tensor for our parameter."""
    *modules, leaf = map(str, path)
    if modules[-1] == "c_attn":  # query, key, and value lie side by side
        shape = (*shape[:-2], 3 * shape[-1])
    return ".".join([*modules, "bias" if leaf == "bias" else "weight"]), shape


def to_tensors(config: ModelConfig, params: nnx.State) -> dict[str, np.ndarray]:
    """`params` as float32 tensors under Hugging Face's names, without padding."""
    found = {}
    for path, param in nnx.to_flat_state(params):
        name, shape = tensor_of(path, param.shape)
        found[f"transformer.{name}"] = np.asarray(param[...]).reshape(shape)
    wte = found["transformer.wte.weight"]
    return found | {"transformer.wte.weight": wte[: config.vocab_size].copy()}


def export(model: nnx.Module, folder: str | Path) -> Path:
    """Write a folder that `transformers.AutoModelForCausalLM.from_pretrained` reads.

    It holds weights, configuration, and tokenizer, and is complete or absent. A model
    with another vocabulary than its tokenizer's gets none, and a line says so.

    Raises:
        FileExistsError: the folder is not empty.
    """
    folder = Path(folder)
    if folder.exists() and any(folder.iterdir()):
        raise FileExistsError(f"{folder} is not empty. Choose another folder.")
    config = model.config
    tensors = to_tensors(config, nnx.state(model, nnx.Param))
    folder.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f"{folder.name}."))
    save_file(tensors, staging / "model.safetensors", metadata={"format": "pt"})
    tokenizer = tokenizers.load(config.tokenizer)
    fits = config.vocab_size == tokenizer.n_vocab
    end = {key: tokenizer.eot_token if fits else None for key in END}
    their_config(config, **end).save_pretrained(staging)
    transformers.GenerationConfig(**end).save_pretrained(staging)
    if fits:
        their_tokenizer(tokenizer).save_pretrained(staging)
    else:
        print(
            f"{folder} has no tokenizer: {config.tokenizer} has {tokenizer.n_vocab:,} tokens, "
            f"and vocab_size is {config.vocab_size:,}. Add the one that made the tokens."
        )
    staging.chmod(0o755)
    return staging.replace(folder)


def their_config(config: ModelConfig, **others) -> transformers.GPT2Config:
    """The same model in the words of the transformers library."""
    return transformers.GPT2Config(
        vocab_size=config.vocab_size,
        n_positions=config.block_size,
        n_embd=config.n_embd,
        n_layer=config.n_layer,
        n_head=config.n_head,
        resid_pdrop=config.dropout,
        embd_pdrop=config.dropout,
        attn_pdrop=0.0,
        architectures=["GPT2LMHeadModel"],
        dtype="float32",
        **others,
    )


def their_tokenizer(tokenizer) -> transformers.PreTrainedTokenizerFast:
    """The same tokenizer, as `trainkit.tokenizers` loads them, for the transformers library."""
    if isinstance(tokenizer, tokenizers.HuggingFaceTokenizer):
        inner = tokenizer.tokenizer
    else:
        with tempfile.NamedTemporaryFile("w") as file:  # in tiktoken's own format
            for token, rank in tokenizer._mergeable_ranks.items():
                file.write(f"{base64.b64encode(token).decode()} {rank}\n")
            file.flush()
            inner = TikTokenConverter(
                vocab_file=file.name,
                pattern=tokenizer._pat_str,
                extra_special_tokens=tokenizer._special_tokens,
            ).converted()
    end = inner.id_to_token(tokenizer.eot_token)
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner, bos_token=end, eos_token=end
    )
