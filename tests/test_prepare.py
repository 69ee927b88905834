"""Step 2: data preparation, against a straight re-implementation of nanoGPT's prepare.py."""

import itertools
import shutil
from pathlib import Path

import datasets
import numpy as np
import pyarrow as pa
import pytest
import tiktoken
from samples import without_a_cluster

import trainkit.corpus
import trainkit.token_files


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
    return np.array([*itertools.chain(*ids)], np.uint16).tobytes()


def written(config) -> dict[str, bytes]:
    folder = Path(config.data_dir)
    return {split: (folder / f"{split}.bin").read_bytes() for split in ("train", "val")}


TEXTS = [
    f"Document {i}: {'word ' * (i % 7)}\n<|endoftext|> é 漢字" for i in range(1500)
]


def test_builtin_text_byte_for_byte(tutorial, cluster, small):
    config = gpt2(small)
    manifest = tutorial.prepare_dataset(config)
    assert written(config) == reference_bins(trainkit.corpus.help_pages(), 0.1)
    assert manifest["tokens"]["train"] * 2 == len(written(config)["train"])
    trainkit.token_files.check(config)


def put(folder: Path, suffix: str, texts: list[str]) -> None:
    """The texts in files, with those of a .txt file for each, and else in two files."""
    if suffix == "txt":
        for i, text in enumerate(texts):
            (folder / f"{i:04d}.txt").write_text(text, newline="")
        return
    half = len(texts) // 2
    for i, part in enumerate((texts[:half], texts[half:])):
        documents = datasets.Dataset.from_dict({"body": part})
        file = folder / f"{i}.{suffix.partition('.')[0]}"
        (documents.to_parquet if suffix == "parquet" else documents.to_json)(file)
        if suffix.endswith((".gz", ".zst")):
            with pa.output_stream(f"{folder}/{i}.{suffix}") as compressed:
                compressed.write(file.read_bytes())
            file.unlink()


def gpt2(small, **changes):
    """A small configuration with GPT-2's vocabulary, and a batch that few tokens fill."""
    changes = {"val_fraction": 0.1, "batch_size": 1, "eval_steps": 1} | changes
    return small(vocab_size=50_257, **changes)


@pytest.mark.parametrize(
    "suffix, most",
    [("jsonl.zst", None), ("jsonl.gz", 755), ("parquet", None), ("txt", None)],
)
def test_local_files_byte_for_byte(
    tutorial, small, tmp_path, suffix, most, monkeypatch
):
    """All documents of two files or of forty, or the first of them."""
    without_a_cluster(monkeypatch)
    texts = TEXTS[:40] if suffix == "txt" else TEXTS  # one file a document
    put(tmp_path, suffix, texts)
    column = "text" if suffix == "txt" else "body"
    name = f"{tmp_path}/*.{suffix}"
    options = {"text_column": column, "val_fraction": 0.2, "max_documents": most}
    config, texts = gpt2(small, dataset=name, **options), texts[:most]
    manifest = tutorial.prepare_dataset(config)
    assert written(config) == bins_of_files(texts, 5)
    files = sorted(map(str, tmp_path.glob(f"*.{suffix}")))
    assert [*manifest["files"]] == files
    assert sum(manifest["files"].values()) == manifest["documents"] == len(texts)

    # Text that comes later isn't left out in silence.
    stamp = (Path(config.data_dir) / "train.bin").stat().st_mtime_ns
    assert tutorial.prepare_dataset(config) == manifest
    assert (Path(config.data_dir) / "train.bin").stat().st_mtime_ns == stamp
    shutil.copy(files[0], tmp_path / f"late.{suffix}")
    with pytest.raises(FileExistsError, match="data_dir.*files was .*Choose another"):
        tutorial.prepare_dataset(config)

    # Text that is no longer needed may go.
    for path in tmp_path.glob(f"*.{suffix}"):
        path.unlink()
    assert tutorial.prepare_dataset(config) == manifest


def test_many_small_files_and_a_large_one(tutorial, cluster, small, tmp_path):
    """In order, however the tasks finish: the first has 3 MB, and 300 others a line."""
    long = "\r\n".join(f"{i} words <|endoftext|>" for i in range(120_000))
    texts = [long, *(f"short {i}\r\n" for i in range(300))]
    put(tmp_path, "txt", texts)
    config = gpt2(small, dataset=str(tmp_path / "[0-9]*.txt"), val_fraction=0.01)
    manifest = tutorial.prepare_dataset(config)
    assert set(manifest["files"].values()) == {1} and len(manifest["files"]) == 301
    assert written(config) == bins_of_files(texts, 100)


def test_a_single_document_is_cut_in_two(tutorial, small, tmp_path, monkeypatch):
    without_a_cluster(monkeypatch)
    text = "To be, or not to be: that is the question. " * 50
    (tmp_path / "hub").mkdir()
    documents = datasets.Dataset.from_dict({"body": [text]})
    documents.to_parquet(tmp_path / "hub/train.parquet")
    (tmp_path / "input.txt").write_text(text)
    for number, name in enumerate((f"hub:{tmp_path}/hub", f"{tmp_path}/input.txt")):
        options = {"data_dir": f"{tmp_path}/data{number}", "text_column": "body"}
        config = gpt2(small, dataset=name, **options)
        tokens = tutorial.prepare_dataset(config)["tokens"]
        assert b"".join(written(config).values()) == encode([text])
        assert tokens["val"] == -(-sum(tokens.values()) // 10)


def test_splits_of_the_hub_byte_for_byte(tutorial, small, tmp_path, monkeypatch):
    without_a_cluster(monkeypatch)
    (tmp_path / "hub").mkdir()
    for split, texts in (("train", TEXTS[:50]), ("validation", TEXTS[50:60])):
        documents = datasets.Dataset.from_dict({"text": texts})
        documents.to_parquet(tmp_path / f"hub/{split}.parquet")
    config = gpt2(small, dataset=f"hub:{tmp_path}/hub")
    tutorial.prepare_dataset(config)
    assert written(config) == {"train": encode(TEXTS[:50]), "val": encode(TEXTS[50:60])}


def test_tokens_that_are_there_need_no_text(tutorial, small, write_bins):
    config = write_bins(small(dataset="nobody/no-such-dataset"))
    before = written(config)
    manifest = tutorial.prepare_dataset(config)
    assert "already in" in manifest["source"]
    assert manifest["tokens"] == {"train": 2_001, "val": 401}
    assert written(config) == before


def test_failure_leaves_nothing(tutorial, cluster, small, tmp_path):
    """Found by a task, far into a file."""
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "some"}\n' * 150 + '{"text": null}\n')
    config = gpt2(small, dataset=str(path))
    with pytest.raises(ValueError, match=f"^dataset: {path} can't be read after 150 "):
        tutorial.prepare_dataset(config)
    assert [*tmp_path.iterdir()] == [path]
