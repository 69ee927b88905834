"""Configurations' files: what they say, what is refused, and how a run is named."""

import json
import re
import shutil
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from conftest import ROOT
from ray.train import ScalingConfig
from ruamel.yaml.error import YAMLError
from samples import python

import trainkit.tokenization
from trainkit import documents, launch
from trainkit.config import TrainingConfig
from trainkit.config_files import load_config

FILES = sorted(path.name for path in (ROOT / "configs").glob("*.yaml"))


@pytest.fixture
def load(tmp_path):
    """load_config of a file with this text."""

    def load(text: str = "") -> TrainingConfig:
        path = tmp_path / "mine.yaml"
        path.write_text(text)
        return load_config(path, tmp_path)

    return load


@pytest.mark.parametrize("name", FILES)
def test_what_a_file_says_fits_together(tutorial, name):
    """A dataset that the notebook has, machines that can share the batch and their kernel, a
    rate that falls for as long as the run goes on, and windows that OpenWebText has.
    """
    config = load_config(ROOT / "configs" / name, "storage", init_from=None)
    assert hasattr(tutorial, config.dataset) or hasattr(documents, config.dataset)
    scaling = ScalingConfig(**config.scaling)
    for number in launch._numbers_of_devices(scaling):
        config.layout(number)
    kernel = "splash" if scaling.use_tpu else "cudnn" if scaling.use_gpu else "xla"
    assert config.attention == kernel
    assert config.warmup_steps < config.decay_steps == config.max_steps
    if config.dataset == "openwebtext":
        tokens = 4_434_897  # of val.bin, as nanoGPT's page of the same split says
        assert config.eval_windows <= (tokens - 1) // config.block_size


@pytest.mark.parametrize(
    "name, differ", [("stories", set()), ("gpt2-124m", {"batch_size"})]
)
def test_a_run_on_other_machines_has_the_same_recipe(name, differ):
    files = (ROOT / f"configs/{name}{where}.yaml" for where in ("", "-tpu-v6e"))
    gpu, tpu = (load_config(file, "storage").recipe for file in files)
    assert {key for key in gpu if gpu[key] != tpu[key]} == differ


REFUSED = [
    ("batchsize: 4", "batchsize"),
    ("keep_every: 1500", "keep_every: 1500 is no multiple of"),
    ("grad_clip: .inf", "grad_clip"),
    ("data_dir: s3://bucket/data", "data_dir"),
    ("storage_path: $NOWHERE/runs", "storage_path.*NOWHERE/runs names a variable"),
    ("storage_path: s3://b/runs?endpoint_override=x", "storage_path"),
    ("run_name: 'a[1]'", "run_name"),
    ("storage_path: '/runs/*'", "storage_path"),
    ("scaling: {use_gpu: no}", "use_gpu: expected true or false, found 'no'"),
]


@pytest.mark.parametrize("text, key", REFUSED)
def test_a_mistake_names_the_file_and_the_key(load, text, key):
    with pytest.raises(ValueError, match=f"(?s)mine.yaml: .*{key}"):
        load(text)


def test_a_configuration_with_a_mapping_is_still_one_for_jit(load):
    """It is hashed and compared. A range is Ray's, also of what JSON has made a list."""
    config = load("scaling: {num_workers: [2, 4], resources_per_worker: {CPU: 2}}")
    assert ScalingConfig(**config.scaling).num_workers == (2, 4)
    again = TrainingConfig(**json.loads(json.dumps(asdict(config))))
    assert again == config and hash(again) == hash(config)
    other = replace(config, scaling={"num_workers": 3})
    assert other != config and other.recipe == config.recipe


def test_a_key_that_is_given_twice_is_refused(load):
    """One of them would have no effect. A file may give none."""
    with pytest.raises(YAMLError, match='duplicate key "seed"'):
        load("seed: 1\nseed: 2")
    assert load("# all as it is").seed == TrainingConfig.seed


def test_places_and_names(load, tmp_path, monkeypatch):
    """Workers run in other folders, so paths are absolute; names of a hub stay."""
    monkeypatch.chdir(tmp_path)
    config = load("run_name: a\ndata_dir: ~/d\nstorage_path: s3://bucket/runs")
    assert config.data_dir == str(Path.home() / "d")
    assert config.run_path.as_posix() == "s3://bucket/runs/a"
    monkeypatch.setenv("SCRATCH", "/scratch")
    config = load("storage_path: $SCRATCH/runs\ndata_dir: file:///shared/data")
    assert (config.storage_path, config.data_dir) == ("/scratch/runs", "/shared/data")
    (tmp_path / "gpt2").mkdir()  # such as an exported model
    assert load("tokenizer: gpt2").tokenizer == "gpt2"
    smaller = load("tokenizer: builtin")
    assert smaller.vocab_size == 2_048
    assert load("tokenizer: builtin\nvocab_size: 2100").vocab_size == 2_100
    assert smaller.data_dir.endswith("/data/openwebtext-builtin")
    own = trainkit.tokenization.load("builtin").path
    for name in ("mine-1.0", "mine-1.1"):  # which have a folder each
        (tmp_path / name).mkdir()
        shutil.copy(own, tmp_path / name / "tokenizer.json")
        other = load(f"tokenizer: ./{name}")
        assert other.data_dir.endswith(f"/data/openwebtext-{name}")


NAMES = """
import builtins, sys
from trainkit.config_files import load_config
builtins.__IPYTHON__ = True  # as in a kernel
for _ in range(2):
    print(load_config(sys.argv[1], "storage").run_name)
"""


def test_a_run_is_named_by_file_and_time_in_a_kernel_only(tmp_path):
    """Two in one second differ; in a job, and in a script, which are tried again, none."""
    path = tmp_path / "my own.yaml"
    path.write_text("tokenizer: gpt2")
    names = python(NAMES, path, RAY_JOB_CONFIG_JSON_ENV_VAR=None).splitlines()
    assert all(re.fullmatch(r"my own-\d{8}-\d{6}-\d{6}", name) for name in names)
    assert names[0] != names[1]
    assert python(NAMES, path, RAY_JOB_CONFIG_JSON_ENV_VAR="{}") == "None\nNone\n"
    assert load_config(path, tmp_path).run_name is None
    assert load_config(path, tmp_path, run_name="mine").run_name == "mine"
