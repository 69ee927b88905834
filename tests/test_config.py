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


V6E = {
    "platform": "tpu",
    "accelerator_type": "TPU-V6E",
    "topology": "4x4",
    "devices_per_worker": 4,
    "num_workers": None,
    "batch_size": 32,
    "n_head": 4,
}


NANOGPT = {  # config/train_gpt2.py and train.py of nanoGPT; 5 x 8 x 12 windows a step
    "n_layer": 12,
    "n_head": 12,
    "n_embd": 768,
    "block_size": 1024,
    "vocab_size": 50_257,
    "dropout": 0.0,
    "batch_size": 5 * 8 * 12,
    "learning_rate": 6e-4,
    "min_learning_rate": 6e-5,
    "warmup_steps": 2000,
    "decay_steps": 600_000,
    "max_steps": 600_000,
    "weight_decay": 1e-1,
    "beta1": 0.9,
    "beta2": 0.95,
    "grad_clip": 1.0,
    "seed": 1337,
    "eval_interval": 1000,
    "val_fraction": 0.0005,
}
ONE_OF_EACH = {  # nothing is divided, skipped, traced, or taken by surprise
    "devices_per_worker": 1,
    "fsdp": 1,
    "tensor_parallel": 1,
    "data_parallel": -1,
    "loss_chunks": 1,
    "cpus_per_worker": 1.0,
    "scan_layers": False,
    "autoscaling": False,
    "accept_changed_program": False,
    "profile_steps": None,
    "max_documents": None,
}


def test_defaults_are_nanogpts():
    defaults = dataclasses.asdict(trainkit.config.TrainingConfig())
    expected = NANOGPT | ONE_OF_EACH
    assert {key: defaults[key] for key in expected} == expected
    # As the guide says: 32 windows at once, 1,800 s, three restarts.
    kept = ("device_batch_size", "stall_timeout_s", "max_failures", "log_interval")
    assert [defaults[key] for key in kept] == [32, 1_800.0, 3, 100]
    assert defaults["eval_steps"] * defaults["batch_size"] < 4_434_897 // 1_024


LIMITS = [  # key, values at its limits that are allowed, and those that aren't
    ("grad_clip", [1e-9, 0.5, 1e9], [0.0, -1.0, math.inf, math.nan]),
    ("cpus_per_worker", [0.01], [0.0, math.inf]),
    ("weight_decay", [0.0, 0.5], [-1e-9, math.inf, math.nan]),
    ("dropout", [0.0, 0.5, 0.999], [-0.001, 1.0, 1.5]),
    ("beta1", [0.0, 0.9999], [-0.1, 1.0]),
    ("stall_timeout_s", [0.001, 1e9], [0.0, 1e9 + 0.5, math.inf]),
    ("text_column", ["t"], ["", None]),
    ("val_fraction", [1e-9, 0.5, 0.999], [0.0, -0.5, 1.0, 1.5]),
    ("seed", [0, 2**31 - 1], [-1, 2**31]),
    ("max_failures", [-1, 0], [-2]),
    ("max_steps", [1], [0, -1, 1.0, "1", True]),
    ("profile_steps", [(1, 2), [10, 13]], [(0, 2), (2, 2), (3, 2), (1, 2, 3), "12"]),
    ("num_workers", [1, (1, 2), [2, 2], None], [0, (0, 1), (2, 1), 1.0]),
    ("run_name", ["a", "a.b-c"], ["", ".a", "/a", "a/b"]),
    ("block_size", [1, 7], [0, 7.0]),
    ("fsdp", [1, 4], [0, -1]),
    ("learning_rate", [1e-3, 1e-2], [9.99e-4]),  # min_learning_rate is 1e-3
    ("decay_steps", [5], [4, 3]),  # warmup_steps is 4
    ("loss_chunks", [1, 16], [3, 17]),  # block_size is 16
    ("n_head", [1, 32], [3, 64]),  # n_embd is 32
    ("storage_path", ["s3://b", "gs://b/runs"], ["s3://", "http://b", "s3:///x", ""]),
    ("data_dir", ["d"], ["", "s3://b/data"]),
]
CASES = [(key, value, True) for key, good, _ in LIMITS for value in good]
CASES += [(key, value, False) for key, _, bad in LIMITS for value in bad]


@pytest.mark.parametrize("key, value, allowed", CASES)
def test_limits_of_a_key(small, key, value, allowed):
    if allowed:
        config = small(**{key: value})
        found = getattr(config, key)
        assert found == (tuple(value) if isinstance(value, list) else value)
        return
    with pytest.raises(ValueError, match=key):
        small(**{key: value})


@pytest.mark.parametrize(
    "vocab_size, rows, dtype",
    [
        (1, 128, "uint16"),
        (128, 128, "uint16"),
        (129, 256, "uint16"),
        (50_257, 50_304, "uint16"),  # as in nanoGPT's model
        (65_536, 65_536, "uint16"),
        (65_537, 65_664, "uint32"),
    ],
)
def test_tokens_and_rows_of_a_vocabulary(vocab_size, rows, dtype):
    shape = trainkit.config.ShapeConfig(vocab_size=vocab_size)
    assert (shape.padded_vocab_size, shape.token_dtype) == (rows, dtype)


@pytest.mark.parametrize(
    "changes, workers, mesh",
    [
        ({}, 8, (8, 1, 1)),
        ({"devices_per_worker": 4}, 6, (24, 1, 1)),
        ({"devices_per_worker": 4, "fsdp": 3, "tensor_parallel": 2}, 6, (4, 3, 2)),
        ({"data_parallel": 2, "fsdp": 4}, 8, (2, 4, 1)),
        ({"data_parallel": 5}, 8, (5, 1, 1)),
        ({"fsdp": 16}, 8, (0, 16, 1)),
    ],
)
def test_data_axis_takes_what_the_others_leave(changes, workers, mesh):
    config = trainkit.config.MachineConfig(**changes)
    assert config.mesh_shape(workers) == mesh


@pytest.mark.parametrize(
    "windows, most, parts",
    [(1, 32, 1), (32, 32, 1), (33, 32, 3), (37, 32, 37), (60, 32, 2), (64, 31, 4)],
)
def test_parts_are_as_few_as_divide_evenly(windows, most, parts):
    assert trainkit.config.count_parts(windows, most) == parts


HEADS = [  # width, heads, type; whether cuDNN's kernel takes heads of that size
    (768, 12, "bfloat16", True),
    (768, 12, "float32", False),
    (512, 2, "bfloat16", True),  # 256
    (528, 2, "bfloat16", False),  # 264
    (48, 6, "bfloat16", True),  # 8
    (54, 6, "bfloat16", False),  # 9
    (42, 6, "bfloat16", False),  # 7
]


@pytest.mark.parametrize("width, heads, dtype, fits", HEADS)
def test_heads_that_a_kernel_takes(small, width, heads, dtype, fits):
    gpu = {"platform": "gpu", "attention": "cudnn", "compute_dtype": dtype}
    shape = {"n_embd": width, "n_head": heads}
    if fits:
        return small(**gpu, **shape)
    with pytest.raises(ValueError, match=f"attention: cudnn .*{width // heads}"):
        small(**gpu, **shape)
    small(**gpu | {"attention": "xla"}, **shape)


def test_the_tpus_kernel_takes_512_tokens_at_once(small):
    tpu = {"platform": "tpu", "attention": "splash", "num_workers": 1}
    assert small(**tpu, block_size=1_024).block_size == 1_024
    for size in (511, 513, 256, 768):
        with pytest.raises(ValueError, match=rf"block_size \({size}\).*of 512"):
            small(**tpu, block_size=size)
        small(**tpu | {"attention": "xla"}, block_size=size)


def test_most_workers_that_share_a_batch(small):
    """Up to a number; of slices, whole ones."""
    most = trainkit.config.most_workers
    config = small(batch_size=12)
    found = [most(config, n) for n in range(9)]
    assert found == [None, 1, 2, 3, 4, 4, 6, 6, 6]
    wide = small(batch_size=12, fsdp=2)
    assert [most(wide, n) for n in (1, 2, 3, 7)] == [None, 2, 2, 6]
    slices = small(**V6E | {"batch_size": 48})
    assert [most(slices, n) for n in (3, 4, 11, 12)] == [None, 4, 4, 12]


@pytest.mark.parametrize(
    "workers, batch, longest",
    [
        ((1, 6), 12, "[1, 4]"),  # 5 can't
        ((2, 8), 60, "[2, 6]"),
        ((5, 8), 56, "[7, 8]"),
        ((3, 5), 4, "[4, 4]"),
        ((2, 4), 8, "[4, 4]"),  # of two that are as long, the larger
    ],
)
def test_an_elastic_range_without_gaps_is_named(small, workers, batch, longest):
    with pytest.raises(ValueError) as error:
        small(num_workers=workers, batch_size=batch)
    message = str(error.value)
    assert f"any number from {workers[0]} to {workers[1]}, " in message
    assert f"Set num_workers: {longest}, or" in message
    low, high = map(int, longest.strip("[]").split(", "))
    assert small(num_workers=(low, high), batch_size=batch).worker_range == (low, high)


@pytest.mark.parametrize(
    "changes, words",
    [
        (
            {"num_workers": 3, "batch_size": 10},
            "over 3 devices; 9 or 12 would, and so would num_workers: 2",
        ),
        (
            {"num_workers": 8, "batch_size": 6},
            "over 8 devices; 8 would, and so would num_workers: 6",
        ),
        (
            {"num_workers": 3, "fsdp": 2, "batch_size": 6},
            r"\(1 x 2 x 1\) is not .* \(3\)",
        ),
        (
            {"num_workers": 4, "data_parallel": 2, "batch_size": 6},
            r"\(2 x 1 x 1\) is not",
        ),
        ({"num_workers": 2, "tensor_parallel": 2, "vocab_size": 129}, None),
        (
            {"num_workers": 3, "fsdp": 3, "batch_size": 6},
            r"fsdp \(3\) must divide n_embd",
        ),
    ],
)
def test_meshes_that_share_nothing_evenly(small, changes, words):
    if words is None:
        return small(**changes)
    with pytest.raises(ValueError, match=words):
        small(**changes)


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
    with pytest.raises(dataclasses.FrozenInstanceError):
        config_class().run_name = "other"
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
    assert {"cpu": "CPU", "gpu": "GPU", "tpu": "TPU"}[
        config.platform
    ] in config.resources_per_worker


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
            {"num_workers": [1, 3], "batch_size": 8},
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
            ["tensor_parallel (5)", "2048"],
        ),
        ({"decay_steps": 5}, ["decay_steps (5)", "warmup_steps (20)"]),
        ({"learning_rate": 3e-5}, ["min_learning_rate (0.0001)", "rate (3e-05)"]),
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
        # A slice of more than eight chips has four in each host.
        (V6E | {"devices_per_worker": 8}, ["devices_per_worker", "4 chips", "found 8"]),
        (V6E | {"devices_per_worker": 1}, ["devices_per_worker", "4 chips", "found 1"]),
        (V6E | {"num_workers": 3}, ["4x4", "takes 4 workers", "found 3"]),
        (V6E | {"num_workers": [4, 6]}, ["4x4", "takes 4 workers", "found (4, 6)"]),
        (V6E | {"topology": "2x4", "devices_per_worker": 3}, ["2x4", "3 chips each"]),
        (
            V6E | {"topology": "2x2", "devices_per_worker": 8},
            ["takes 1 workers with 8"],
        ),
        (V6E | {"topology": "3x3"}, ["topology", "TPU-V6E has no 3x3", "4x4"]),
        (V6E | {"topology": None, "num_workers": 2}, ["num_workers (2)", "slice"]),
        # Two slices can't divide a data axis of one.
        (V6E | {"num_workers": 8, "fsdp": 32}, ["2 slices must divide", "which is 1"]),
    ],
)
def test_mistakes_name_the_key(changes, words):
    with pytest.raises(ValueError) as error:
        trainkit.config.load_config(ROOT / "configs/smoke.yaml", **changes)
    assert all(word in str(error.value) for word in ["smoke.yaml", *words])


@pytest.mark.parametrize(
    "changes, workers, mesh",
    [
        ({}, 4, (16, 1, 1)),
        ({"num_workers": 8}, 8, (32, 1, 1)),
        ({"fsdp": 4, "tensor_parallel": 2}, 4, (2, 4, 2)),
        ({"num_workers": 8, "fsdp": 16}, 8, (2, 16, 1)),
        ({"topology": "2x4", "devices_per_worker": 8}, 1, (8, 1, 1)),
        ({"topology": "2x4"}, 2, (8, 1, 1)),
        ({"topology": "1x1", "devices_per_worker": 1}, 1, (1, 1, 1)),
        ({"topology": "2x2x4", "accelerator_type": "TPU-V4"}, 4, (16, 1, 1)),
        ({"topology": None, "num_workers": 1}, 1, (4, 1, 1)),
    ],
)
def test_slices_that_are_made(changes, workers, mesh):
    config = trainkit.config.load_config(ROOT / "configs/smoke.yaml", **V6E | changes)
    assert config.worker_range == (workers, workers)
    assert config.mesh_shape(workers) == mesh


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

    assert name() == name(max_steps=7, num_workers=1) != name(learning_rate=2e-3)
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


def test_published_weights_bring_their_shape(tmp_path, monkeypatch):
    shape = {"n_layer": 3, "n_head": 5, "n_embd": 80, "block_size": 33}
    shape |= {"vocab_size": 1_237}
    monkeypatch.setattr("trainkit.huggingface.published_shape", lambda source: shape)
    asked = []
    monkeypatch.setattr(
        "trainkit.huggingface.check_tokenizer", lambda *a: asked.append(a)
    )
    path = tmp_path / "mine.yaml"
    path.write_text("init_from: somebody/a-gpt2\nn_head: 5\n")
    config = trainkit.config.load_config(path)
    assert {key: getattr(config, key) for key in shape} == shape
    assert config.init_from == "somebody/a-gpt2"
    assert asked == [("somebody/a-gpt2", "gpt2")]
    with pytest.raises(ValueError, match="a-gpt2 has .*leave out what contradicts it"):
        trainkit.config.load_config(path, n_layer=4)


def test_an_elastic_runs_split_is_that_of_the_most_workers(small):
    found = trainkit.workers.describe_split(small(num_workers=(1, 2), batch_size=8))
    assert (found["workers"], found["devices"], found["mesh"]) == (2, 2, "2 x 1 x 1")
    assert (found["per device"], found["micro-batches"]) == (4, "1 x 4")
