"""Configurations: what their files say, what is refused, and how a run is named."""

import dataclasses
import re
import sys
import types
from pathlib import Path

import pytest
from conftest import ROOT
from notebook_module import load_notebook
from samples import run_from_guide

from trainkit.config import RecipeConfig, TrainingConfig, fingerprint, load_config

FILES = sorted(path.name for path in (ROOT / "configs").glob("*.yaml"))


@pytest.fixture
def load(tmp_path):
    """load_config of a file with this text."""

    def load(text: str = "", **changes) -> TrainingConfig:
        path = tmp_path / "mine.yaml"
        path.write_text(text)
        return load_config(path, **changes)

    return load


@pytest.mark.parametrize("name", FILES)
def test_the_files_are_configurations_of_the_notebook(tutorial, name):
    """Each names a dataset and machines that the notebook has, which can share its batch."""
    text = re.sub("init_from: .*", "", (ROOT / "configs" / name).read_text())
    path = ROOT / "build" / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    config = load_config(path)
    assert config.dataset in tutorial.DATASETS
    if config.machines == "nodes_of_8_gpus":
        run_from_guide('SCALING["nodes_of_8_gpus"]', vars(tutorial))
    scaling = tutorial.SCALING[config.machines]
    gpus, tpus = scaling.num_gpus_per_worker, scaling.num_tpus_per_worker
    config.split(int(scaling.num_workers * max(gpus, tpus, 1)))


def test_defaults_are_nanogpts(load):
    """https://github.com/karpathy/nanoGPT/blob/master/config/train_gpt2.py"""
    config = load()
    assert config == dataclasses.replace(TrainingConfig(), **vars(config))
    assert config.batch_size * config.block_size == 12 * 1024 * 5 * 8
    expected = (6e-4, 2_000, 600_000, 0.1, 0.9, 0.95, 1.0)
    keys = ("learning_rate", "warmup_steps", "decay_steps", "weight_decay")
    keys += ("beta1", "beta2", "grad_clip")
    assert tuple(getattr(config, key) for key in keys) == expected
    assert config.padded_vocab_size == 50_304 and config.token_dtype == "uint16"
    assert dataclasses.replace(config, vocab_size=65_537).token_dtype == "uint32"


def test_yaml_is_that_of_today(load):
    """In YAML 1.1, these were text, 384, and 90."""
    config = load("learning_rate: 1e-3\nmax_steps: 0600\nbatch_size: 12")
    assert (config.learning_rate, config.max_steps) == (1e-3, 600)
    with pytest.raises(ValueError, match="max_steps"):
        load("max_steps: 1:30")
    with pytest.raises(Exception, match="(?s)seed.*line 2"):
        load("seed: 1\nseed: 2")


REFUSED = [
    ("batchsize: 4", "batchsize"),
    ("batch_size: 12.5", "batch_size"),
    ("batch_size: 0", "batch_size"),
    ("learning_rate: -1", "learning_rate"),
    ("grad_clip: .nan", "grad_clip"),
    ("weight_decay: -0.1", "weight_decay"),
    ("beta2: 1.5", "beta2"),
    ("seed: -1", "seed"),
    ("attention: flash", "attention"),
    ("max_failures: -2", "max_failures"),
    ("num_workers: 4", "num_workers"),
]


@pytest.mark.parametrize("text, key", REFUSED)
def test_a_mistake_names_the_file_and_the_key(load, text, key):
    with pytest.raises(ValueError, match=f"(?s)mine.yaml: .*{key}"):
        load(text)


def test_places_and_names(load, tmp_path, monkeypatch):
    """Workers run in other folders, so paths are absolute; names of a hub stay."""
    monkeypatch.chdir(tmp_path)
    config = load("dataset: my_text\nmachines: cpu")
    assert config.data_dir == str(tmp_path / "storage/data/my_text")
    assert config.storage_path == str(tmp_path / "storage/runs")
    assert config.run_name is None
    named = load("run_name: a\ndata_dir: ~/d\nstorage_path: s3://bucket/runs")
    assert named.data_dir == str(Path.home() / "d")
    assert named.run_path.as_posix() == "s3://bucket/runs/a"
    (tmp_path / "gpt2").mkdir()  # such as an exported model
    assert load("tokenizer: gpt2").tokenizer == "gpt2"
    smaller = load("tokenizer: builtin")
    assert smaller.vocab_size == 2_048
    assert smaller.data_dir == str(tmp_path / "storage/data/openwebtext-builtin")


@pytest.mark.parametrize(
    "devices, changes, expected",
    [
        (1, {}, ("1 x 1 x 1", 480, "15 x 32")),
        (8, {}, ("8 x 1 x 1", 60, "2 x 30")),
        (8, {"fsdp": 4}, ("2 x 4 x 1", 60, "2 x 30")),
        (8, {"fsdp": 2, "tensor_parallel": 2}, ("2 x 2 x 2", 120, "4 x 30")),
        (32, {}, ("32 x 1 x 1", 15, "1 x 15")),
        (8, {"batch_size": 8 * 37}, ("8 x 1 x 1", 37, "37 x 1")),
    ],
)
def test_how_devices_share_a_batch(load, devices, changes, expected):
    split = load(**changes).split(devices)
    found = (split["mesh"], split["per device"], split["micro-batches"])
    assert found == expected


@pytest.mark.parametrize(
    "devices, changes, numbers",
    [(7, {}, "7 to divide batch_size .480"), (8, {"fsdp": 3}, "8 devices.*3")],
)
def test_devices_that_cant_share_a_batch_are_refused(load, devices, changes, numbers):
    with pytest.raises(ValueError, match=numbers):
        load(**changes).split(devices)


CELLS = '''
SCALE = 2
def norm(x): return x / SCALE
class Block:
    def __call__(self, x):
        """A comment."""
        return norm(x)
def create(config):  # makes it
    return Block()
def other(): pass
'''


def name_of(tmp_path, cells: str, **recipe) -> str:
    """The fingerprint of `create` where these are a notebook's cells."""
    path = tmp_path / f"cells{abs(hash(cells))}.py"
    path.write_text(cells)
    module = types.ModuleType("cells")
    sys.modules["cells"] = module
    exec(compile(cells, str(path), "exec"), vars(module))
    return fingerprint(TrainingConfig(**recipe), module.create)


CHANGES = [
    ("x / SCALE", "x * SCALE", True),  # called by what `create` calls
    ("SCALE = 2", "SCALE = 3", True),
    ("return norm(x)", "return norm(2 * x)", True),
    ("# makes it", "# another comment", False),
    ('"""A comment."""', '"""Another comment."""', False),
    ("return x / SCALE", "return (x  / SCALE)", False),
    ("def other(): pass", "def other(): return 1", False),  # which `create` doesn't use
]


@pytest.mark.parametrize("old, new, counts", CHANGES)
def test_an_edited_cell_names_another_run(tmp_path, old, new, counts):
    assert old in CELLS
    changed = name_of(tmp_path, CELLS.replace(old, new)) != name_of(tmp_path, CELLS)
    assert changed == counts


def test_a_recipe_names_a_run_and_machines_dont(tmp_path):
    first = name_of(tmp_path, CELLS)
    for key in ("learning_rate", "seed", "n_layer"):
        assert name_of(tmp_path, CELLS, **{key: 7}) != first
    for key, value in (("attention", "cudnn"), ("fsdp", 2), ("max_steps", 7)):
        assert name_of(tmp_path, CELLS, **{key: value}) == first
    folders = {name_of(tmp_path, CELLS, tokenizer=f"/{x}/mine.json") for x in "ab"}
    assert len(folders) == 1  # storage is mounted elsewhere


def test_the_fingerprint_covers_the_notebooks_model(tutorial, tmp_path):
    """An edit of each of these starts a new run; one of the loop continues it."""
    config = TrainingConfig()
    functions = ("create_state", "train_step", "make_token_dataset")
    first = fingerprint(config, *(getattr(tutorial, name) for name in functions))
    text = (ROOT / "README.ipynb").read_text()
    edits = {
        "jax.nn.gelu": "jax.nn.relu",
        "epsilon=1e-5": "epsilon=1e-6",
        "peak / 10": "peak / 9",
        "x.ndim > 1": "x.ndim > 2",
        ".mean(axis=0) / k": ".sum(axis=0) / k",
        "embedding[...]": "embedding[...] * 2",
        "sum(losses)": "max(losses)",  # in the loop, which continues
    }
    for old, new in edits.items():
        assert old in text, old
        path = tmp_path / "README.ipynb"
        path.write_text(text.replace(old, new))
        module = load_notebook(path)
        again = fingerprint(config, *(getattr(module, name) for name in functions))
        assert (again == first) == (old == "sum(losses)"), old
    sys.modules["tutorial"] = tutorial


def test_each_key_is_used():
    """In a file of configs/, a test, or the guide."""
    places = [*(ROOT / "configs").glob("*.yaml"), *(ROOT / "tests").glob("*.py")]
    text = "\n".join(path.read_text() for path in [*places, ROOT / "docs/guide.md"])
    for field in dataclasses.fields(TrainingConfig):
        assert re.search(rf"\b{field.name}\b", text), field.name
    assert {f.name for f in dataclasses.fields(RecipeConfig)} == {
        *TrainingConfig().recipe
    }
