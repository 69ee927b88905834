"""GPT-2 by Hugging Face, to compare with, and ours with the same weights."""

from pathlib import Path

import torch
import transformers
from flax import nnx
from notebook_module import initial_state

import trainkit.huggingface
import trainkit.sharding

ODD = {"n_layer": 3, "n_head": 5, "n_embd": 80, "block_size": 33, "vocab_size": 1237}


def make_peer(shape: dict, folder: Path) -> transformers.GPT2LMHeadModel:
    """A random model of that shape, which is also saved in `folder`."""
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        n_positions=shape["block_size"],
        eos_token_id=shape["vocab_size"] - 1,
        bos_token_id=shape["vocab_size"] - 1,
        **{k: v for k, v in shape.items() if k != "block_size"},
    )
    model = transformers.GPT2LMHeadModel(config).eval()
    with torch.no_grad():  # biases and norms start as constants: tell them apart
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.02 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    return model


def ours(tutorial, small, folder: Path, **changes):
    """The notebook's model with the weights in `folder`."""
    shape = trainkit.huggingface.published_shape(str(folder))
    config = small(**(shape | {"init_from": str(folder)} | changes))
    params = initial_state(tutorial, config, trainkit.sharding.make_mesh(config)).params
    model = tutorial.create_model(config)
    nnx.update(model, params)
    return model
