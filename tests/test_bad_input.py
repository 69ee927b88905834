"""What people get wrong: each error says what, where, what was expected, and what to do."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
import ray.train
from safetensors.numpy import save_file

import trainkit.checkpoints
import trainkit.config
import trainkit.generate
import trainkit.huggingface
import trainkit.token_files

# Token files.


@pytest.fixture
def manifest_of(small, write_bins):
    """A function that reads the manifest of token files of which this is the text."""
    config = write_bins(small(), train_tokens=2_000, val_tokens=400)

    def read(text: str):
        (Path(config.data_dir) / "manifest.json").write_text(text)
        return trainkit.token_files.read_manifest(Path(config.data_dir))

    return read


@pytest.mark.parametrize("text", ["", '{"source": ', "[]", '{"tokens": {}}'])
def test_manifest_that_is_damaged(manifest_of, text):
    with pytest.raises(
        ValueError, match=r"manifest\.json or what it describes is damaged .* Delete"
    ):
        manifest_of(text)


def test_token_file_that_is_cut_off(manifest_of, small):
    tokens = {"train": 2_000, "val": 400}
    text = json.dumps({"source": {"dataset": "builtin"}, "tokens": tokens})
    assert manifest_of(text)["tokens"] == tokens
    trainkit.token_files.path_of(small(), "val").write_bytes(b"12")
    with pytest.raises(ValueError, match=r"val\.bin has 2 bytes, not 800"):
        manifest_of(text)


# Weights.


def test_weights_that_are_missing_or_cut_off(small, tmp_path):
    config, path = small(init_from=str(tmp_path)), tmp_path / "model.safetensors"
    with pytest.raises(ValueError, match="init_from: expected .* found neither"):
        trainkit.huggingface.load_weights(config, {})
    save_file({"wte.weight": np.ones((9, 9))}, path)
    path.write_bytes(path.read_bytes()[:-50])
    with pytest.raises(ValueError, match=f"init_from: {path} can't be read"):
        trainkit.huggingface.load_weights(config, {})


@pytest.mark.parametrize("text", [None, "{", "3", '{"n_layer": "1"}'])
def test_config_json_that_cannot_be_read(tmp_path, text):
    if text:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(ValueError, match=r"init_from: .*config\.json can't be read"):
        trainkit.huggingface.published_shape(str(tmp_path))


def test_name_that_the_hub_would_not_take():
    with pytest.raises(ConnectionError, match="init_from: 'a b/c/d' is no folder"):
        trainkit.huggingface.find_folder("a b/c/d")


# Text from a model.


OPTIONS = [
    ({"temperature": -1}, "temperature (-1)"),
    ({"temperature": float("nan")}, "temperature (nan)"),
    ({"top_k": 0}, "top_k (0)"),
    ({"top_k": 1.5}, "top_k (1.5)"),
    ({"prompts": []}, "prompts: expected at least one"),
    ({"max_new_tokens": 0}, "max_new_tokens (0)"),
]


def test_options_of_generate(tutorial, small):
    model = tutorial.create_model(small())
    for options, words in OPTIONS:
        with pytest.raises(ValueError, match=re.escape(words)):
            trainkit.generate.generate_tokens(model, **({"prompts": [[1]]} | options))
    with pytest.raises(ValueError, match="prompts: expected a list .* found 'A class'"):
        trainkit.generate.generate(model, "A class")


# Checkpoints.


def test_folder_that_is_no_checkpoint(tmp_path):
    with pytest.raises(ValueError, match=f"{tmp_path} holds no configuration"):
        trainkit.checkpoints.load_params(ray.train.Checkpoint(str(tmp_path)), None)
    with pytest.raises(ValueError, match="found None"):
        trainkit.checkpoints.load_params(None, None)
