"""Step 2: data preparation, against a straight re-implementation of nanoGPT's prepare.py."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import datasets
import numpy as np
import pytest
import ray
import tiktoken
from accidents import wait_for
from notebook_module import code_cells

import trainkit.corpus
import trainkit.token_files

ROOT = Path(__file__).resolve().parent.parent


def reference_bins(texts: list[str], val_fraction: float) -> dict[str, bytes]:
    """What nanoGPT's prepare.py writes: split, encode_ordinary, end-of-text, uint16."""
    documents = datasets.Dataset.from_dict({"text": texts})
    split = documents.train_test_split(test_size=val_fraction, seed=2357, shuffle=True)
    return {
        "train": encode(split["train"]["text"]),
        "val": encode(split["test"]["text"]),
    }


def bins_of_files(texts: list[str], each: int) -> dict[str, bytes]:
    """The same, with the first document and each so many after it for validation."""
    train = [text for place, text in enumerate(texts) if place % each]
    return {"train": encode(train), "val": encode(texts[::each])}


def encode(texts: list[str]) -> bytes:
    encoding = tiktoken.get_encoding("gpt2")
    ids = ([*encoding.encode_ordinary(text), encoding.eot_token] for text in texts)
    return np.array(sum(ids, []), np.uint16).tobytes()


def written(config) -> dict[str, bytes]:
    folder = Path(config.data_dir)
    return {split: (folder / f"{split}.bin").read_bytes() for split in ("train", "val")}


TEXTS = [
    f"Document {i}: {'word ' * (i % 7)}\n<|endoftext|> é 漢字" for i in range(1500)
]


def test_builtin_text_byte_for_byte(tutorial, cluster, small):
    config = small(vocab_size=50_257, val_fraction=0.1)
    manifest = tutorial.prepare_dataset(config)
    assert written(config) == reference_bins(trainkit.corpus.help_pages(), 0.1)
    assert manifest["tokens"]["train"] * 2 == len(written(config)["train"])
    trainkit.token_files.check(config)


@pytest.mark.parametrize("suffix", ["jsonl", "parquet", "txt"])
def test_local_files_byte_for_byte(tutorial, cluster, small, tmp_path, suffix):
    texts = TEXTS[:30] if suffix == "txt" else TEXTS  # one file a document
    if suffix == "txt":
        for i, text in enumerate(texts):
            (tmp_path / f"{i:04d}.txt").write_text(text)
    else:
        half = len(texts) // 2
        for i, part in enumerate((texts[:half], texts[half:])):
            documents = datasets.Dataset.from_dict({"text": part})
            write = documents.to_json if suffix == "jsonl" else documents.to_parquet
            write(tmp_path / f"{i}.{suffix}")
    config = small(dataset=f"{tmp_path}/*.{suffix}", val_fraction=0.2)
    tutorial.prepare_dataset(config)
    assert written(config) == bins_of_files(texts, 5)

    # Text that comes later isn't left out in silence.
    assert tutorial.prepare_dataset(config)["documents"] == len(texts)
    shutil.copy(next(tmp_path.glob(f"*.{suffix}")), tmp_path / f"late.{suffix}")
    with pytest.raises(FileExistsError, match="data_dir.*files was .*Choose another"):
        tutorial.prepare_dataset(config)

    # Text that is no longer needed may go.
    for path in tmp_path.glob(f"*.{suffix}"):
        path.unlink()
    assert tutorial.prepare_dataset(config)["documents"] == len(texts)


def test_second_run_skips_and_other_source_stops(tutorial, cluster, small):
    config = small(val_fraction=0.1)
    first = tutorial.prepare_dataset(config)
    stamp = (Path(config.data_dir) / "train.bin").stat().st_mtime_ns
    assert tutorial.prepare_dataset(config) == first
    assert (Path(config.data_dir) / "train.bin").stat().st_mtime_ns == stamp
    with pytest.raises(FileExistsError, match="data_dir.*0.1.*0.2"):
        tutorial.prepare_dataset(small(val_fraction=0.2))


def test_files_that_are_there_are_left_alone(tutorial, small, write_bins):
    config = write_bins(small())
    before = written(config)
    assert "already" in tutorial.prepare_dataset(config)["source"]
    assert written(config) == before


def test_failure_leaves_nothing(tutorial, cluster, small, tmp_path):
    (tmp_path / "a.jsonl").write_text('{"body": "no text column"}\n' * 4)
    (tmp_path / "b.jsonl").write_text('{"text": "alone"}\n')
    (tmp_path / "c.jsonl").write_text('{"text": "some"}\n{"text": null}\n')
    for dataset, message in [
        (f"{tmp_path}/a.jsonl", "'body'"),
        (f"{tmp_path}/b.jsonl", "of 1 documents leaves none to train on"),
        (f"{tmp_path}/c.jsonl", "c.jsonl can't be read after 1 documents: found None"),
        (f"{tmp_path}/none/*.txt", "no file matches"),
    ]:
        config = small(dataset=dataset)
        with pytest.raises((ValueError, FileNotFoundError), match=message):
            tutorial.prepare_dataset(config)
        assert not Path(config.data_dir).exists()
        assert not list(Path(config.data_dir).parent.glob("*.partial*"))


@pytest.mark.slow
def test_killed_preparation_leaves_no_finished_folder(
    tutorial, cluster, small, tmp_path
):
    """SIGKILL in the middle of writing; the next run starts over and is right."""
    texts = [f"{i} " + "many words to tokenize " * 400 for i in range(1_000)]
    datasets.Dataset.from_dict({"text": texts}).to_parquet(tmp_path / "text.parquet")
    config = small(dataset=f"{tmp_path}/text.parquet", val_fraction=0.01)
    script = f"""
import sys
sys.path[:0] = [{str(ROOT)!r}, {str(ROOT / "ci")!r}]
from notebook_module import load_notebook
import ray
ray.init({ray.get_runtime_context().gcs_address!r}, log_to_driver=False,
         runtime_env={{"py_modules": [{str(ROOT / "trainkit")!r}]}})
tutorial = load_notebook()
config = tutorial.TrainingConfig(dataset={config.dataset!r}, val_fraction=0.01,
                                 data_dir={config.data_dir!r})
tutorial.prepare_dataset(config)
"""
    process = subprocess.Popen([sys.executable, "-c", script], start_new_session=True)
    folder = Path(config.data_dir).parent

    def writing():
        assert process.poll() is None
        return any(f.stat().st_size for f in folder.glob("*.partial*/train.bin"))

    wait_for(writing, what="the first tokens")
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    assert not Path(config.data_dir).exists()
    tutorial.prepare_dataset(config)
    assert written(config) == bins_of_files(texts, 100)
    assert not list(folder.glob("*.partial*"))
    manifest = json.loads((Path(config.data_dir) / "manifest.json").read_text())
    assert manifest["documents"] == 1_000


def test_tokens_that_are_there_need_no_text(tutorial, small, write_bins):
    config = write_bins(small(dataset="nobody/no-such-dataset"))
    reading = [c.source for c in code_cells() if "corpus.read(" in c.source]
    assert len(reading) == 1 and "def prepare_dataset(" in reading[0]
    assert "already in" in tutorial.prepare_dataset(config)["source"]


HELLO = [15496, 995]  # "Hello world", as OpenAI's tokenizer page shows it


def test_tokens_of_documents_end_with_the_end_of_text(tutorial, small):
    rows = {"text": np.array(["Hello world", ""]), "split": np.array(["train", "val"])}
    found = tutorial.tokenize(rows, small(vocab_size=50_257))
    tokens = [
        np.frombuffer(document, np.uint16).tolist() for document in found["tokens"]
    ]
    assert tokens == [[*HELLO, 50_256], [50_256]]
    assert found["split"].tolist() == ["train", "val"]
    wide = tutorial.tokenize(rows, small(vocab_size=70_000))["tokens"]
    assert np.frombuffer(wide[0], np.uint32).tolist() == [*HELLO, 50_256]
