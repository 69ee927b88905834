"""Models of Hugging Face's transformers library: published ones in, trained ones out.

GPT-2's parameters have the names that Hugging Face gives them, except that it calls
`weight` what Flax calls `kernel`, `embedding`, or `scale`, and keeps the kernels of query,
key, and value side by side, as `c_attn`.
"""

import contextlib
import json
import re
from collections import defaultdict
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import transformers
from flax import nnx
from huggingface_hub import snapshot_download
from safetensors.numpy import load_file, save_file
from transformers.convert_slow_tokenizer import TikTokenConverter

from trainkit import token_files, tokenizers

# What a GPT-2 has to say of itself as transformers' own defaults do.
COMMON = ["model_type", "activation_function", "layer_norm_epsilon", "n_inner"]
COMMON += ["scale_attn_weights", "scale_attn_by_inverse_layer_idx"]
COMMON += ["tie_word_embeddings", "add_cross_attention", "quantization_config"]
SIZES = {"block_size": "n_positions"}  # ours: theirs
SIZES |= {name: name for name in ("vocab_size", "n_layer", "n_head", "n_embd")}
SIDE_BY_SIDE = ("query", "key", "value")  # in c_attn
TYPES = ("float16", "bfloat16", "float32", "float64")
MASKS = re.compile(r"h\.\d+\.attn\.(masked_)?bias")  # of old files: no weights
TOKENIZERS = ("tokenizer.json", "vocab.json", "merges.txt", "tokenizer_config.json")
TEXTS = ("The value of x", " naïve café", "汉字 🙂", "\n\n\tf(1)  # 20%")


def find_folder(name: str) -> Path:
    """The folder with a Hugging Face model's config.json and weights.

    Args:
        name: a folder, or a model on the hub, which is downloaded.

    Raises:
        ConnectionError: there is no such folder, and the hub doesn't have it or can't be
            reached.
    """
    if Path(name).is_dir():
        return Path(name)
    files = ["config.json", "*.safetensors", "*.safetensors.index.json", *TOKENIZERS]
    try:
        return Path(snapshot_download(name, allow_patterns=files))
    except (OSError, ValueError) as error:
        raise ConnectionError(
            f"init_from: {name!r} is no folder on this node, and can't be had from the "
            f"Hugging Face hub ({error}). Check the name and the network, or name a folder "
            "that all nodes share."
        ) from error


@contextlib.contextmanager
def reading(path: Path):
    """Say which file of a published model can't be read, as a ValueError."""
    try:
        yield
    except Exception as error:  # of no particular kind
        raise ValueError(
            f"init_from: {path} can't be read ({error}). If it is missing or cut off, get it "
            "anew."
        ) from error


def published_shape(name: str) -> dict[str, int]:
    """The `ModelConfig` fields of a Hugging Face GPT-2.

    Raises:
        ValueError: it is another kind of model, or its config.json is damaged.
    """
    path = find_folder(name) / "config.json"
    with reading(path):
        theirs = transformers.GPT2Config.from_json_file(path)
    usual = transformers.GPT2Config(n_inner=theirs.n_inner and 4 * theirs.n_embd)
    for key in COMMON:
        found, value = (getattr(config, key, None) for config in (theirs, usual))
        if found != value:
            raise ValueError(
                f"init_from: {name} has {key} {found!r}, expected {value!r}"
            )
    return {ours: getattr(theirs, key) for ours, key in SIZES.items()}


def check_tokenizer(name: str, tokenizer: str) -> None:
    """Refuse weights that come with another tokenizer than the run's.

    Raises:
        ValueError: with a text of which the two make different tokens.
    """
    folder = find_folder(name)
    if not any((folder / file).exists() for file in TOKENIZERS[:2]):
        return
    with reading(folder):
        theirs = transformers.AutoTokenizer.from_pretrained(folder)
    ours = tokenizers.load(tokenizer)
    pairs = {
        repr(text): (theirs.encode(text, add_special_tokens=False), encoded)
        for text, encoded in zip(TEXTS, map(ours.encode_ordinary, TEXTS))
    }
    if theirs.eos_token_id is not None:
        pairs["the end of a text"] = theirs.eos_token_id, ours.eot_token
    for text, (found, expected) in pairs.items():
        if found != expected:
            raise ValueError(
                f"tokenizer: that of {name}, with which init_from's weights were trained, "
                f"makes {found} of {text}, and {tokenizer} makes {expected}. Set tokenizer: "
                f"{name}"
            )


def read_tensors(folder: Path) -> dict[str, np.ndarray]:
    """The tensors of a published model, by name, without the prefix "transformer.".

    They are in model.safetensors, or in the files that model.safetensors.index.json names.

    Raises:
        ValueError: there are both of these or neither, a file is missing or damaged, a
            tensor is there twice or has a type that isn't of floating-point numbers.
    """
    whole, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if whole.exists() == index.exists():
        found = "both" if whole.exists() else "neither"
        raise ValueError(f"init_from: expected {whole} or {index.name}, found {found}")
    files, tensors = {whole.name}, {}
    if index.exists():
        with reading(index):
            files = set(dict(json.loads(index.read_text())["weight_map"]).values())
    for file in sorted(files):
        path = folder / file
        with reading(path):
            if path.parent != folder:
                raise ValueError(
                    "the index names a file that isn't in that folder itself"
                )
            found = load_file(path)
        for name, tensor in found.items():
            name = name.removeprefix("transformer.")
            if MASKS.fullmatch(name):
                continue
            if name in tensors or tensor.dtype.name not in TYPES:
                flaw = "twice" if name in tensors else f"as {tensor.dtype}"
                raise ValueError(
                    f"init_from: {path} has {name} {flaw}; expected it once, as "
                    f"{', '.join(TYPES)}"
                )
            tensors[name] = tensor
    return tensors


def load_weights(config, params: nnx.State) -> nnx.State:
    """`params` with their values replaced by those of the model `config.init_from`.

    Every worker reads the whole file, and each of its devices takes its part.

    Raises:
        ValueError: as `read_tensors` says; or a tensor is missing, is none of GPT-2's, or
            has another shape; or two that GPT-2 ties differ.
    """
    folder = find_folder(config.init_from)
    tensors = read_tensors(folder)
    head = tensors.pop("lm_head.weight", None)
    shapes = jax.eval_shape(partial(to_tensors, config), params)
    found, expected = (
        {name: x.shape for name, x in arrays.items()} for arrays in (tensors, shapes)
    )
    if differing := [
        f"{name} {found.get(name, 'none')}, expected {expected.get(name, 'none')}"
        for name in sorted(found | expected)
        if found.get(name) != expected.get(name)
    ]:
        raise ValueError(
            f"init_from: of the shapes of {len(expected)} tensors, {len(differing)} differ "
            f"in {folder}: found {'; '.join(differing[:3])}"
        )
    if head is not None and not np.array_equal(head, tensors["wte.weight"]):
        raise ValueError(
            f"init_from: lm_head.weight and wte.weight in {folder} differ; GPT-2 ties them"
        )
    padding = config.padded_vocab_size - config.vocab_size
    tensors["wte.weight"] = np.pad(tensors["wte.weight"], ((0, padding), (0, 0)))

    def load_param(path, param):
        name, part = tensor_of(path)
        value = tensors[name]
        if part is not None:
            value = np.split(value, len(SIDE_BY_SIDE), axis=-1)[part]
        value = value.astype(param.dtype)
        return param.replace(
            jax.make_array_from_callback(value.shape, param.sharding, value.__getitem__)
        )

    return nnx.map_state(load_param, params)


def tensor_of(path: tuple) -> tuple[str, int | None]:
    """The Hugging Face tensor that has our parameter, and which part of it, if not all."""
    *modules, leaf = map(str, path)
    part = None
    if modules[-1] in SIDE_BY_SIDE:
        part, modules[-1] = SIDE_BY_SIDE.index(modules[-1]), "c_attn"
    return ".".join([*modules, "bias" if leaf == "bias" else "weight"]), part


def to_tensors(config, params: nnx.State) -> dict[str, jax.Array]:
    """`params` as float32 tensors under the names of Hugging Face, without padding."""
    parts = defaultdict(dict)
    for path, param in nnx.to_flat_state(params):
        name, part = tensor_of(path)
        parts[name][part or 0] = param[...]
    tensors = {
        name: jnp.concatenate([found[i] for i in sorted(found)], axis=-1)
        for name, found in parts.items()
    }
    return tensors | {"wte.weight": tensors["wte.weight"][: config.vocab_size]}


def export(model: nnx.Module, folder: str | Path) -> Path:
    """Write a folder that `transformers.AutoModelForCausalLM.from_pretrained` reads.

    It holds weights, configuration, and tokenizer, and is complete or absent. A model
    with another vocabulary than its tokenizer's gets none, and a line says so.

    Raises:
        FileExistsError: the folder is not empty.
    """
    folder = Path(folder).expanduser()
    if folder.exists() and any(folder.iterdir()):
        raise FileExistsError(f"{folder} is not empty. Choose another folder.")
    config = model.config
    tensors = to_tensors(config, nnx.state(model, nnx.Param))
    tensors = {f"transformer.{name}": np.asarray(x) for name, x in tensors.items()}
    end = dict.fromkeys(("bos_token_id", "eos_token_id"))
    with token_files.new_folder(folder) as new:
        save_file(tensors, new / "model.safetensors", metadata={"format": "pt"})
        # safetensors lets only its own user read, whatever the folder says.
        (new / "model.safetensors").chmod(new.stat().st_mode & 0o666)
        tokenizer = tokenizers.load(config.tokenizer)
        if tokenizers.fits(tokenizer, config.vocab_size):
            end = dict.fromkeys(end, tokenizer.eot_token)
            their_tokenizer(tokenizer).save_pretrained(new)
        else:
            print(
                f"{folder} has no tokenizer: {config.tokenizer} has {tokenizer.n_vocab:,} "
                f"tokens, and vocab_size is {config.vocab_size:,}. Add the one that made the "
                "tokens."
            )
        their_config(config, **end).save_pretrained(new)
        longest = {"max_length": config.block_size}  # or text goes on beyond it
        transformers.GenerationConfig(**end, **longest).save_pretrained(new)
    return folder


def their_config(config, **others) -> transformers.GPT2Config:
    """The same model in the words of the transformers library."""
    return transformers.GPT2Config(
        **{theirs: getattr(config, ours) for ours, theirs in SIZES.items()},
        **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
        architectures=["GPT2LMHeadModel"],
        dtype="float32",
        **others,
    )


class ConverterOfRanks(TikTokenConverter):
    """Takes tokens and their ranks as they are, in place of a file of tiktoken's."""

    load_tiktoken_bpe = staticmethod(dict)


def their_tokenizer(tokenizer) -> transformers.PreTrainedTokenizerFast:
    """The same tokenizer, as `trainkit.tokenizers` loads them, for the transformers library."""
    if isinstance(tokenizer, tokenizers.HuggingFaceTokenizer):
        inner = tokenizer.tokenizer
    else:
        special = tokenizer._special_tokens
        ids = {token.encode(): id for token, id in special.items()}
        inner = ConverterOfRanks(
            vocab_file=tokenizer._mergeable_ranks | ids,
            pattern=tokenizer._pat_str,
            extra_special_tokens=special,
        ).converted()
    end = inner.id_to_token(tokenizer.eot_token)
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner, bos_token=end, eos_token=end
    )
