"""The configuration: defaults, files, and what is refused before anything starts."""

import dataclasses
import math
import os
from pathlib import Path

import pytest
import ray
import yaml

import trainkit.config
import trainkit.workers

ROOT = Path(__file__).resolve().parent.parent


# gpt2-finetune starts from weights on the hub; test_huggingface loads it with local ones.
FILES = sorted(p for p in (ROOT / "configs").glob("*.yaml") if "finetune" not in p.name)


def test_defaults_are_gpt2_small():
    config = trainkit.config.TrainingConfig()
    assert (config.n_layer, config.n_head, config.n_embd) == (12, 12, 768)
    assert (config.vocab_size, config.padded_vocab_size) == (50_257, 50_304)
    assert config.batch_size * config.block_size == 491_520  # nanoGPT's tokens a step


CLASSES = (
    "ShapeConfig",
    "ModelConfig",
    "RecipeConfig",
    "MachineConfig",
    "TrainingConfig",
)


@pytest.mark.parametrize("name", CLASSES)
def test_every_attribute_is_a_field(name):
    """One without an annotation could be neither set nor checked."""
    config_class = getattr(trainkit.config, name)
    fields = {field.name for field in dataclasses.fields(config_class)}
    others = {
        key
        for key, value in vars(config_class).items()
        if not (key.startswith("_") or callable(value) or isinstance(value, property))
    }
    assert others <= fields


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_file_loads(path):
    config = trainkit.config.load_config(path)
    assert (
        Path(config.storage_path).is_absolute() and Path(config.data_dir).is_absolute()
    )
    workers = config.worker_range[1]
    devices = workers * config.devices_per_worker
    assert math.prod(config.mesh_shape(workers)) == devices
    config = dataclasses.replace(config, num_workers=workers)
    scaling = trainkit.workers.scaling_config(config)
    assert scaling.use_gpu == (config.platform == "gpu")
    assert scaling.use_tpu == (config.platform == "tpu")


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"batchsize": 3}, ["batchsize"]),
        ({"batch_size": "many"}, ["batch_size", "integer", "many"]),
        ({"batch_size": 0}, ["batch_size", "greater than 0"]),
        ({"learning_rate": "6e-4"}, ["learning_rate", "6e-4"]),
        ({"platform": "npu"}, ["platform", "'cpu', 'gpu' or 'tpu'"]),
        ({"n_embd": 130}, ["n_embd (130)", "n_head (4)"]),
        ({"batch_size": 7}, ["batch_size (7)", "2 devices", "6 or 8 would"]),
        ({"batch_size": 10, "num_workers": 4}, ["8 or 12 would", "num_workers: 2"]),
        ({"fsdp": 3}, ["fsdp", "num_workers x devices_per_worker (2)"]),
        (
            {"num_workers": [1, 3]},
            [
                "any number from 1 to 3, and 3 can't",
                "batch_size (8)",
                "1, 2 can",
                "[1, 2]",
            ],
        ),
        (
            {"num_workers": [8, 16], "batch_size": 480},
            ["9, 11, 13, 14 can't", "8, 10, 12, 15, 16 can", "num_workers: [15, 16]"],
        ),
        ({"num_workers": 3, "fsdp": 3, "batch_size": 9}, ["fsdp (3)", "n_embd (128)"]),
        (
            {"num_workers": 5, "tensor_parallel": 5, "n_head": 5, "n_embd": 125},
            ["tensor_parallel (5)", "50304"],
        ),
        ({"decay_steps": 5}, ["decay_steps (5)", "warmup_steps (10)"]),
        ({"learning_rate": 3e-5}, ["min_learning_rate (0.0002)", "rate (3e-05)"]),
        ({"seed": 2**31}, ["seed", "less than"]),
        ({"attention": "cudnn"}, ["attention: cudnn", "platform: gpu", "cpu"]),
        ({"attention": "cudnn", "platform": "gpu"}, ["attention: cudnn", "bfloat16"]),
        (
            {"attention": "cudnn", "platform": "gpu", "compute_dtype": "bfloat16"}
            | {"n_embd": 36, "n_head": 3},
            ["n_embd / n_head", "bfloat16 and 12"],
        ),
        ({"attention": "splash"}, ["attention: splash", "platform: tpu", "cpu"]),
        ({"data_dir": "s3://bucket/data"}, ["data_dir", "not a URL"]),
        ({"topology": "4x4"}, ["topology (4x4)", "platform: tpu", "cpu"]),
        ({"accelerator_type": "TPU-V6E"}, ["(TPU-V6E)", "platform: tpu", "cpu"]),
    ],
)
def test_mistakes_name_the_key(changes, words):
    with pytest.raises(ValueError) as error:
        trainkit.config.load_config(ROOT / "configs/smoke.yaml", **changes)
    assert all(word in str(error.value) for word in ["smoke.yaml", *words])


def test_file_that_is_no_mapping(tmp_path):
    path = tmp_path / "list.yaml"
    path.write_text("- 1\n- 2\n")
    with pytest.raises(ValueError, match="list.yaml"):
        trainkit.config.load_config(path)


def test_run_name_follows_the_recipe():
    def name(**changes):
        return trainkit.config.load_config(
            ROOT / "configs/smoke.yaml", **changes
        ).run_name

    assert name() == name(max_steps=7, num_workers=1) != name(learning_rate=1e-3)
    assert name() != name(max_documents=9) != name(max_documents=8)
    free = {"loss_chunks": 2, "scan_layers": True, "device_batch_size": 1, "fsdp": 2}
    assert name() == name(**free)  # rounding, at most


def test_stories_are_the_same_on_gpus_and_tpus():
    recipes = []
    for name in ("stories", "stories-tpu-v6e"):
        config = trainkit.config.load_config(ROOT / f"configs/{name}.yaml")
        fields = dataclasses.fields(trainkit.config.RecipeConfig)
        recipes.append({field.name: getattr(config, field.name) for field in fields})
        assert config.max_steps == config.decay_steps == 2_000
        assert config.run_name.startswith(name + "-")
    assert recipes[0] == recipes[1]


DIVISIONS = [  # file, what differs, workers, devices, micro-batches, windows in each
    ("gpt2-124m", {"num_workers": 1}, 1, 1, 15, 32),
    ("gpt2-124m", {"num_workers": 2}, 2, 2, 8, 30),
    ("gpt2-124m", {"num_workers": 8}, 8, 8, 2, 30),
    ("gpt2-124m", {"num_workers": 4, "devices_per_worker": 8}, 4, 32, 1, 15),
    ("gpt2-124m", {"num_workers": 32}, 32, 32, 1, 15),
    ("gpt2-124m-tpu-v6e", {}, 4, 16, 2, 16),
    ("gpt2-124m-tpu-v6e", {"topology": "8x8"}, 16, 64, 1, 8),
    ("gpt2-xl", {}, 4, 16, 2, 16),
    ("stories", {"num_workers": 1}, 1, 1, 4, 32),
    ("stories", {"num_workers": 32}, 32, 32, 1, 4),
    ("stories-tpu-v6e", {"topology": "8x8"}, 16, 64, 1, 2),
]


@pytest.mark.parametrize("name, changes, workers, devices, parts, windows", DIVISIONS)
def test_batch_follows_the_devices(name, changes, workers, devices, parts, windows):
    config = trainkit.config.load_config(ROOT / f"configs/{name}.yaml", **changes)
    found = trainkit.workers.describe_split(config)
    assert (found["workers"], found["devices"]) == (workers, devices)
    assert found["micro-batches"] == f"{parts} x {windows}"
    assert config.micro_batches == parts and windows <= config.device_batch_size
    assert parts * windows * math.prod(config.mesh_shape(workers)[:2]) == found["batch"]


def test_relative_places_mean_the_same_to_workers(tmp_path, monkeypatch):
    """Ray changes the directory of each worker."""
    monkeypatch.chdir(tmp_path)
    places = {"data_dir": "data", "storage_path": "runs"}
    config = trainkit.config.load_config(ROOT / "configs/smoke.yaml", **places)
    assert config.data_dir == str(tmp_path / "data")
    assert config.storage_path == str(tmp_path / "runs")
    config = trainkit.config.load_config(
        ROOT / "configs/smoke.yaml", storage_path="~/runs"
    )
    assert config.storage_path == str(Path.home() / "runs")
    config = trainkit.config.load_config(
        ROOT / "configs/smoke.yaml", storage_path="s3://a/b"
    )
    assert config.storage_path == "s3://a/b"
    with pytest.raises(ValueError, match="not a valid configuration"):
        trainkit.config.load_config(ROOT / "configs/smoke.yaml", data_dir=3)


def test_storage_where_the_notebook_lies_cannot_be_written(tmp_path, monkeypatch):
    """`access` is asked, because these tests may run as root, who may write anywhere."""
    monkeypatch.chdir(tmp_path)
    assert trainkit.config.storage_root() == tmp_path / "storage"
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert trainkit.config.storage_root() == Path.home() / "gpt2"


def test_travels_to_a_worker(cluster, small):
    """Both as plain data, which the trainer sends, and as an object."""

    @ray.remote
    def echo(settings, config):
        return trainkit.config.TrainingConfig(**settings) == config

    config = small()
    assert ray.get(echo.remote(dataclasses.asdict(config), config))


def test_configuration_is_data_and_not_a_program(tmp_path):
    path, proof = tmp_path / "evil.yaml", tmp_path / "proof"
    path.write_text(f"run_name: !!python/object/apply:os.system ['touch {proof}']\n")
    with pytest.raises(yaml.constructor.ConstructorError):
        trainkit.config.load_config(path)
    assert not proof.exists()


def test_file_that_is_not_there_names_those_that_are(tmp_path):
    (tmp_path / "other.yaml").touch()
    with pytest.raises(
        FileNotFoundError, match=r"no such file .*GPT2_CONFIG.*other.yaml"
    ):
        trainkit.config.load_config(tmp_path / "mine.yaml")


def test_home_and_variables_are_filled_in(tmp_path, monkeypatch):
    """In whatever is a path; a dataset of the hub keeps its name."""
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.setenv("BOOKS", "/books/*.txt")
    path = tmp_path / "mine.yaml"
    path.write_text("data_dir: $HOME/data\nstorage_path: ~/runs\ndataset: $BOOKS\n")
    config = trainkit.config.load_config(path)
    assert (config.data_dir, config.storage_path) == ("/home/me/data", "/home/me/runs")
    assert config.dataset == "/books/*.txt"
    hub = trainkit.config.load_config(path, dataset="roneneldan/TinyStories")
    assert hub.dataset == "roneneldan/TinyStories"
