"""The configuration: defaults, files, and what is refused before anything starts."""

import dataclasses
import json
import math
import os
import re
import shutil
from pathlib import Path

import pytest
import yaml
from conftest import ROOT, SLICE

import trainkit.config
from trainkit.config import TrainingConfig, load_config

SMOKE = ROOT / "configs/smoke.yaml"
NANOGPT = {  # config/train_gpt2.py and train.py of nanoGPT; 5 x 8 x 12 windows a step
    **{"n_layer": 12, "n_head": 12, "n_embd": 768, "block_size": 1024},
    **{"vocab_size": 50_257, "batch_size": 5 * 8 * 12},
    **{"learning_rate": 6e-4, "min_learning_rate": 6e-5, "warmup_steps": 2000},
    **{"decay_steps": 600_000, "max_steps": 600_000, "weight_decay": 1e-1},
    **{"beta1": 0.9, "beta2": 0.95, "grad_clip": 1.0, "seed": 1337},
    **{"eval_interval": 1000, "val_fraction": 0.0005},
}
GPU = {"platform": "gpu", "attention": "cudnn", "compute_dtype": "bfloat16"}
TPU = {"platform": "tpu", "attention": "splash", "num_workers": 1}
THIRDS = {"tensor_parallel": 3, "n_head": 3, "n_embd": 126}
V6E = SLICE | {"num_workers": None, "batch_size": 32}


def test_defaults_are_nanogpts():
    defaults = dataclasses.asdict(TrainingConfig())
    assert defaults | NANOGPT == defaults and not defaults["accept_changed_program"]
    assert defaults["eval_steps"] * defaults["batch_size"] < 4_434_897 // 1_024


LIMITS = [  # key, values at its limits that are allowed, and those that aren't
    ("grad_clip", [1e-9, 0.5, 1e9], [0.0, -1.0, math.inf, math.nan]),
    ("weight_decay", [0.0, 0.5], [-1e-9, math.inf, math.nan]),
    ("beta2", [0.0, 0.999], [-0.001, 1.0, 1.5]),
    ("stall_timeout_s", [0.001, 1e9], [0.0, 1e9 + 0.5, math.inf]),
    ("val_fraction", [1e-9, 0.999], [0.0, -0.5, 1.0, 1.5]),
    ("seed", [0, 2**31 - 1], [-1, 2**31]),
    ("max_failures", [-1, 0], [-2]),
    ("max_steps", [1], [0, -1, 1.0, "1", True]),
    ("num_workers", [1, (1, 2), [2, 2], None], [0, (0, 1), (2, 1), (1,), 1.0, "1"]),
    ("run_name", ["a", "a.b-c", "my_books-1a2b3c", "a" * 128], ["", "..", "-a", ".a"]),
    ("run_name", [], ["/a", "a/b", "bücher", "a [1]", "x*", "q?", "a%20", "a" * 129]),
    ("fsdp", [1, 4], [0, -1, 3, 64]),  # n_embd is 32
    ("learning_rate", [1e-3, 1e-2], [math.inf, math.nan, "6e-4"]),
    ("min_learning_rate", [1e-2], [1.01e-2]),  # learning_rate is 1e-2
    ("decay_steps", [5], [4, 3]),  # warmup_steps is 4
    ("loss_chunks", [1, 16], [3, 17]),  # block_size is 16
    ("storage_path", ["s3://b", "gs://b/runs", "/r"], ["s3://", "http://b", "s3:///x"]),
    ("storage_path", ["/a b#é/c%20", "s3://b/a.b/+/", "/a-b:c"], ["", 3, "/${NO}/a"]),
    ("storage_path", [], ["/tmp/a[1]", "/a/x*y", "/a\\b", "s3://b/q?", "s3://b/a]"]),
    ("storage_path", [], ["s3://b/a b", "s3://b/é", "s3://b/%20", "gs://b/#"]),
    ("storage_path", [], ["s3://b/../x", "s3://b/.", "s3://b//a"]),
    ("data_dir", ["/d"], ["", "s3://b/data", 3, None]),
    ("dataset", ["a"], [""]),
    ("topology", [None], ["4x", "four", "4", "0x4"]),
]


@pytest.mark.parametrize("key, good, bad", LIMITS)
def test_limits_of_a_key(small, key, good, bad):
    for value in good:
        found = getattr(small(**{key: value}), key)
        assert found == (tuple(value) if isinstance(value, list) else value)
    for value in bad:
        with pytest.raises(ValueError, match=key):
            small(**{key: value})
            pytest.fail(f"{key} may be {value!r}")


MISTAKES = [  # what is set beside the smoke run's values, and what the error says
    ({"batchsize": 3}, "batchsize (3): no such key; there are batch_size,"),
    ({"zzz": 1}, "zzz (1): no such key; there are |, vocab_size, "),
    ({"batch_size": "many"}, "batch_size ('many'): Input should be a valid integer"),
    ({"seed": -1, "beta1": 2.0}, "seed (-1): |beta1 (2.0): |; "),
    ({"vocab_size": 9}, "vocab_size (9): expected 2048 or more|tokenizer builtin"),
    # Kernels.
    ({"attention": "cudnn"}, "attention (cudnn): |platform gpu, and not cpu"),
    ({"attention": "splash"}, "attention (splash): |platform tpu, and not cpu"),
    (GPU | {"compute_dtype": "float32"}, "compute_dtype (float32): expected bfloat16"),
    (GPU | {"n_embd": 528, "n_head": 2}, "n_head (2): |n_embd / n_head (264)"),
    (GPU | {"n_embd": 54, "n_head": 6}, "n_head (6): |(9)"),
    (TPU | {"block_size": 768}, "block_size (768): expected a multiple of 512"),
    # The mesh, and a batch on it.
    ({"batch_size": 7}, "batch_size (7): |2 devices; 6 or 8 would do"),
    ({"batch_size": 3, "num_workers": 8}, "batch_size (3): |8 devices; 8 would do"),
    ({"fsdp": 4}, "fsdp (4): expected to divide 2 devices with tensor_parallel (1)"),
    ({"tensor_parallel": 4}, "fsdp (1): |2 devices with tensor_parallel (4)"),
    (THIRDS, "tensor_parallel (3): expected a divisor of padded_vocab_size (2048)"),
    ({"n_embd": 130}, "n_head (4): expected a divisor of n_embd (130)"),
    ({"tensor_parallel": 8}, "tensor_parallel (8): expected a divisor of n_head (4)"),
    # Elastic ranges, of which Ray may start any number.
    ({"num_workers": [4, 2]}, "num_workers ((4, 2)): |[2, 4]"),
    ({"num_workers": [1, 3], "batch_size": 8}, "num_workers ((1, 3)): |(8)|; 1, 2 do"),
    # TPU slices: one of more than eight chips has four in each host.
    ({"topology": "4x4"}, "platform (cpu): expected tpu|topology (4x4)"),
    ({"accelerator_type": "TPU-V6E"}, "platform (cpu): expected tpu|(TPU-V6E)"),
    (V6E | {"devices_per_worker": 8}, "devices_per_worker (8): expected 4,"),
    (V6E | {"num_workers": 3}, "num_workers (3): expected a multiple of 4|4x4"),
    (V6E | {"num_workers": [4, 6]}, "num_workers ((4, 6)): expected a multiple of 4"),
    (V6E | {"topology": "2x4", "devices_per_worker": 3}, "(3): expected a divisor of"),
    (V6E | {"topology": "3x3"}, "topology (3x3): expected one of TPU-V6E|, 4x4,"),
    (V6E | {"topology": None, "num_workers": 2}, "num_workers (2): expected 1, or"),
    (V6E | {"batch_size": 30}, "batch_size (30): |16 devices; 16 or 32 would do"),
    (V6E | {"num_workers": 8, "fsdp": 32}, "fsdp (32): expected to divide 16 devices"),
]


@pytest.mark.parametrize("changes, words", MISTAKES, ids=str)
def test_mistakes_name_the_key(changes, words):
    """In one line, with its value, and what would do."""
    with pytest.raises(ValueError) as error:
        load_config(SMOKE, **changes)
    said = str(error.value)
    assert said.startswith(f"{SMOKE}: ") and "\n" not in said
    assert all(word in said for word in words.split("|")), said


ALLOWED = [  # what is set, workers, and the mesh
    ({}, (2, 2), (2, 1, 1)),
    ({"num_workers": 6, "batch_size": 24, "devices_per_worker": 4}, (6, 6), (24, 1, 1)),
    ({"num_workers": 8, "fsdp": 2, "tensor_parallel": 4}, (8, 8), (1, 2, 4)),
    ({"num_workers": [1, 2]}, (1, 2), (2, 1, 1)),
    (GPU | {"n_embd": 512, "n_head": 2}, (2, 2), (2, 1, 1)),  # heads of 256
    (GPU | {"n_embd": 48, "n_head": 6}, (2, 2), (2, 1, 1)),  # of 8
    (TPU | {"block_size": 1_024}, (1, 1), (1, 1, 1)),
    (V6E, (4, 4), (16, 1, 1)),
    (V6E | {"num_workers": [4, 8]}, (4, 8), (32, 1, 1)),
    (V6E | {"fsdp": 4, "tensor_parallel": 2}, (4, 4), (2, 4, 2)),
    (V6E | {"topology": "2x4", "devices_per_worker": 8}, (1, 1), (8, 1, 1)),
    (V6E | {"topology": "1x1", "devices_per_worker": 1}, (1, 1), (1, 1, 1)),
    (V6E | {"topology": "2x2x4", "accelerator_type": "TPU-V4"}, (4, 4), (16, 1, 1)),
    (V6E | {"topology": None, "num_workers": 1}, (1, 1), (4, 1, 1)),
]


@pytest.mark.parametrize("changes, workers, mesh", ALLOWED, ids=str)
def test_machines_that_are_allowed(changes, workers, mesh):
    config = load_config(SMOKE, **changes)
    assert config.worker_range == workers
    assert config.mesh_shape(workers[1]) == mesh
    kind = {"cpu": "CPU", "gpu": "GPU", "tpu": "TPU"}[config.platform]
    assert kind in config.resources_per_worker
    # As it travels to a worker, and as a checkpoint keeps it.
    settings = json.loads(json.dumps(dataclasses.asdict(config)))
    assert TrainingConfig(**settings) == config


def test_tokens_and_rows_of_a_vocabulary():
    """50,304 as in nanoGPT's model."""
    two_bytes = [(50_257, 50_304, "uint16"), (65_536, 65_536, "uint16")]
    for vocab_size, rows, dtype in (*two_bytes, (65_537, 65_664, "uint32")):
        shape = trainkit.config.ShapeConfig(vocab_size=vocab_size)
        assert (shape.padded_vocab_size, shape.token_dtype) == (rows, dtype)


DIVISIONS = [  # file, what differs, devices, micro-batches, windows in each
    ("gpt2-124m", {"num_workers": 1}, 1, 15, 32),
    ("gpt2-124m", {"num_workers": 1, "batch_size": 33}, 1, 3, 11),  # few, and even
    ("gpt2-124m", {"num_workers": 1, "batch_size": 37}, 1, 37, 1),
    ("gpt2-124m", {"num_workers": 4, "devices_per_worker": 8}, 32, 1, 15),
    ("gpt2-124m-tpu-v6e", {}, 16, 2, 16),
    ("stories", {"num_workers": (1, 2)}, 2, 4, 16),  # that of the most workers
]


@pytest.mark.parametrize("name, changes, devices, parts, windows", DIVISIONS)
def test_batch_follows_the_devices(name, changes, devices, parts, windows):
    config = load_config(ROOT / f"configs/{name}.yaml", **changes)
    mesh = config.mesh_shape(config.worker_range[1])
    assert math.prod(mesh) == devices and config.micro_batches == parts
    assert config.device_windows == parts * windows <= parts * config.device_batch_size
    assert config.device_windows * math.prod(mesh[:2]) == config.batch_size


def test_files_load():
    """And stories are the same on GPUs and TPUs."""
    found = {}
    for path in (ROOT / "configs").glob("*.yaml"):
        if path.stem != "gpt2-finetune":  # which test_huggingface loads, with weights
            found[path.stem] = config = load_config(path)
            assert re.fullmatch(rf"{path.stem}-[0-9a-f]{{6}}", config.run_name)
    one, other = found["stories"], found["stories-tpu-v6e"]
    recipe = {field.name for field in dataclasses.fields(trainkit.config.RecipeConfig)}
    same = [getattr(one, key) == getattr(other, key) for key in (*recipe, "max_steps")]
    assert all(same) and one.max_steps == one.decay_steps


WEB = "Skylion007-openwebtext"
PART = "dataset: x/y\ntext_column: t\nmax_documents: 9"
SHARE = "dataset: x/y\ndataset_config: de.1\nval_fraction: 0.2"
BUILTIN = "tokenizer: builtin\ndataset: builtin"
NAMES = [  # a file, what it says, its run, and its data: the same recipe, the same folders
    ("gpt2-124m", "loss_chunks: 2", "gpt2-124m-44136f", WEB),
    ("a", "max_steps: 7\nfsdp: 2\nscan_layers: true", "a-44136f", WEB),
    ("bücher", PART, "bucher-4aa4ec", "x-y-9-t"),
    ("Éa [1]", BUILTIN, "Ea-1-61605c", "builtin-builtin"),
    ("a", SHARE, "a-d234bf", "x-y-de.1-0.2"),
    ("书", "dataset: книги", "run-44d198", "книги"),
    ("a", "dataset: .", "a-36b18c", "text"),
    ("..x", "", "x-44136f", WEB),
    ("v1.5_b", "run_name: mine", "mine", WEB),
]


@pytest.mark.parametrize("stem, text, run, data", NAMES, ids=str)
def test_names_of_a_run_and_its_data(tmp_path, monkeypatch, stem, text, run, data):
    monkeypatch.chdir(tmp_path)
    Path(f"{stem}.yaml").write_text(text)
    config = load_config(f"{stem}.yaml")
    assert config.run_name == run
    assert Path(config.data_dir) == tmp_path / "storage/data" / data
    assert Path(config.run_path) == tmp_path / "storage/runs" / config.run_name


def test_another_copy_of_the_folder_continues_the_run(tmp_path, monkeypatch):
    """As a job has, whose folder is a new one each time; what is beside it moves along."""
    names = set()
    for folder in (tmp_path / "a", tmp_path / "b"):
        folder.mkdir()
        monkeypatch.chdir(folder)
        shutil.copy(ROOT / "trainkit/builtin_tokenizer.json", "tokens.json")
        Path("books.yaml").write_text("tokenizer: tokens.json")
        config = load_config("books.yaml")
        assert config.tokenizer == str(folder / "tokens.json")
        names.add(config.run_name)
    assert len(names) == 1


PLACES = [  # a key, its value, and where that is, from a folder that workers don't share
    ("data_dir", "data", "HERE/data"),
    ("storage_path", "~/runs", "/home/me/runs"),
    ("storage_path", "s3://$BUCKET/b", "s3://a/b"),
    ("dataset", "$BOOKS/*.txt", "/books/*.txt"),
    ("dataset", "my/*.txt", "my/*.txt"),
    # A folder that is here comes before a name on the hub, but not before our own words.
    ("tokenizer", "mine", "HERE/mine"),
    ("init_from", "a/b", "a/b"),
    ("tokenizer", "gpt2", "gpt2"),
    ("init_from", "scratch", "scratch"),
]


@pytest.mark.parametrize("key, value, expected", PLACES)
def test_places_mean_the_same_to_workers(tmp_path, monkeypatch, key, value, expected):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.setenv("BOOKS", "/books")
    monkeypatch.setenv("BUCKET", "a")
    for name in ("mine", "gpt2", "scratch"):
        Path(name).mkdir()
    found = getattr(TrainingConfig(**{key: value}), key)
    assert found == expected.replace("HERE", str(tmp_path))


def test_storage_where_the_notebook_lies_cannot_be_written(tmp_path, monkeypatch):
    """`access` is asked, because these tests may run as root, who may write anywhere."""
    monkeypatch.chdir(tmp_path)
    assert trainkit.config.storage_root() == tmp_path / "storage"
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert trainkit.config.storage_root() == Path.home() / "gpt2"


FILES_OF_OTHERS = [
    ("run_name: [a\n", "line 2"),
    ("seed: 1\nbatch_size: 8\nseed: 2\n", "mine.yaml, line 3: seed is given a second"),
    ("- 1\n- 2\n", "expected `key: value` lines, found [1, 2]"),
    ("1: 2\n", "1 (2): no such key"),
    ("learning_rate: 1e-3\n", "learning_rate ('1e-3'): |; YAML takes 1.0e-3 for one"),
    ("seed: \udcff\n", "position 6"),  # which is no UTF-8
    ("run_name: !!python/object/apply:os.system ['touch proof']\n", "line 1"),
]


@pytest.mark.parametrize("text, words", FILES_OF_OTHERS)
def test_files_that_cannot_be_read(tmp_path, monkeypatch, text, words):
    """They are data and no programs."""
    monkeypatch.chdir(tmp_path)
    Path("mine.yaml").write_bytes(os.fsencode(text))
    with pytest.raises((ValueError, yaml.YAMLError)) as error:
        load_config("mine.yaml")
    said = str(error.value)
    assert all(word in said for word in ("mine.yaml", *words.split("|"))), said
    assert [*map(str, Path().iterdir())] == ["mine.yaml"]
