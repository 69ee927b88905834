"""Documents: from files of each kind, divided as nanoGPT does, and what is refused."""

import datasets
import pytest

import trainkit.corpus

TEXTS = ["first", "second <|endoftext|>", "é 漢字\n\nand more", ""]


def write(folder, suffix: str) -> None:
    """TEXTS in two files; a .txt file holds one document."""
    if suffix == "txt":
        for i, text in enumerate(TEXTS):
            (folder / f"{i}.txt").write_text(text)
        return
    for i, part in enumerate((TEXTS[:1], TEXTS[1:])):
        documents = datasets.Dataset.from_dict({"text": part})
        writers = {"parquet": documents.to_parquet}
        writers.get(suffix, documents.to_json)(folder / f"{i}.{suffix}")


@pytest.mark.parametrize("suffix", ["txt", "json", "jsonl", "parquet"])
def test_files_in_the_order_of_their_names(small, tmp_path, suffix):
    write(tmp_path, suffix)
    config = small(dataset=f"{tmp_path}/*.{suffix}")
    documents = trainkit.corpus.load(config)
    assert list(documents["text"]) == TEXTS
    source = trainkit.corpus.describe(config)
    sizes = [path.stat().st_size for path in tmp_path.glob(f"*.{suffix}")]
    assert (source["files"], source["bytes"]) == (len(sizes), sum(sizes))


def test_builtin_text_needs_no_files(small):
    documents = trainkit.corpus.load(small())
    assert len(documents) > 50 and all(documents["text"])
    assert "files" not in trainkit.corpus.describe(small())


@pytest.mark.parametrize(
    "name, text, words",
    [
        ("a.csv", "text\nhello\n", "a.csv is not one of .txt, .json"),
        ("a.jsonl", '{"body": "no text column"}\n', r"columns \['body'\]"),
        ("a.jsonl", '{"text": "some"}\n{"text": null}\n', "1 documents in .* no text"),
        ("none/*.txt", None, "no file matches .*none"),
    ],
)
def test_files_that_cannot_be_read(small, tmp_path, name, text, words):
    if text:
        (tmp_path / name).write_text(text)
    with pytest.raises((ValueError, FileNotFoundError), match=f"dataset: .*{words}"):
        trainkit.corpus.load(small(dataset=f"{tmp_path}/{name}"))


def test_hub_out_of_reach_names_the_ways_out(small, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    with pytest.raises(ConnectionError, match="nobody/nothing.*local .txt.*train.bin"):
        trainkit.corpus.load(small(dataset="nobody/nothing"))


def test_split_is_a_division(small):
    """Each document is in one part, in another order for no other reason than the seed."""
    texts = [str(i) for i in range(100)]
    documents = datasets.Dataset.from_dict({"text": texts})
    parts = trainkit.corpus.split(documents, small(val_fraction=0.08))
    assert len(parts["val"]) == 8
    assert sorted([*parts["train"]["text"], *parts["val"]["text"]]) == sorted(texts)
    again = trainkit.corpus.split(documents, small(val_fraction=0.08, seed=1))
    assert again["val"]["text"] == parts["val"]["text"]  # validation never moves
    with pytest.raises(ValueError, match=r"1 document\(s\), but"):
        trainkit.corpus.split(documents.select([0]), small())


def test_tasks_get_eight_megabytes_each():
    documents = datasets.Dataset.from_dict({"text": ["x" * 2**20] * 40})
    assert trainkit.corpus.count_blocks(documents) in (5, 6)  # 40 MB and a little
    part = documents.train_test_split(test_size=10, seed=0)["test"]
    assert trainkit.corpus.count_blocks(part) == 2
    assert trainkit.corpus.count_blocks(documents.select([0])) == 1
