"""Weights under Hugging Face's names: published ones in, trained ones out.

GPT-2's parameters have the names that Hugging Face gives them, except that it calls
`weight` what Flax calls `kernel`, `embedding`, or `scale`.
"""

import jax
import numpy as np
from flax import nnx
from safetensors import SafetensorError
from safetensors.numpy import load_file

from trainkit import pretrained
from trainkit.config import ModelConfig, TrainingConfig


def load(config: TrainingConfig, params: nnx.State) -> nnx.State:
    """`params` with their values replaced by those of the model `config.init_from`.

    Every worker reads the whole file, and each of its devices takes its part.

    Raises:
        FileNotFoundError, ValueError: a file is missing or damaged, or a tensor is missing
            or has another shape.
    """
    folder = pretrained.folder(config.init_from)
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


def tensors(config: ModelConfig, params: nnx.State) -> dict[str, np.ndarray]:
    """`params` as float32 tensors under Hugging Face's names, without padding."""
    found = {}
    for path, param in nnx.to_flat_state(params):
        name, shape = tensor_of(path, param.shape)
        found[f"transformer.{name}"] = np.asarray(param[...]).reshape(shape)
    wte = found["transformer.wte.weight"]
    return found | {"transformer.wte.weight": wte[: config.vocab_size].copy()}
