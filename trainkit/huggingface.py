"""Models of Hugging Face's transformers library: published ones in, trained ones out.

GPT-2's parameters have the names that Hugging Face gives them, except that it calls
`weight` what Flax calls `kernel`, `embedding`, or `scale`, and keeps the kernels of query,
key, and value side by side, as `c_attn`.
"""

import base64
import json
import os
import re
import tempfile
from collections import defaultdict
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import safetensors
import transformers
from flax import nnx
from huggingface_hub import snapshot_download
from safetensors.numpy import save_file
from transformers.convert_slow_tokenizer import TikTokenConverter

from trainkit import tokenizers

# What a GPT-2 says of itself; a key that its config.json lacks has this value.
EXPECTED = {
    "model_type": "gpt2",
    "activation_function": "gelu_new",
    "layer_norm_epsilon": 1e-5,
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
    "tie_word_embeddings": True,
    "add_cross_attention": False,
    "quantization_config": None,
}
SIZES = {  # ours: theirs
    "vocab_size": "vocab_size",
    "block_size": "n_positions",
    "n_layer": "n_layer",
    "n_head": "n_head",
    "n_embd": "n_embd",
}
END = ("bos_token_id", "eos_token_id")
SIDE_BY_SIDE = ("query", "key", "value")  # in c_attn
TYPES = {"F16": np.float16, "BF16": jnp.bfloat16, "F32": np.float32, "F64": np.float64}
MASKS = re.compile(r"h\.\d+\.attn\.(masked_)?bias")  # of old files: no weights
TOKENIZERS = ("tokenizer.json", "vocab.json", "merges.txt", "tokenizer_config.json")
TEXTS = ("The value of x", " naïve café", "汉字 🙂", "\n\n\tf(1)  # 20%")


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
        files = [
            "config.json",
            "*.safetensors",
            "*.safetensors.index.json",
            *TOKENIZERS,
        ]
        return Path(snapshot_download(name, allow_patterns=files))
    except (OSError, ValueError) as error:
        raise ConnectionError(
            f"init_from: cannot get {name!r} from the Hugging Face hub ({error}). Check the "
            "name and the network, or name a folder that all nodes share."
        ) from error


def read_json(path: Path) -> dict:
    """What a JSON file of a published model says.

    Raises:
        ValueError: it can't be read.
    """
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise ValueError(
            f"init_from: {path} can't be read as JSON ({error})"
        ) from error


def published_shape(name: str) -> dict[str, int]:
    """The `ModelConfig` fields of a Hugging Face GPT-2.

    Raises:
        ValueError: it is another kind of model, or its config.json is damaged.
    """
    theirs = read_json(find_folder(name) / "config.json")
    inner = theirs.get("n_inner") and 4 * theirs.get("n_embd", 0)
    for key, value in (EXPECTED | {"n_inner": inner}).items():
        if (found := theirs.get(key, value)) != value:
            raise ValueError(
                f"init_from: {name} has {key} {found!r}, expected {value!r}"
            )
    missing = [key for key in SIZES.values() if key not in theirs]
    if missing:
        raise ValueError(f"init_from: {name}/config.json has no {', '.join(missing)}")
    return {ours: theirs[key] for ours, key in SIZES.items()}


def check_tokenizer(name: str, tokenizer: str) -> None:
    """Refuse weights that come with another tokenizer than the run's.

    Raises:
        ValueError: with a text of which the two make different tokens.
    """
    folder = find_folder(name)
    if not any((folder / file).exists() for file in TOKENIZERS[:2]):
        return
    theirs, ours = (
        transformers.AutoTokenizer.from_pretrained(folder),
        tokenizers.load(tokenizer),
    )
    for text in TEXTS:
        found = theirs(text, add_special_tokens=False)["input_ids"]
        if found != (expected := ours.encode_ordinary(text)):
            raise ValueError(
                f"tokenizer: that of {name}, with which init_from's weights were trained, "
                f"makes {found} of {text!r}, and {tokenizer} makes {expected}. Set tokenizer: "
                f"{name}"
            )
    if theirs.eos_token_id not in (None, ours.eot_token):
        raise ValueError(
            f"tokenizer: that of {name} ends a text with {theirs.eos_token_id}, and "
            f"{tokenizer} with {ours.eot_token}. Set tokenizer: {name}"
        )


def files_of(folder: Path) -> dict[str, set[str] | None]:
    """The weights' files, with the tensors that an index names in each; None: all.

    Raises:
        FileNotFoundError, ValueError: there are none, or two forms of them.
    """
    whole, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if whole.exists() and index.exists():
        raise ValueError(
            f"init_from: {folder} has both {whole.name} and {index.name}; remove one of them"
        )
    if whole.exists():
        return {whole.name: None}
    if not index.exists():
        raise FileNotFoundError(
            f"init_from: {folder} has no {whole.name}, and no {index.name}"
        )
    files = defaultdict(set)
    for tensor, file in dict(read_json(index).get("weight_map", {})).items():
        files[Path(file).name].add(tensor)
    return dict(files)


def read_tensors(folder: Path) -> dict[str, np.ndarray]:
    """The tensors of a published model, by name, without the prefix "transformer.".

    Raises:
        FileNotFoundError, ValueError: a file is missing or damaged, a tensor isn't where the
            index says, is there twice, or has a type that isn't of floating-point numbers.
    """
    tensors = {}
    for file, expected in files_of(folder).items():
        try:
            found = dict(safetensors.deserialize((folder / file).read_bytes()))
        except FileNotFoundError as error:
            raise FileNotFoundError(f"init_from: {folder} has no {file}") from error
        except safetensors.SafetensorError as error:
            raise ValueError(
                f"init_from: {folder / file} can't be read ({error}); it may be cut off. Get "
                "it anew."
            ) from error
        if expected is not None and (differing := expected ^ found.keys()):
            raise ValueError(
                f"init_from: {folder / file} and the index differ in {name_some(differing)}"
            )
        for tensor, about in found.items():
            name = tensor.removeprefix("transformer.")
            if MASKS.fullmatch(name):
                continue
            if about["dtype"] not in TYPES or name in tensors:
                flaw = "twice" if name in tensors else f"as {about['dtype']}"
                raise ValueError(
                    f"init_from: {folder / file} has {name} {flaw}; expected it once, as "
                    f"{', '.join(TYPES)}"
                )
            values = np.frombuffer(about["data"], TYPES[about["dtype"]])
            tensors[name] = values.reshape(about["shape"])
    return tensors


def load_weights(config, params: nnx.State) -> nnx.State:
    """`params` with their values replaced by those of the model `config.init_from`.

    Every worker reads the whole file, and each of its devices takes its part.

    Raises:
        FileNotFoundError, ValueError: as `read_tensors` says; or a tensor is missing, is
            none of GPT-2's, or has another shape.
    """
    folder = find_folder(config.init_from)
    tensors, shapes = read_tensors(folder), tensor_shapes(config, params)
    head = tensors.pop("lm_head.weight", None)
    for what, names in (
        ("lacks", shapes.keys() - tensors.keys()),
        ("has tensors that a GPT-2 hasn't:", tensors.keys() - shapes.keys()),
    ):
        if names:
            raise ValueError(f"init_from: {folder} {what} {name_some(names)}")
    for name, shape in shapes.items():
        if (found := tensors[name].shape) != shape:
            raise ValueError(
                f"init_from: {name} in {folder} has the shape {found}, expected {shape}"
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


def name_some(names) -> str:
    """The first few of some names."""
    return ", ".join(sorted(names)[:3]) + (" ..." if len(names) > 3 else "")


def tensor_of(path: tuple) -> tuple[str, int | None]:
    """The Hugging Face tensor that has our parameter, and which part of it, if not all."""
    *modules, leaf = map(str, path)
    part = None
    if modules[-1] in SIDE_BY_SIDE:
        part, modules[-1] = SIDE_BY_SIDE.index(modules[-1]), "c_attn"
    return ".".join([*modules, "bias" if leaf == "bias" else "weight"]), part


def tensor_shapes(config, params: nnx.State) -> dict[str, tuple[int, ...]]:
    """The shapes of Hugging Face's tensors for `params`."""
    shapes = {}
    for path, param in nnx.to_flat_state(params):
        name, part = tensor_of(path)
        *others, last = param.shape
        shapes[name] = (*others, last if part is None else last * len(SIDE_BY_SIDE))
    return shapes | {"wte.weight": (config.vocab_size, config.n_embd)}


def to_tensors(config, params: nnx.State) -> dict[str, np.ndarray]:
    """`params` as float32 tensors under Hugging Face's names, without padding."""
    parts = defaultdict(dict)
    for path, param in nnx.to_flat_state(params):
        name, part = tensor_of(path)
        parts[f"transformer.{name}"][part or 0] = np.asarray(param[...])
    tensors = {
        name: np.concatenate([found[i] for i in sorted(found)], axis=-1)
        for name, found in parts.items()
    }
    wte = tensors["transformer.wte.weight"]
    return tensors | {"transformer.wte.weight": wte[: config.vocab_size].copy()}


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


def their_config(config, **others) -> transformers.GPT2Config:
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
