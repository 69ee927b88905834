"""What people get wrong: each error says what, where, what was expected, and what to do."""

import dataclasses
import json
import re
from pathlib import Path

import numpy as np
import pytest
import ray.train
import yaml
from safetensors.numpy import save_file

import trainkit.checkpoints
import trainkit.config
import trainkit.generate
import trainkit.huggingface
import trainkit.token_files

ROOT = Path(__file__).resolve().parent.parent
SMOKE = (ROOT / "configs/smoke.yaml").read_text()


# Configuration files.


@pytest.mark.parametrize(
    "text, words",
    [
        ("run_name: [a\n", ["mine.yaml", "line 2"]),
        ("seed: 1\nbatch_size: 8\nseed: 2\n", ["mine.yaml, line 3", "seed", "line 1"]),
        ("\tseed: 1\n", ["mine.yaml", "line 1"]),
        ("seed\n", ["mine.yaml", "`key: value`", "'seed'"]),
        ("1: 2\n", ["mine.yaml"]),
        ("init_from: 5\n", ["mine.yaml", "init_from", "string"]),
        ("data_dir: 5\n", ["mine.yaml", "data_dir", "string"]),
        ("data_dir:\n", ["mine.yaml", "data_dir", "string"]),
        ("dataset: ''\n", ["mine.yaml", "dataset", "at least 1 character"]),
    ],
)
def test_file_of_a_configuration(tmp_path, text, words):
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    with pytest.raises((ValueError, yaml.YAMLError)) as error:
        trainkit.config.load_config(path)
    assert all(word in str(error.value) for word in words), error.value


def test_file_that_is_no_text(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_bytes(b"seed: \xff\xfe\n")
    with pytest.raises(ValueError, match="mine.yaml is no text file: .*position 6"):
        trainkit.config.load_config(path)


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"num_workers": [4, 2]}, ["num_workers", "[2, 4]", "found [4, 2]"]),
        ({"num_workers": [2]}, ["num_workers"]),
        ({"profile_steps": [13, 10]}, ["profile_steps", "found [13, 10]"]),
        ({"profile_steps": [10, 10]}, ["profile_steps", "found [10, 10]"]),
        ({"storage_path": "ftp9://x"}, ["storage_path (ftp9://x)", "s3://", "gs://"]),
        ({"storage_path": "s3://"}, ["storage_path (s3://)", "s3://bucket/runs"]),
        ({"storage_path": ""}, ["storage_path", "at least 1"]),
        ({"run_name": "a/b"}, ["run_name", "a/b"]),
        ({"run_name": ".."}, ["run_name", ".."]),
        ({"run_name": ""}, ["run_name"]),
        ({"vocab_size": 0}, ["vocab_size is 0", "2048 tokens"]),
        ({"learning_rate": float("inf")}, ["learning_rate", "finite"]),
        ({"learning_rate": float("nan")}, ["learning_rate"]),
        ({"grad_clip": float("inf")}, ["grad_clip", "finite"]),
        ({"weight_decay": float("inf")}, ["weight_decay", "finite"]),
        ({"stall_timeout_s": float("inf")}, ["stall_timeout_s", "1000000000"]),
        ({"topology": "4x", "platform": "tpu"}, ["topology", "4x"]),
        ({"topology": "four", "platform": "tpu"}, ["topology", "four"]),
        ({"data_parallel": -5}, ["data_parallel", "-5"]),
        ({"data_parallel": 0}, ["data_parallel", "0"]),
        ({"batch_size": True}, ["batch_size", "True"]),
    ],
    ids=str,
)
def test_key_of_a_configuration(changes, words):
    with pytest.raises(ValueError) as error:
        trainkit.config.load_config(ROOT / "configs/smoke.yaml", **changes)
    assert all(word in str(error.value) for word in ["smoke.yaml", *words]), error.value


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
    with pytest.raises(FileNotFoundError, match="init_from: .* no model.safetensors"):
        weights_in(None)


@pytest.mark.parametrize("text", [None, "{", "3"])
def test_config_json_that_cannot_be_read(tmp_path, text):
    if text:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(ValueError, match=r"init_from: .*config\.json can't be read"):
        trainkit.huggingface.published_shape(str(tmp_path))


def test_name_that_the_hub_would_not_take():
    with pytest.raises(ConnectionError, match="init_from: cannot get 'a b/c/d'"):
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


def test_defaults_are_still_allowed(small):
    """The edges of what is refused."""
    assert small(num_workers=[2, 2]).worker_range == (2, 2)
    assert small(run_name="my_books-1a2b3c").run_path.name == "my_books-1a2b3c"
    assert small(storage_path="gs://bucket/runs").remote
    assert dataclasses.asdict(small(weight_decay=0.0))["weight_decay"] == 0
