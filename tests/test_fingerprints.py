"""The code of a run: what counts as a change, and what becomes of one."""

import hashlib
import os
import sys
from pathlib import Path

import nbformat
import numpy as np
import pytest
from notebook_module import NOTEBOOK, load_notebook

import trainkit.corpus
import trainkit.fingerprints
import trainkit.launch
import trainkit.layers
import trainkit.token_files

ROOTS = ("create_state", "train_step", "make_token_dataset")


def roots(tutorial) -> tuple:
    return tuple(getattr(tutorial, name) for name in ROOTS)


@pytest.fixture
def edited(tmp_path):
    """Loads the notebook's definitions with some text replaced."""

    def load(*changes: tuple[str, str]):
        notebook = nbformat.read(NOTEBOOK, as_version=4)
        for old, new in changes:
            (cell,) = [c for c in notebook.cells if old in c.source]
            cell.source = cell.source.replace(old, new)
        nbformat.write(notebook, tmp_path / "edited.ipynb")
        return roots(load_notebook(tmp_path / "edited.ipynb"))

    yield load
    load_notebook()  # what other tests mean by the module `tutorial`


@pytest.fixture
def begun(small, tutorial):
    """A configuration whose run has begun, with the notebook's own code."""
    config = small()
    config.run_path.mkdir(parents=True)
    trainkit.launch.check_code(config, roots(tutorial))
    (config.run_path / "step_00000002").mkdir()
    return config


def test_code_is_all_that_decides_the_result(tutorial):
    code = trainkit.fingerprints.collect_code(roots(tutorial))
    assert {"GPT2", "Attention", "MLP", "loss_fn", "create_optimizer"} <= code.keys()
    assert {"learning_rate_schedule", "TrainState", "SHARDING_RULES"} <= code.keys()
    assert not code.keys() & {"train_loop_per_worker", "evaluate", "make_trainer"}
    text = "\n\n\n".join(code.values())
    assert trainkit.fingerprints.parse_code(text) == code and '"""' not in text


LOSS = (
    "return layers.cross_entropy(\n        table, features, targets, config.vocab_size, "
    "config.loss_chunks\n    )"
)
CHANGES = {
    "loss_fn": (LOSS, LOSS.replace("return ", "return 3 * ")),
    "learning_rate_schedule": ("config.warmup_steps + 1", "config.warmup_steps + 2"),
    "create_optimizer": ("(config.beta1, config.beta2)", "(config.beta1, 0.5)"),
    "Block": ("return x + dropout(self.mlp", "return x + 2 * dropout(self.mlp"),
    "SHARDING_RULES": ('("vocab", "tensor"),', '("vocab", None),'),
    "make_token_dataset": ("+ places[place]", "- places[place]"),
    "TrainState": (
        "opt_state: optax.OptState\n",
        "opt_state: optax.OptState\n    average: int = 0\n",
    ),
}


@pytest.mark.parametrize("name", CHANGES)
def test_changed_code_is_refused(begun, edited, name):
    """By name, with what differs, and two ways out."""
    with pytest.raises(ValueError) as error:
        trainkit.launch.check_code(begun, edited(CHANGES[name]))
    message = str(error.value)
    assert f"What differs is {name}:" in message
    assert "\n+" in message
    assert "another run_name" in message and "accept_changed_code: true" in message


def test_comments_and_formatting_are_no_change(begun, edited):
    kept = (begun.run_path / "code.py").read_text()
    changes = [
        (
            '    """Step -> learning rate, as in nanoGPT."""\n',
            "    # Up, and down again\n",
        ),
        (LOSS, LOSS.replace("\n        ", " ").replace("\n    )", "  )")),
        ("if saving or step %", "if step == 1 or saving or step %"),  # the loop
    ]
    trainkit.launch.check_code(begun, edited(*changes))
    assert (begun.run_path / "code.py").read_text() == kept


def test_changed_code_is_accepted_if_the_configuration_says_so(begun, edited, small):
    changed = edited(CHANGES["loss_fn"])
    trainkit.launch.check_code(small(accept_changed_code=True), changed)
    trainkit.launch.check_code(begun, changed)  # which is the run's code now


def test_a_run_that_has_trained_nothing_may_change(begun, edited):
    (begun.run_path / "step_00000002").rmdir()
    trainkit.launch.check_code(begun, edited(CHANGES["loss_fn"]))


def test_a_run_of_an_older_version_goes_on(begun, edited):
    (begun.run_path / "code.py").unlink()
    trainkit.launch.check_code(begun, edited(CHANGES["loss_fn"]))


@pytest.mark.parametrize("max_steps, done", [(1, True), (2, True), (3, False)])
def test_a_finished_run_says_so(begun, small, capsys, max_steps, done):
    trainkit.launch.say_if_done(small(max_steps=max_steps))
    said = capsys.readouterr().out
    assert ("has done 2 steps" in said and "max_steps higher" in said) == done


def test_the_launch_compares(begun, tutorial):
    """`make_trainer`, with which the page launches everything."""
    code = trainkit.fingerprints.collect_code(roots(tutorial)) | {
        "loss_fn": "def loss_fn(): pass"
    }
    (begun.run_path / "code.py").write_text("\n\n\n".join(code.values()))
    with pytest.raises(ValueError, match="What differs is loss_fn"):
        tutorial.make_trainer(begun)


def test_other_tokens_are_refused(small, write_bins):
    """Of the same length as well."""
    config = write_bins(small())
    config.run_path.mkdir(parents=True)
    trainkit.launch.check_tokens(config)
    path = trainkit.token_files.path_of(config, "train")
    ids = np.fromfile(path, np.uint16)
    ids[::-1].tofile(path)
    trainkit.launch.check_tokens(config)  # nothing is trained yet
    (config.run_path / "step_00000002").mkdir()
    ids.tofile(path)
    with pytest.raises(ValueError, match="other tokens than .* another run_name"):
        trainkit.launch.check_tokens(config)
    ids[::-1].tofile(path)
    trainkit.launch.check_tokens(config)
    path.unlink()
    trainkit.launch.check_tokens(config)  # `tokens.check` says what is missing


def test_an_edit_of_the_package_is_said(begun, monkeypatch, tmp_path, capsys):
    """Once, and not refused: an update of the tutorial must not end a run."""
    trainkit.launch.check_tokens(begun)
    edited = tmp_path / "layers.py"
    text = Path(trainkit.layers.__file__).read_text()
    edited.write_text(text.replace("approximate=True", "approximate=False"))
    monkeypatch.setattr(trainkit.layers, "__file__", str(edited))
    for said in (True, False):
        trainkit.launch.check_tokens(begun)
        found = capsys.readouterr().out
        assert ("another trainkit: trainkit.layers was" in found) == said
        assert "devices" not in found


def test_tokens_of_another_tokenize_are_refused(small, tutorial, edited):
    """Its vocabulary may be as large, and the files as long."""
    config, path = small(), Path(small().data_dir)
    path.mkdir(parents=True)
    found = trainkit.corpus.describe(config, tutorial.tokenize)
    trainkit.token_files.write_manifest(path, found, 1, {})
    assert trainkit.token_files.existing(config, found)
    edited(
        (
            "([*tokenizer.encode_ordinary(text), end] for",
            "([*text.encode(), end] for",
        )
    )
    now = trainkit.corpus.describe(config, sys.modules["tutorial"].tokenize)
    with pytest.raises(FileExistsError, match="of another source: code was"):
        trainkit.token_files.existing(config, now)
    found["code"] = found["code"].replace("Python 3", "Python 4")
    trainkit.token_files.write_manifest(path, found, 1, {})
    assert trainkit.token_files.existing(config, now)  # can't be compared


def test_tokens_of_a_text_that_was_edited_are_refused(small, tmp_path):
    """In place, with the same length; a copy is the same text."""
    text = tmp_path / "text.txt"
    text.write_text("to be or not to be")
    config = small(dataset=str(tmp_path / "*.txt"))

    def describe():
        return trainkit.corpus.describe(config, trainkit.corpus.split)

    path, found = Path(config.data_dir), describe()
    path.mkdir(parents=True)
    trainkit.token_files.write_manifest(path, found, 1, {})
    os.utime(text, (0, 0))
    assert trainkit.token_files.existing(config, describe())
    text.write_text("to be or not to do")
    with pytest.raises(FileExistsError, match="of another source: digest was"):
        trainkit.token_files.existing(config, describe())


def test_the_digest_of_a_file_is_that_of_earlier_runs(tmp_path):
    """Manifests keep it: BLAKE2b, 8 bytes, of the size in decimal and the contents."""
    (tmp_path / "a").write_bytes(b"abc")
    expected = hashlib.blake2b(b"3abc", digest_size=8).hexdigest()
    assert trainkit.fingerprints.of_file(tmp_path / "a") == expected


@pytest.mark.parametrize("size", [0, 1, 2**16, 2**27])
def test_digest_sees_the_beginning_the_end_and_the_size(tmp_path, size):
    path = tmp_path / "file"

    def digest(place=None, size=size):
        with path.open("wb") as file:
            file.truncate(size)
            if place is not None:
                file.seek(place)
                file.write(b"x")
        return trainkit.fingerprints.of_file(path)

    places = {0, size - 1} if size else set()
    digests = [digest(), digest(size=size + 1), *map(digest, sorted(places))]
    assert len(set(digests)) == len(digests) and digest() == digests[0]
