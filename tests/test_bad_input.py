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


def manifest_of(config, text: str) -> dict | None:
    (Path(config.data_dir) / "manifest.json").write_text(text)
    return trainkit.token_files.read_manifest(Path(config.data_dir))


@pytest.mark.parametrize("text", ["", '{"source": ', "[]", '{"tokens": {}}'])
def test_manifest_that_is_damaged(small, write_bins, text):
    config = write_bins(small())
    with pytest.raises(
        ValueError, match=r"manifest\.json or what it describes is damaged .* Delete"
    ):
        manifest_of(config, text)


def test_token_file_that_is_cut_off(small, write_bins):
    config = write_bins(small(), train_tokens=2_000, val_tokens=400)
    tokens = {"train": 2_000, "val": 400}
    text = json.dumps({"source": {"dataset": "builtin"}, "tokens": tokens})
    assert manifest_of(config, text)["tokens"] == tokens
    trainkit.token_files.path_of(config, "val").write_bytes(b"12")
    with pytest.raises(ValueError, match=r"val\.bin has 2 bytes, not 800"):
        manifest_of(config, text)


# Weights.


@pytest.fixture
def weights_in(small, tmp_path):
    """A function that loads the file with these bytes, as of a published model."""

    def load(data: bytes | None):
        config = small(init_from=str(tmp_path))
        if data is not None:
            (tmp_path / "model.safetensors").write_bytes(data)
        return trainkit.huggingface.load_weights(config, {})

    return load


def test_weights_that_are_cut_off(weights_in, tmp_path):
    path = tmp_path / "whole.safetensors"
    save_file({"wte.weight": np.ones((9, 9))}, path)
    data = path.read_bytes()
    path.unlink()
    with pytest.raises(
        ValueError, match=r"init_from: .*model\.safetensors can't be read"
    ):
        weights_in(data[:-50])


def test_folder_without_weights(weights_in):
    with pytest.raises(ValueError, match="init_from: expected .* found neither"):
        weights_in(None)


@pytest.mark.parametrize("text", [None, "{", "3"])
def test_config_json_that_cannot_be_read(tmp_path, text):
    if text:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(ValueError, match=r"init_from: .*config\.json can't be read"):
        trainkit.huggingface.published_shape(str(tmp_path))


def test_name_that_the_hub_would_not_take():
    with pytest.raises(ConnectionError, match="init_from: 'a b/c/d' is no folder"):
        trainkit.huggingface.find_folder("a b/c/d")


# Text from a model.


@pytest.mark.parametrize(
    "options, words",
    [
        ({"temperature": -1}, "temperature (-1)"),
        ({"temperature": float("nan")}, "temperature (nan)"),
        ({"top_k": 0}, "top_k (0)"),
        ({"top_k": 1.5}, "top_k (1.5)"),
        ({"prompts": []}, "prompts: expected at least one"),
        ({"max_new_tokens": 0}, "max_new_tokens (0)"),
    ],
    ids=lambda x: str(x),
)
def test_options_of_generate(tutorial, small, options, words):
    model = tutorial.create_model(small())
    with pytest.raises(ValueError, match=re.escape(words)):
        trainkit.generate.generate_tokens(model, **({"prompts": [[1]]} | options))


def test_one_prompt_that_is_no_list(tutorial, small):
    model = tutorial.create_model(small())
    with pytest.raises(ValueError, match="prompts: expected a list .* found 'A class'"):
        trainkit.generate.generate(model, "A class")


# Checkpoints.


def test_folder_that_is_no_checkpoint(tmp_path):
    with pytest.raises(ValueError, match=f"{tmp_path} holds no configuration"):
        trainkit.checkpoints.load_params(ray.train.Checkpoint(str(tmp_path)), None)
    with pytest.raises(ValueError, match="found None"):
        trainkit.checkpoints.load_params(None, None)
