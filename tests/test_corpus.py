"""Documents: from files of each kind, divided as nanoGPT does, and what is refused."""

import dataclasses
import http.server
import json
import math
import os
import re
import shutil
import threading
from pathlib import Path

import datasets
import fsspec
import pyarrow as pa
import pyarrow.parquet
import pytest

import trainkit.corpus
import trainkit.token_files

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
def test_files_in_the_order_of_their_names(cluster, small, tmp_path, suffix):
    """A pattern, or all that a folder holds, here or by a URL; Ray Data reads them."""
    write(tmp_path, suffix)
    (tmp_path / ".hidden").write_text("no document")
    for url in (f"{tmp_path}/*.{suffix}", f"file://{tmp_path}"):
        config = small(dataset=url)
        found = rows_of(config)
        assert [row["text"] for row in found] == TEXTS
        assert {row["split"] for row in found} == {""}  # their places decide
        source = trainkit.corpus.describe(config, trainkit.corpus.split)
        assert source["files"] == len(list(tmp_path.glob("[0-9]*")))
        few = rows_of(small(dataset=url, max_documents=3))
        assert [row["text"] for row in few] == TEXTS[:3]
        next(tmp_path.glob("[0-9]*")).write_text('{"text": "first"}\n ')  # other bytes
        other = trainkit.corpus.describe(config, trainkit.corpus.split)
        assert other["digest"] != source["digest"]
        write(tmp_path, suffix)


def test_builtin_text_needs_no_files(small):
    documents = trainkit.corpus.load(small())["train"]
    assert len(documents) > 50 and all(documents["text"])
    assert "files" not in trainkit.corpus.describe(small(), trainkit.corpus.split)


def test_hub_out_of_reach_names_the_ways_out(small, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    with pytest.raises(ConnectionError, match="nobody/nothing.*local .txt.*train.bin"):
        trainkit.corpus.load(small(dataset="nobody/nothing"))


def hub_folder(folder: Path, **splits: list[list[str]]) -> str:
    """A dataset as it lies on the hub: Parquet files, named by split, in `data`."""
    (folder / "data").mkdir()
    for split, files in splits.items():
        for i, texts in enumerate(files):
            name = f"data/{split}-{i:05d}-of-{len(files):05d}.parquet"
            datasets.Dataset.from_dict({"text": texts}).to_parquet(folder / name)
    return str(folder)


STORIES = [[f"story {i} of file {k}" for i in range(50)] for k in range(4)]


def test_dataset_of_the_hub_keeps_its_validation_split(small, tmp_path):
    """As roneneldan/TinyStories has one, beside four files to train on."""
    folder = hub_folder(tmp_path, train=STORIES, validation=[["last", "words"]])
    config = small(dataset=folder)
    parts = trainkit.corpus.split(trainkit.corpus.load(config), config)
    assert list(parts["train"]["text"]) == sum(STORIES, [])
    assert list(parts["val"]["text"]) == ["last", "words"]
    assert trainkit.corpus.describe(config, trainkit.corpus.split)["files"] == 5


def test_folder_of_text_files_is_not_taken_for_one_of_the_hub(cluster, small, tmp_path):
    """Its lines would pass for documents."""
    write(tmp_path, "txt")
    assert texts(small(dataset=str(tmp_path))) == TEXTS


def test_dataset_of_the_hub_without_validation_is_divided(small, tmp_path):
    config = small(dataset=hub_folder(tmp_path, train=STORIES), val_fraction=0.1)
    parts = trainkit.corpus.split(trainkit.corpus.load(config), config)
    assert (len(parts["train"]), len(parts["val"])) == (180, 20)


def test_first_documents_need_no_more_than_their_files(small, tmp_path):
    """The files behind them are never opened: here, they are no Parquet."""
    folder = hub_folder(tmp_path, train=STORIES, validation=[["last", "words"]])
    for i in (2, 3):
        path = next(tmp_path.glob(f"data/train-{i:05d}-*"))
        path.write_bytes(path.read_bytes()[:-99])
    config = small(dataset=folder, max_documents=70)
    for _ in range(2):  # the second time, from the cache
        splits = trainkit.corpus.load(config)
        assert list(splits["train"]["text"]) == sum(STORIES, [])[:70]
        assert list(splits["validation"]["text"]) == ["last", "words"]
    assert (
        trainkit.corpus.describe(config, trainkit.corpus.split)["max_documents"] == 70
    )
    with pytest.raises(ConnectionError, match="dataset: cannot load"):
        trainkit.corpus.load(small(dataset=folder))  # all of them


def test_dataset_without_a_split_to_train_on(small, tmp_path):
    folder = hub_folder(tmp_path, test=STORIES)
    with pytest.raises(ValueError, match=r"dataset: .*splits \['test'\]"):
        trainkit.corpus.load(small(dataset=folder))


def test_split_is_a_division(small):
    """Each document is in one part, in another order for no other reason than the seed."""
    texts = [str(i) for i in range(100)]
    documents = datasets.Dataset.from_dict({"text": texts})
    parts = trainkit.corpus.split({"train": documents}, small(val_fraction=0.08))
    assert len(parts["val"]) == 8
    assert sorted([*parts["train"]["text"], *parts["val"]["text"]]) == sorted(texts)
    again = trainkit.corpus.split(
        {"train": documents}, small(val_fraction=0.08, seed=1)
    )
    assert again["val"]["text"] == parts["val"]["text"]  # validation never moves
    with pytest.raises(ValueError, match="of 1 documents leaves none to train on"):
        trainkit.corpus.split({"train": documents.select([0])}, small())


def test_tasks_get_eight_megabytes_each():
    documents = datasets.Dataset.from_dict({"text": ["x" * 2**20] * 40})
    assert trainkit.corpus.count_blocks(documents) in (5, 6)  # 40 MB and a little
    part = documents.train_test_split(test_size=10, seed=0)["test"]
    assert trainkit.corpus.count_blocks(part) == 2
    assert trainkit.corpus.count_blocks(documents.select([0])) == 1


def rows_of(config) -> list[dict]:
    """What is written, with the text for its tokens."""
    rows = trainkit.corpus.read(config).rename_columns({"text": "tokens"})
    found = trainkit.token_files.documents_in(rows)
    return [{"split": split, "text": text} for split, text in found]


def texts(config) -> list[str]:
    return [row["text"] for row in rows_of(config)]


def read_here(path: Path, column: str = "text") -> list[str]:
    """The documents of a file, read in this process as a task of Ray Data reads them."""
    is_parquet = path.suffix == ".parquet"
    with pa.OSFile(str(path)) if is_parquet else pa.input_stream(path) as file:
        return list(trainkit.corpus.texts_in(file, str(path), column))


@pytest.mark.parametrize(
    "pattern, expected",
    [
        ("a[1].txt", ["bracket"]),  # a file of that name
        ("a*.txt", ["plain", "bracket"]),
        ("why?.txt", ["yes"]),  # so is this
        ("why*.txt", ["no", "yes"]),
        ("B*r [[]1].txt", ["title"]),
        ("**/*.txt", ["title", "plain", "bracket", "deep", "deeper", "no", "yes"]),
    ],
)
def test_what_the_pattern_matches_is_read_once(
    cluster, small, tmp_path, monkeypatch, pattern, expected
):
    files = {"a1.txt": "plain", "a[1].txt": "bracket", "why!.txt": "no"}
    files |= {".a.txt": "hidden", ".git/a.txt": "hidden"}
    files |= {"why?.txt": "yes", "Bücher [1].txt": "title"}
    files |= {"sub/c.txt": "deep", "sub/sub/d.txt": "deeper"}
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    config = small(dataset=pattern)
    assert sorted(texts(config)) == sorted(expected)
    found = trainkit.corpus.describe(config, trainkit.corpus.split)
    assert found["files"] == len(found["names"]) == len(expected)


@pytest.mark.parametrize(
    "name, text",
    [
        ("a.txt", "words"),
        ("a.jsonl", '{"text": "words"}\n\n'),
        ("a.json", '[\n{"text": "words"}]'),
    ],
)
def test_a_byte_order_mark_is_no_text(cluster, small, tmp_path, name, text):
    (tmp_path / name).write_text(text, encoding="utf-8-sig")
    assert texts(small(dataset=str(tmp_path / name))) == ["words"]


def test_what_looks_like_a_date_is_text(cluster, small, tmp_path):
    """And other columns may hold what they like."""
    (tmp_path / "a.jsonl").write_text(
        '{"text": "2026-11-24 12:00:00", "id": 1}\n{"text": "12", "id": "b"}\n'
    )
    assert texts(small(dataset=f"{tmp_path}/a.jsonl")) == ["2026-11-24 12:00:00", "12"]


def test_a_long_file_is_read_as_a_stream(cluster, small, tmp_path):
    """In parts of a hundred documents, in order; the last part is shorter."""
    expected = [f"document {i}" for i in range(1_050)]
    with (tmp_path / "a.jsonl").open("w") as file:
        file.writelines(json.dumps({"text": text}) + "\n" for text in expected)
    assert texts(small(dataset=f"{tmp_path}/a.jsonl")) == expected


LIST = "a list of JSON objects, or one in each line"


@pytest.mark.parametrize(
    "name, contents, words",
    [
        (
            "a.jsonl",
            "",
            "after 0 documents: it is empty. Expected a JSON object in each",
        ),
        ("a.json", "[]", f"it is empty. Expected {LIST}"),
        ("a.json", '[{"text": "a"}, {"te', f"Unterminated .*line 1.* Expected {LIST}"),
        ("a.json", "3", f"found 3. Expected {LIST}"),
        ("a.jsonl", '{"text": "a"}\n{"te', "after 1 documents: Unterminated.* in each"),
        (
            "a.jsonl",
            '{"text": "a"}\n{"text": {"b": 1}}\n',
            "1 documents: found {'b': 1}",
        ),
        (
            "a.jsonl",
            '{"text": 3}\n',
            "found 3 .*text in the column 'text', which text_c",
        ),
        ("a.jsonl", '{"text": "a"}\n{"text": null}\n', "1 documents: found None"),
        ("a.jsonl", '{"body": "a"}\n', r"found None in one of the columns \['body'\]"),
        ("a.jsonl", '{"text": "\\ud800"}\n', "surrogates not allowed"),
        ("a.jsonl", b'{"text": "\xff"}\n', "can't decode byte 0xff in position 10"),
        (
            "a.txt",
            b"PK\x03\x04\xff",
            "byte 0xff in position 4.* Expected UTF-8 text. Mend",
        ),
        ("a.parquet", b"PAR1", "a.parquet can't be read .*Expected Parquet"),
        ("a.jsonl.gz", b"no gzip", "a.jsonl.gz can't be read after 0"),
    ],
)
def test_unusable_files_are_named(tmp_path, name, contents, words):
    data = contents if isinstance(contents, bytes) else contents.encode()
    (tmp_path / name).write_bytes(data)
    with pytest.raises(ValueError) as error:
        read_here(tmp_path / name)
    message = str(error.value)
    assert message.startswith(f"dataset: {tmp_path}/{name} can't be read after ")
    assert re.search(words, message), message


def test_what_a_task_finds_wrong_is_said_here(cluster, small, tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n{"te')
    words = (
        f"^dataset: {tmp_path}/a.jsonl can't be read after 1 documents: Unterminated"
    )
    with pytest.raises(ValueError, match=words):
        texts(small(dataset=f"{tmp_path}/a.jsonl"))


class BreaksOff(http.server.BaseHTTPRequestHandler):
    """Promises a long file, sends two documents and a half, and hangs up."""

    def do_HEAD(self):
        self.send_response(200)
        self.send_header("Content-Length", "1000000")
        self.end_headers()

    def do_GET(self):
        self.do_HEAD()
        self.wfile.write(b'{"text": "a"}\n{"text": "b"}\n{"te')

    def log_message(self, *_):
        pass


def test_a_store_that_breaks_off_is_not_the_files_fault():
    """A connection that ends is said as one: nobody is told to mend the file."""
    with http.server.HTTPServer(("127.0.0.1", 0), BreaksOff) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}/a.jsonl"
        with (
            fsspec.open(url) as file,
            pytest.raises(ConnectionError, match="a.jsonl can't be read further") as e,
        ):
            list(trainkit.corpus.texts_in(file, "a.jsonl", "text"))
        server.shutdown()
    assert "Check the disk or the store" in str(e.value)
    assert "Mend" not in str(e.value)


def test_parquet_with_other_columns(tmp_path):
    """Only the column is read: the others may be large."""
    table = pa.table({"body": ["some", "more"], "title": ["one", None]})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    assert read_here(tmp_path / "a.parquet", "body") == ["some", "more"]
    for column, words in {
        "text": r"after 0 documents: found None in one of the columns \['body', 'title'\]",
        "title": r"after 1 documents: found None in one of the columns \['title'\]",
    }.items():
        with pytest.raises(ValueError, match=words):
            read_here(tmp_path / "a.parquet", column)


def test_the_column_is_part_of_what_tokens_are_made_from(small, tmp_path):
    """But the usual one isn't said, as in manifests of before there was a choice."""
    (tmp_path / "a.jsonl").write_text('{"text": "a", "body": "b"}\n')
    for column, said in ({"text": False, "body": True}).items():
        config = small(dataset=f"{tmp_path}/a.jsonl", text_column=column)
        source = trainkit.corpus.describe(config, trainkit.corpus.split)
        assert ("text_column" in source) == said


@pytest.mark.parametrize(
    "name, words",
    [
        ("a.csv", "files that end in .csv; expected one of .txt"),
        ("books.text", "files that end in .text; expected"),
        ("*", "files that end in .csv, .text, .txt; expected .* End the pattern in"),
    ],
)
def test_files_of_other_kinds_are_named(small, tmp_path, name, words):
    for file in ("a.csv", "books.text", "a.txt"):
        (tmp_path / file).write_text("a")
    with pytest.raises(ValueError, match=f"dataset: .*{words}"):
        trainkit.corpus.read(small(dataset=f"{tmp_path}/{name}"))


@pytest.mark.parametrize("name", ["books*.text", "/no/such/books.text", "none/*.txt"])
def test_a_pattern_is_no_name_of_a_dataset(small, name):
    with pytest.raises(FileNotFoundError, match="dataset: no file matches"):
        trainkit.corpus.read(small(dataset=name))


def test_a_fraction_that_leaves_nothing_is_refused(small):
    two = datasets.Dataset.from_dict({"text": ["a", "b"]})
    with pytest.raises(
        ValueError, match="val_fraction: 0.9 of 2 documents leaves none"
    ):
        trainkit.corpus.split({"train": two}, small(val_fraction=0.9))


def test_tokens_of_a_url_outlive_its_files(cluster, small, tmp_path, tutorial, capsys):
    """As those of local files do; without tokens, there is nothing to go on with."""
    text = tmp_path / "text"
    text.mkdir()
    write(text, "jsonl")
    config = small(dataset=f"file://{text}", data_dir=str(tmp_path / "data"))
    config = dataclasses.replace(config, val_fraction=0.5)
    made = tutorial.prepare_dataset(config)
    shutil.rmtree(text)
    assert tutorial.prepare_dataset(config) == made
    assert "are used as they are" in capsys.readouterr().out
    elsewhere = dataclasses.replace(config, data_dir=str(tmp_path / "other"))
    with pytest.raises(FileNotFoundError, match="no file matches"):
        tutorial.prepare_dataset(elsewhere)


@pytest.mark.parametrize("suffix", ["jsonl.gz", "jsonl.zst", "txt.gz"])
def test_compressed_files_with_a_column_of_another_name(
    cluster, small, tmp_path, suffix
):
    for number in range(3):
        with pa.output_stream(str(tmp_path / f"{number}.{suffix}")) as file:
            if suffix == "txt.gz":
                file.write(f"{number} {TEXTS[2]}".encode())
                continue
            for text in TEXTS:
                line = {"body": f"{number} {text}", "n": 1}
                file.write(json.dumps(line).encode() + b"\n")
    config = small(dataset=f"file://{tmp_path}/*.{suffix}", text_column="body")
    wanted = TEXTS[2:3] if suffix == "txt.gz" else TEXTS
    expected = [f"{number} {text}" for number in range(3) for text in wanted]
    assert [row["text"] for row in rows_of(config)] == expected
    found = trainkit.corpus.describe(config, trainkit.corpus.split)
    assert found["text_column"] == "body"
    if suffix != "txt.gz":
        words = r"found None in one of the columns \['body', 'n'\]"
        with pytest.raises(ValueError, match=words):
            rows_of(small(dataset=config.dataset))


@pytest.mark.parametrize(
    "url, words",
    [
        ("file://{}/none/*.jsonl", "no file matches file"),
        ("nowhere://{}/*.jsonl", "cannot list nowhere.* package"),
    ],
)
def test_what_a_url_cannot_name(small, tmp_path, url, words):
    with pytest.raises((FileNotFoundError, ConnectionError), match=f"dataset: {words}"):
        trainkit.corpus.read(small(dataset=url.format(tmp_path)))


@pytest.mark.parametrize("fraction", [0.0005, 0.1, 0.25, 0.9])
def test_documents_for_validation_are_spread_evenly(fraction):
    """The first is one, so a few documents have one; as many as nanoGPT takes."""
    for size in (1, 2, 9, 2_000, 4_001):
        places = [n for n in range(size) if trainkit.token_files.is_val(n, fraction)]
        assert len(places) == math.ceil(fraction * size) and places[0] == 0
        gaps = {after - before for before, after in zip(places, places[1:])}
        assert all(abs(gap - 1 / fraction) < 1 for gap in gaps)


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
