"""Configurations: what their files say, what is refused, and how a run is named."""

import re
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from conftest import ROOT
from notebook_module import code_cells, load_notebook

from trainkit.config import TrainingConfig, load_config
from trainkit.sources import named_run

# Only the guide has the machines of the 7B model; test_compute_configs.py looks at them.
FILES = {path.name for path in (ROOT / "configs").glob("*.yaml")} - {"gpt2-7b-gpu.yaml"}


@pytest.fixture
def load(tmp_path):
    """load_config of a file with this text."""

    def load(text: str = "") -> TrainingConfig:
        path = tmp_path / "mine.yaml"
        path.write_text(text)
        return load_config(path)

    return load


@pytest.mark.parametrize("name", sorted(FILES))
def test_the_files_are_configurations_of_the_notebook(tutorial, name):
    """Each names a dataset and machines that the notebook has, which can share its batch."""
    config = load_config(ROOT / "configs" / name, init_from=None)  # asks no hub
    assert config.dataset in tutorial.DATASETS
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
    (tmp_path / "gpt2").mkdir()  # such as an exported model
    assert load("tokenizer: gpt2").tokenizer == "gpt2"
    smaller = load("tokenizer: builtin")
    assert smaller.vocab_size == 2_048
    assert smaller.data_dir.endswith("/data/openwebtext-builtin")


def test_how_devices_share_a_batch():
    """A device takes as few equal parts as fit."""
    split = TrainingConfig(fsdp=2, tensor_parallel=2).split(8)
    assert [*split.values()] == [8, "2 x 2 x 2", 480, 120, "4 x 30"]
    assert TrainingConfig(batch_size=37).split(1)["micro-batches"] == "37 x 1"


@pytest.fixture
def config(small, write_bins):
    """Of a run without a name, and its tokens."""
    return write_bins(small(run_name=None, dataset="openwebtext"))


def launch(notebook, config: TrainingConfig) -> tuple[str, TrainingConfig]:
    """The name of the run that the notebook's cell launches, and `config` after the cell."""
    (cell,) = [cell for cell in code_cells() if "named_run(" in cell.source]
    trainer = SimpleNamespace(fit=lambda: None)
    names = vars(notebook) | {"config": config, "config_path": "my own.yaml"}
    names["make_trainer"] = lambda run: trainer
    exec(cell.source, names)
    return names["run"].run_name, names["config"]


EDITS = [  # and whether another run starts
    ("jax.nn.gelu", "jax.nn.relu", True),  # in a class that a class uses
    (".mean(axis=0), mean_of", ".sum(axis=0), mean_of", True),
    ("split, step, rows", "split, 0, rows", True),
    ("peak / 10", "(peak  / 10)  # a comment", False),
    ("One optimizer step;", "Another text;", False),
    ("test_size=0.0005", "test_size=0.005", True),  # by which other tokens are made
    ("sum(losses)", "max(losses)", False),  # in the loop, which continues
]


@pytest.mark.parametrize("edit", EDITS)
def test_an_edit_names_another_run(tutorial, config, tmp_path, monkeypatch, edit):
    old, new, counts = edit
    monkeypatch.setitem(sys.modules, "tutorial", tutorial)  # as it is afterwards
    first, config = launch(tutorial, config)
    assert re.fullmatch(r"my own-\w{6}", first)
    text = (ROOT / "README.ipynb").read_text()
    assert old in text
    path = tmp_path / "README.ipynb"
    path.write_text(text.replace(old, new))
    again, _ = launch(load_notebook(path), config)  # as in the same kernel
    assert (again != first) == counts


LAST = {"step": 10}


def last_rate() -> float:
    return 1 / LAST["step"]


def test_a_constant_names_another_run(config, monkeypatch):
    first = named_run(config, "", last_rate)
    monkeypatch.setitem(LAST, "step", 9)
    assert named_run(config, "", last_rate) != first


def test_recipe_and_tokens_name_a_run_and_machines_dont(config, write_bins):
    def name_of(**changes) -> str:
        return named_run(replace(config, **changes), "").run_name

    for key in ("learning_rate", "seed", "n_layer"):
        assert name_of(**{key: 7}) != name_of()
    for key, value in (("attention", "cudnn"), ("fsdp", 2), ("max_steps", 7)):
        assert name_of(**{key: value}) == name_of()
    # Files of one name are in many folders.
    assert name_of(tokenizer="/a/t.json") != name_of(tokenizer="/b/t.json")
    first = name_of()
    write_bins(config, seed=1)
    assert name_of() != first
