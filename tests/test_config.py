"""Configurations: what their files say, what is refused, and how a run is named."""

import shutil
from pathlib import Path

import pytest
from conftest import ROOT

import trainkit.tokenizers
from trainkit import corpus
from trainkit.config import TrainingConfig
from trainkit.load_config import load_config

# Only the guide has the machines of the 7B model; test_compute_configs.py looks at them.
FILES = {path.name for path in (ROOT / "configs").glob("*.yaml")} - {"gpt2-7b-gpu.yaml"}


@pytest.fixture
def load(tmp_path):
    """load_config of a file with this text."""

    def load(text: str = "") -> TrainingConfig:
        path = tmp_path / "mine.yaml"
        path.write_text(text)
        return load_config(path, tmp_path)

    return load


@pytest.mark.parametrize("name", sorted(FILES))
def test_the_files_are_configurations_of_the_notebook(tutorial, name):
    """Each names a dataset and machines that the notebook has, which can share its batch."""
    config = load_config(
        ROOT / "configs" / name, "storage", init_from=None
    )  # asks no hub
    assert hasattr(tutorial, config.dataset) or hasattr(corpus, config.dataset)
    scaling = tutorial.SCALING[config.machines]
    each = max(1, scaling.num_gpus_per_worker, scaling.num_tpus_per_worker)
    config.split(int(scaling.num_workers * each))


REFUSED = [
    ("batchsize: 4", "batchsize"),
    ("batch_size: 0", "batch_size"),
    ("grad_clip: .inf", "grad_clip"),
    ("beta2: 1.5", "beta2"),
    ("attention: flash", "attention"),
    ("data_dir: s3://bucket/data", "data_dir"),
    ("storage_path: $NOWHERE/runs", "storage_path.*NOWHERE/runs names a variable"),
    ("storage_path: s3://b/runs?endpoint_override=x", "AWS_ENDPOINT_URL_S3"),
    ("- a\n- b", "expected keys, found a list"),
]


@pytest.mark.parametrize("text, key", REFUSED)
def test_a_mistake_names_the_file_and_the_key(load, text, key):
    with pytest.raises(ValueError, match=f"(?s)mine.yaml: .*{key}"):
        load(text)


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
    assert smaller.data_dir.endswith("/data/openwebtext-builtin")
    own = trainkit.tokenizers.load("builtin").path
    for name in ("mine-1.0", "mine-1.1"):  # which have a folder each
        (tmp_path / name).mkdir()
        shutil.copy(own, tmp_path / name / "tokenizer.json")
        other = load(f"tokenizer: ./{name}")
        assert other.data_dir.endswith(f"/data/openwebtext-{name}")


def test_how_devices_share_a_batch():
    """A device takes as few equal parts as fit."""
    split = TrainingConfig(fsdp=2, tensor_parallel=2).split(8)
    assert [*split.values()] == [8, "2 x 2 x 2", 480, 120, "4 x 30"]
    config = TrainingConfig(batch_size=12, device_batch_size=8)
    assert config.micro_batches(1) == 2 and config.micro_batches(2) == 1
    assert TrainingConfig(batch_size=14, device_batch_size=5).micro_batches(1) == 7
    assert TrainingConfig(batch_size=37).split(1)["micro-batches"] == "37 x 1"
