"""Published GPT-2 weights: where they lie, and which shape they have.

Apart from `trainkit.weights`, which loads them, because reading a configuration needs
the shape and shouldn't wait for JAX or transformers to be imported.
"""

import json
import os
from pathlib import Path

from huggingface_hub import snapshot_download

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


def folder(name: str) -> Path:
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


def shape(name: str) -> dict[str, int]:
    """The `ModelConfig` fields of a Hugging Face GPT-2.

    Raises:
        ValueError: it is another kind of model, or its config.json is damaged.
    """
    path = folder(name) / "config.json"
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
    refuse_others(name, theirs, {"eos_token_id": theirs["vocab_size"] - 1})
    return {ours: theirs[key] for ours, key in SIZES.items()}


def refuse_others(name: str, theirs: dict, expected: dict) -> None:
    """Raise a ValueError if a model says something else of itself than `expected`."""
    for key, value in expected.items():
        if (found := theirs.get(key, value)) != value:
            raise ValueError(
                f"init_from: {name} has {key} {found!r}, expected {value!r}"
            )
