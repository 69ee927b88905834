"""GPT-2 by Hugging Face, to compare with, and ours with the same weights."""

from pathlib import Path

import torch
import transformers

import trainkit.huggingface

ODD = {"n_layer": 3, "n_head": 5, "n_embd": 80, "block_size": 33, "vocab_size": 2048}


def make_peer(folder: Path) -> transformers.GPT2LMHeadModel:
    """A random model of that shape, which is also saved in `folder`."""
    torch.manual_seed(0)
    sizes = {key: value for key, value in ODD.items() if key != "block_size"}
    config = transformers.GPT2Config(n_positions=ODD["block_size"], **sizes)
    model = transformers.GPT2LMHeadModel(config).eval()
    with torch.no_grad():  # biases and norms start as constants: tell them apart
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.02 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    return model


def ours(tutorial, small, folder: Path, **changes):
    """The notebook's model with the weights in `folder`."""
    shape = trainkit.huggingface.published_shape(str(folder), "builtin")
    config = small(**shape, init_from=str(folder), tokenizer="builtin", **changes)
    mesh = tutorial.create_mesh(config)
    return tutorial.first_state(config, tutorial.abstract_state(config, mesh)).model
