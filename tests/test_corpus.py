"""Step 2: which documents are read, what is refused, and the tokens in the files."""

import errno
import gzip
import io
import itertools
import json
import math
import os
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
import ray
import tiktoken
from samples import Blocks, without_a_cluster

import trainkit.corpus
import trainkit.token_files

gz = partial(gzip.compress, mtime=0)  # the same bytes at any time


def parquet(**columns) -> bytes:
    pyarrow.parquet.write_table(pa.table(columns), file := io.BytesIO())
    return file.getvalue()


def put(folder: Path, **files: str | bytes) -> Path:
    """Files of these names, in which __ stands for a slash, in a folder."""
    folder.mkdir(exist_ok=True)
    for name, contents in files.items():
        path = folder / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(contents.encode() if isinstance(contents, str) else contents)
    return folder


def read_here(config) -> list[str]:
    """The documents, read in this process as tasks of Ray Data read them."""
    system, files, _ = trainkit.corpus.find_files(config.dataset)
    texts = (trainkit.corpus.texts_in(system, f, config.text_column) for f in files)
    return [text for part in texts for text in part]


def tokenize(rows, config) -> dict:
    """Its letters, if they aren't too many for uint16."""
    tokens = (np.array([*map(ord, x)], config.token_dtype) for x in rows["text"])
    return {"split": rows["split"], "tokens": [x.tobytes() for x in tokens]}


@pytest.mark.parametrize("name", ["{}/*.txt", "{}", "file://{}"])
def test_a_link_is_what_it_leads_to(small, tmp_path, name):
    """In a folder of files, and in one of links, as the cache of the hub has them."""
    books = put(tmp_path / "books", **{"a.txt": "a"})
    put(tmp_path, **{"blobs__1": "one", "blobs__2": "two"})
    more = put(tmp_path / "b")
    for folder, texts in ((books, ["a", "one", "two"]), (more, ["one", "two"])):
        for number in (1, 2):
            (folder / f"x{number}.txt").symlink_to(f"../blobs/{number}")
        assert read_here(small(dataset=name.format(folder))) == texts
    (put(tmp_path / "above") / "link").symlink_to(books)
    for pattern in ("above/*/*.txt", "above"):
        assert len(read_here(small(dataset=f"{tmp_path}/{pattern}"))) == 3
    (books / "back").symlink_to(tmp_path)
    if "*" not in name:  # a pattern can't mean it
        with pytest.raises(ValueError, match="books/back', which can't be read"):
            read_here(small(dataset=name.format(books)))


NAMES = ["a1.txt", "a[1].txt", "why!.txt", "why?.txt", ".a.txt", ".git/b.txt"]
NAMES += ["_temporary/c.txt", "Bücher [1].txt", "100% #1 a::b.txt", "n\u202fw\n.txt"]
NAMES += ["sub/d.txt", "sub/sub/e.txt"]
SEEN = [name for name in NAMES if name[0] not in "._"]


@pytest.mark.parametrize(
    "pattern, expected",
    [
        ("a[1].txt", ["a[1].txt"]),  # a file of that name
        ("a*.txt", ["a1.txt", "a[1].txt"]),
        ("why?.txt", ["why?.txt"]),  # so is this
        ("B*r [[]1].txt", ["Bücher [1].txt"]),
        (".git/*.txt", [".git/b.txt"]),  # what is named isn't left out
        ("*/*.txt", ["sub/d.txt"]),
        ("**/*.txt", sorted(SEEN)),
    ],
)
def test_what_the_pattern_matches_is_read_once(
    small, tmp_path, monkeypatch, pattern, expected
):
    """In the order of the paths, and with the files that the manifest names."""
    put(tmp_path, **{name: name for name in NAMES})
    monkeypatch.chdir(tmp_path)
    assert read_here(small(dataset=pattern)) == expected
    system, files, left_out = trainkit.corpus.find_files(pattern)
    assert trainkit.corpus.versions(system, files)["files"] == len(expected)
    if pattern == "**/*.txt":
        assert [Path(f).name for f in left_out] == [".a.txt", "b.txt", "c.txt"]


@pytest.mark.parametrize(
    "files, name, words",
    [
        (["a.csv"], "a.csv", r"end in .csv, such as .*a.csv; expected one of .txt"),
        (["a.jsonl", "a.txt"], "*", "end in .jsonl, .txt, .* End the pattern in"),
        (["a.parquet", "README.md"], "", "end in .md, .parquet, such as .*README"),
        ([], "books*.text", "no file matches"),
        (["_SUCCESS", ".a.txt"], "", "no file matches"),
        ([b"r\xe9sum\xe9.txt"], "", r"sum\\udce9.txt', which can't be .* isn't UTF-8"),
        ([], "../odd/lin*.txt", "link.txt', which can't be"),
        ([], "../odd/pip*.txt", "pipe.txt', which can't be"),
        ([], "nowhere://a/*.txt", "cannot list nowhere.* package"),
    ],
    ids=str,
)
def test_what_cannot_be_taken_is_named(small, tmp_path, files, name, words):
    put(tmp_path / "books", **{os.fsdecode(file): "" for file in files})
    odd = put(tmp_path / "odd")
    (odd / "link.txt").symlink_to("nothing")
    os.mkfifo(odd / "pipe.txt")  # which would be read without an end
    name = name if "://" in name else f"{tmp_path}/books/{name}"
    with pytest.raises((ValueError, OSError), match=f"dataset: .*{words}"):
        trainkit.corpus.read(small(dataset=name))


LINE = '{"text": "words"}\n'


@pytest.mark.parametrize(
    "name, contents, expected",
    [
        ("a.txt", "\ufeffwords", ["words"]),
        ("a.jsonl", "\ufeff" + LINE + "\n" + LINE, ["words"] * 2),
        ("a.json", "\ufeff[\n" + LINE + "]", ["words"]),
        ("a.json", LINE * 2, ["words"] * 2),
        ("a.TXT", "one\r\ntwo\r\n", ["one\r\ntwo\r\n"]),
        ("a.jsonl.gz", gz(LINE.encode()) * 2, ["words"] * 2),  # two members
        ("a.txt.gz", gz(b"one ") + gz(b"text"), ["one text"]),
        ("a.jsonl.zst", pa.compress(LINE.encode() * 2, "zstd", asbytes=True), ["words"] * 2),
        ("a.parquet", parquet(text=["some", "more"], title=["one", None]), ["some", "more"]),
    ],
)  # fmt: skip
def test_the_text_of_a_file(small, tmp_path, name, contents, expected):
    put(tmp_path, **{name: contents})
    assert read_here(small(dataset=f"{tmp_path}/{name}")) == expected


LIST = "a list of JSON objects, or one in each line"


@pytest.mark.parametrize(
    "name, contents, words",
    [
        ("a.json", "3", f"found 3.* Expected {LIST}"),
        ("a.jsonl", "", "after 0 .*: it is empty.* Expected a JSON object in each"),
        ("a.json", '[{"text": "a"}, {"te', f"Unterminated .*line 1.* Expected {LIST}"),
        ("a.jsonl", '{"text": "a"}\n{"te', "after 1 documents: .*Unterminated.* in each"),
        ("a.jsonl", '{"text": "a"}\n{"text": {"b": 1}}\n', "1 documents: .*found {'b': 1}"),
        ("a.jsonl", '{"body": "a"}\n', r"found None, in the columns \['body'\]"),
        ("a.jsonl", '{"text": "\\ud800"}\n', "surrogates not allowed"),
        ("a.txt", b"PK\x03\x04\xff", "byte 0xff in position 4.* Expected UTF-8 text. Mend"),
        ("a.parquet", parquet(a=["a"], b=[1]), r"0 .* None, in the columns \['a', 'b'\]"),
        ("a.parquet", parquet(text=["a", None], b=[1, 2]), r"1 .*columns \['text'\]"),
        ("a.txt.gz", gz(b"text" * 999)[:-9], "after 0"),
        ("a.jsonl", LINE + '{"text": "longer"}', "after 1 .* more than 5 characters"),
    ],
)  # fmt: skip
def test_unusable_files_are_named(small, tmp_path, monkeypatch, name, contents, words):
    monkeypatch.setattr(trainkit.corpus, "LARGEST", 5)
    put(tmp_path, **{name: contents})
    place = f"{tmp_path}/{name}"
    words = rf"^dataset: {place} can't be read .*{words}"
    with pytest.raises(ValueError, match=words):
        read_here(small(dataset=place))


def test_an_address_may_have_a_query():
    kind_of = trainkit.corpus.kind_of
    assert kind_of("https://a.org/b.JSONL.gz?c=.txt") == (".jsonl", "gzip")
    assert kind_of("s3://a/b?c.parquet") == (".parquet", None)


# The hub.


def hub_folder(folder: Path, **splits: list[list[str]]) -> str:
    """A dataset as it lies on the hub: Parquet files, named by split, in `data`."""
    for split, files in splits.items():
        for i, texts in enumerate(files):
            name = f"data__{split}-{i:05d}-of-{len(files):05d}.parquet"
            put(folder, **{name: parquet(text=texts)})
    return f"hub:{folder}"


STORIES = [[f"story {i} of file {k}" for i in range(50)] for k in range(4)]


def parts_of(config) -> dict[str, list[str]]:
    return {name: [*x["text"]] for name, x in trainkit.corpus.load(config).items()}


def test_dataset_of_the_hub_keeps_its_validation_split(small, tmp_path):
    """As roneneldan/TinyStories has one, beside four files to train on.

    For the first documents, the files behind them are never opened: here, two are no Parquet.
    """
    folder = hub_folder(tmp_path / "a", train=STORIES, validation=[["last", "words"]])
    found = parts_of(small(dataset=folder))
    assert found == {"train": sum(STORIES, []), "val": ["last", "words"]}
    assert len(read_here(small(dataset=folder.removeprefix("hub:")))) == 202  # no sign
    for i in (2, 3):
        path = next(tmp_path.glob(f"a/data/train-{i:05d}-*"))
        path.write_bytes(path.read_bytes()[:-99])
    found = parts_of(small(dataset=folder, max_documents=70))
    assert found == {"train": sum(STORIES, [])[:70], "val": ["last", "words"]}
    with pytest.raises(ConnectionError, match="dataset: cannot load"):
        trainkit.corpus.load(small(dataset=folder))  # all of them


def test_a_configuration_of_a_dataset_of_the_hub(small, tmp_path):
    """As wikitext has wikitext-2-raw-v1 and wikitext-103-raw-v1."""
    names, configs = ("two", "three"), ""
    for name in names:
        hub_folder(tmp_path / name, train=[[f"{name} {i}" for i in range(4)]])
        configs += f"- config_name: {name}\n  data_files: {name}/data/*\n"
    put(tmp_path, **{"README.md": f"---\nconfigs:\n{configs}---\n"})
    config = small(dataset=f"hub:{tmp_path}", dataset_config="three", val_fraction=0.5)
    found = parts_of(config)
    assert sorted(found["train"] + found["val"]) == [f"three {i}" for i in range(4)]
    source = trainkit.corpus.describe(config, tokenize, [])
    assert source["dataset_config"] == "three"
    with pytest.raises(ConnectionError, match="(?s)two.*three.*dataset_config"):
        trainkit.corpus.load(small(dataset=f"hub:{tmp_path}"))
    files = small(dataset=f"{tmp_path}/two/data", dataset_config="two")
    with pytest.raises(ValueError, match="dataset_config: only a dataset of the hub"):
        trainkit.corpus.read(files)


@pytest.mark.parametrize(
    "name, splits, column, words",
    [
        ("a", {"test": STORIES}, "text", r"dataset: cannot load.*splits \['test'\]"),
        ("a", {"train": [["a", None]]}, "text", "text_.* of strings, without gaps"),
        ("a", {"train": STORIES}, "body", "text_column: .* column 'body' of strings"),
        ("a", {"train": [[1, 2]]}, "text", "text_column: .* column 'text' of strings"),
        ("v[1]", {"train": STORIES}, "text", "a pattern.*local .txt.*train.bin"),
    ],
)
def test_what_the_hub_lacks(small, tmp_path, name, splits, column, words):
    folder = hub_folder(tmp_path / name, **splits)
    with pytest.raises((ConnectionError, ValueError), match=words):
        trainkit.corpus.load(small(dataset=folder, text_column=column))


def test_split_is_a_division(small, tmp_path):
    """Each document is in one part, which no seed changes."""
    texts = [str(i) for i in range(100)]
    folder = hub_folder(tmp_path, train=[texts])
    parts = parts_of(small(dataset=folder, val_fraction=0.08))
    assert len(parts["val"]) == 8
    assert sorted(parts["train"] + parts["val"]) == sorted(texts)
    assert parts_of(small(dataset=folder, val_fraction=0.08, seed=1)) == parts
    for size in (1, 2):  # `write` divides them, or says what is wrong
        few = small(dataset=folder, val_fraction=0.9, max_documents=size)
        assert parts_of(few) == {"": texts[:size]}
    builtin = parts_of(small(max_documents=9, val_fraction=0.3))
    assert [len(part) for part in builtin.values()] == [6, 3]


# Writing, and what is there already.


@pytest.fixture
def gpt2(small):
    """A small configuration with GPT-2's vocabulary, and a batch that few tokens fill."""
    few = {"val_fraction": 0.1, "batch_size": 1, "eval_steps": 1}
    return partial(small, vocab_size=50_257, **few)


@pytest.fixture
def write(gpt2):
    """Writes rows of (split, tokens) into the data_dir of a small configuration.

    Returns the configuration and the manifest.
    """

    def write(rows, error=None, **changes):
        def blocks():
            splits, documents = zip(*rows)
            tokens = [np.array(ids, np.uint16).tobytes() for ids in documents]
            yield {"split": splits, "tokens": tokens}
            if error:
                raise error

        config = gpt2(block_size=1, **changes)
        context = SimpleNamespace(execution_options=SimpleNamespace())
        documents = Blocks(blocks(), context)
        return config, trainkit.corpus.write(config, documents, tokenize)

    return write


def written(config) -> list[list[int]]:
    paths = [trainkit.token_files.path_of(config, split) for split in ("train", "val")]
    return [np.fromfile(path, np.uint16).tolist() for path in paths]


def test_documents_of_files_are_counted(write, tmp_path):
    """Half of them are for validation: the first, the third, and the fifth."""
    files = [f"{tmp_path}/{name}.jsonl" for name in "abc"]
    put(tmp_path, **{f"{name}.jsonl": LINE * 2 for name in "abc"})
    rows = [("", [1, 9]), (f"2 documents in {files[0]}", [2, 9])]
    rows += [("", [3, 9]), (f"2 documents in {files[1]}", [4, 9]), ("", [5, 9])]
    config = {"dataset": f"{tmp_path}/*.jsonl", "val_fraction": 0.5}
    found, manifest = write(rows, **config, max_documents=5)
    assert written(found) == [[2, 9, 4, 9], [1, 9, 3, 9, 5, 9]]
    assert manifest["files"] == dict(zip(files, (2, 2, 1)))
    for wrong in (rows[1:], rows[::-1], [*rows[:2], *rows[1:]]):
        with pytest.raises(ValueError, match="2 documents, and tokenize gave"):
            write(wrong, data_dir=f"{tmp_path}/other", **config)
    with pytest.raises(ValueError, match="c.jsonl, no document arrived, or not all"):
        write(rows[:4], data_dir=f"{tmp_path}/other", **config)


def test_a_split_without_documents_is_refused(write):
    words = "val_fraction: 0.25 of 3 documents leaves none to"
    for split, lacking in (("train", "validate with; set"), ("val", "train on; set")):
        with pytest.raises(ValueError, match=f"{words} {lacking}"):
            write([(split, [1, 2, 3])] * 3, val_fraction=0.25)


def task_error(text: str) -> ray.exceptions.RayTaskError:
    """Ray gives a task's error as text."""
    return ray.exceptions.RayTaskError("read", f"Traceback\n{text}\n", Exception())


@pytest.mark.parametrize(
    "error, kind, words",
    [
        (OSError(errno.ENOSPC, "full"), OSError, "data_dir: the disk of .* has no"),
        (OSError(errno.EIO, "broken cable"), OSError, "cable"),
        (task_error("ConnectionError: tokenizer: no x"), ConnectionError, "^tokenizer: no x$"),
        (task_error("KeyError: 'x'"), ray.exceptions.RayTaskError, "KeyError: 'x'"),
    ],
)  # fmt: skip
def test_what_ends_the_writing_is_said_and_leaves_nothing(
    write, small, error, kind, words
):
    number = getattr(error, "errno", None)
    with pytest.raises(kind, match=words) as found:
        write([("train", [1]), ("val", [2])], error=error)
    assert getattr(found.value, "errno", None) == number
    folder = Path(small().data_dir)
    assert not folder.exists() and not [*folder.parent.glob("*.partial*")]


@pytest.fixture
def prepared(write, tmp_path):
    """The configuration and manifest of tokens of two files."""
    put(tmp_path, **{"a.txt": "to be or not to be", "b.txt": "that is the question"})
    rows = [(f"1 documents in {tmp_path}/{k}.txt", [1, 2]) for k in "ab"]
    return write(rows, dataset=f"file://{tmp_path}/*.txt")


@pytest.mark.parametrize(
    "change",
    [str.upper, lambda text: text[:900], lambda text: text.replace("to be", "2b")],
)
def test_another_tokenize_is_another_source(prepared, tmp_path, change):
    """Seen in fixed texts, or in the first documents."""
    config, manifest = prepared

    def changed(rows, config) -> dict:
        return tokenize({**rows, "text": [*map(change, rows["text"])]}, config)

    assert trainkit.corpus.existing(config, tokenize) == manifest
    for path in [None, *tmp_path.glob("*.txt")]:  # they may go, and it is seen as well
        with pytest.raises(FileExistsError, match="source: what tokenize does was"):
            trainkit.corpus.existing(config, changed)
        path and path.unlink()


def test_tokens_of_a_text_that_was_edited_are_refused(prepared, tmp_path, capsys):
    """In place, with the same length; a copy is the same text, and tokens outlive it."""
    config, manifest = prepared
    os.utime(tmp_path / "a.txt", (0, 0))
    assert trainkit.corpus.existing(config, tokenize) == manifest
    put(tmp_path, **{"a.txt": "to be or not to do"})
    with pytest.raises(FileExistsError, match="of another source: .*digest was"):
        trainkit.corpus.existing(config, tokenize)
    put(tmp_path, **{"a.txt": "to be or not to be", "c.txt": "more"})
    with pytest.raises(FileExistsError, match="files was 2, and is 3.*Choose another"):
        trainkit.corpus.existing(config, tokenize)
    for path in tmp_path.glob("*.txt"):
        path.unlink()
    assert trainkit.corpus.existing(config, tokenize) == manifest
    assert "are used as they are" in capsys.readouterr().out


def test_manifests_of_older_versions_say_less(small, write_bins):
    config = write_bins(small(vocab_size=50_257))
    source = {"dataset": "builtin", "tokenizer": "gpt2", "code": "1a2b CPython"}
    manifest = {"source": source, "documents": 7, "tokens": {"train": 2001, "val": 401}}
    path = Path(config.data_dir) / "manifest.json"
    path.write_text(json.dumps(manifest))
    assert trainkit.corpus.existing(config, tokenize) == manifest
    path.write_text(json.dumps(manifest | {"source": source | {"val_fraction": 0.5}}))
    with pytest.raises(FileExistsError, match="data_dir: .*val_fraction was 0.5"):
        trainkit.corpus.existing(config, tokenize)


@pytest.mark.parametrize(
    "fraction, first",
    [(0.0005, [0, 2_000]), (0.2, [0, 5]), (0.3, [0, 3, 6, 10]), (0.9, [0, 1, 2])],
)
def test_documents_for_validation_are_spread_evenly(fraction, first):
    """The first is one, so a few documents have one; as many as nanoGPT takes.

    They never change.
    """
    for size in (1, 2, 9, 2_000, 4_001):
        places = [n for n in range(size) if trainkit.corpus.is_val(n, fraction)]
        assert len(places) == math.ceil(fraction * size)
        gaps = {after - before for before, after in zip(places, places[1:])}
        assert all(abs(gap - 1 / fraction) < 1 for gap in gaps)
    assert places[: len(first)] == first


# Tokens as nanoGPT's prepare.py writes them.


def encode(texts: list[str]) -> list[int]:
    """What encode_ordinary gives, and an end of text after each."""
    encoding = tiktoken.get_encoding("gpt2")
    ids = ([*encoding.encode_ordinary(text), encoding.eot_token] for text in texts)
    return [*itertools.chain(*ids)]


def bins_of_files(texts: list[str], each: int) -> list[list[int]]:
    """With the first document and each so many after it for validation."""
    train = [text for place, text in enumerate(texts) if place % each]
    return [encode(train), encode(texts[::each])]


TEXTS = [f"Text {i}: {'word ' * (i % 7)}\n<|endoftext|> é 漢字" for i in range(1500)]


def test_builtin_text_byte_for_byte(tutorial, cluster, gpt2):
    config = gpt2()
    manifest = tutorial.prepare_dataset(config)
    documents = datasets.Dataset.from_dict({"text": trainkit.corpus.help_pages()})
    split = documents.train_test_split(test_size=0.1, seed=2357, shuffle=True)
    train, val = (encode(split[name]["text"]) for name in ("train", "test"))
    assert written(config) == [train, val] and len(documents) > 50
    assert manifest["tokens"] == {"train": len(train), "val": len(val)}


def test_local_files_byte_for_byte(tutorial, gpt2, tmp_path, monkeypatch):
    """All documents of two files, or the first of them."""
    without_a_cluster(monkeypatch)
    paths = [f"{tmp_path}/{name}.parquet" for name in "ab"]
    for path, texts in zip(paths, (TEXTS[:750], TEXTS[750:])):
        Path(path).write_bytes(parquet(body=texts))
    options = {"dataset": f"{tmp_path}/*.parquet", "text_column": "body"}
    for most in (1500, 755):
        options |= {"max_documents": most, "data_dir": f"{tmp_path}/data{most}"}
        config = gpt2(val_fraction=0.2, **options)
        manifest = tutorial.prepare_dataset(config)
        assert written(config) == bins_of_files(TEXTS[:most], 5)
        assert manifest["files"] == dict(zip(paths, (750, most - 750)))


def test_many_small_files_and_a_large_one(tutorial, cluster, gpt2, tmp_path):
    """In order, however the tasks finish: the first has 3 MB, and 300 others a line.

    What a task finds wrong, far into a file, leaves nothing.
    """
    long = "\r\n".join(f"{i} words <|endoftext|>" for i in range(120_000))
    texts = [long, *(f"short {i}\r\n" for i in range(300))]
    put(tmp_path, **{f"{i:04d}.txt": text for i, text in enumerate(texts)})
    config = gpt2(dataset=str(tmp_path / "[0-9]*.txt"), val_fraction=0.01)
    manifest = tutorial.prepare_dataset(config)
    assert set(manifest["files"].values()) == {1} and len(manifest["files"]) == 301
    assert written(config) == bins_of_files(texts, 100)

    path = tmp_path / "a.jsonl"
    path.write_text(LINE * 150 + '{"text": null}\n')
    config = gpt2(dataset=str(path), data_dir=f"{tmp_path}/new/data")
    with pytest.raises(ValueError, match=f"^dataset: {path} can't be read after 150 "):
        tutorial.prepare_dataset(config)
    assert not [*tmp_path.glob("new/*")]


def test_datasets_of_the_hub_byte_for_byte(tutorial, gpt2, tmp_path, monkeypatch):
    """With a split for validation, or one document, which is cut in two, as a file is."""
    without_a_cluster(monkeypatch)
    folder = hub_folder(tmp_path / "a", train=[TEXTS[:50]], validation=[TEXTS[50:60]])
    config = gpt2(dataset=folder)
    manifest = tutorial.prepare_dataset(config)
    assert written(config) == [encode(TEXTS[:50]), encode(TEXTS[50:60])]
    assert manifest["first documents"] == TEXTS[:50] and manifest["documents"] == 60
    assert manifest["source"]["files"] == 2 and manifest["files"] == {}

    text = "To be, or not to be: that is the question. " * 50
    put(tmp_path, **{"input.txt": text})
    names = (hub_folder(tmp_path / "b", train=[[text]]), f"{tmp_path}/input.txt")
    for number, name in enumerate(names):
        config = gpt2(dataset=name, data_dir=f"{tmp_path}/data{number}")
        tutorial.prepare_dataset(config)
        train, val = written(config)
        assert train + val == encode([text])
        assert len(val) == math.ceil(0.1 * len(train + val))
