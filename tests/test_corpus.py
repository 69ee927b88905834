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

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
import ray
import tiktoken
from samples import Blocks, without_a_cluster

from trainkit import corpus, token_files

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
    system, files, _ = corpus.find_files(config.dataset)
    texts = (corpus.texts_in(system, f, config.text_column) for f in files)
    return [text for part in texts for text in part]


def tokenize(rows, config) -> dict:
    """Its letters, if they aren't too many for uint16."""
    tokens = (np.array([*map(ord, x)], config.token_dtype) for x in rows["text"])
    return {"split": rows["split"], "tokens": [x.tobytes() for x in tokens]}


@pytest.mark.parametrize("name", ["{}/*.txt", "{}", "file://{}"])
def test_a_link_is_what_it_leads_to(small, tmp_path, name):
    """As in the cache of the hub, which has the files of a dataset elsewhere."""
    books = put(tmp_path / "books", **{"a.txt": "a"})
    put(tmp_path, blobs__1="one", blobs__2="two")
    for number in (1, 2):
        (books / f"x{number}.txt").symlink_to(f"../blobs/{number}")
    assert read_here(small(dataset=name.format(books))) == ["a", "one", "two"]
    (put(tmp_path / "above") / "link").symlink_to(books)
    for pattern in ("above/*/*.txt", "above"):
        assert len(read_here(small(dataset=f"{tmp_path}/{pattern}"))) == 3
    (books / "back").symlink_to(tmp_path)
    if "*" not in name:  # a pattern can't mean it
        with pytest.raises(ValueError, match="books/back', which can't be read"):
            read_here(small(dataset=name.format(books)))


SEEN = ["a1.txt", "a[1].txt", "why!.txt", "why?.txt", "Bücher [1].txt"]
SEEN += ["100% #1 a::b.txt", "n\u202fw\n.txt", "sub/d.txt", "sub/sub/e.txt"]
HIDDEN = [".a.txt", ".git/b.txt", "_temporary/c.txt"]
PATTERNS = {
    "a[1].txt": ["a[1].txt"],  # a file of that name
    "a*.txt": ["a1.txt", "a[1].txt"],
    "B*r [[]1].txt": ["Bücher [1].txt"],
    ".git/*.txt": [".git/b.txt"],  # what is named isn't left out
    "*/*.txt": ["sub/d.txt"],
    "**/*.txt": sorted(SEEN),
}


def test_what_the_pattern_matches_is_read_once(small, tmp_path, monkeypatch):
    """In the order of the paths, and with the files that the manifest names."""
    put(tmp_path, **{name: name for name in (*SEEN, *HIDDEN)})
    monkeypatch.chdir(tmp_path)
    for pattern, expected in PATTERNS.items():
        assert read_here(small(dataset=pattern)) == expected
        system, files, left_out = corpus.find_files(pattern)
        assert corpus.versions(system, files)["files"] == len(expected)
    assert left_out == [str(tmp_path / name) for name in HIDDEN]


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
        ("a.jsonl.zst", pa.compress(LINE.encode() * 2, "zstd", asbytes=True), ["words"] * 2),
        ("a.parquet", parquet(text=["some", "more"], title=["one", None]), ["some", "more"]),
    ],
)  # fmt: skip
def test_the_text_of_a_file(small, tmp_path, name, contents, expected):
    put(tmp_path, **{name: contents})
    assert read_here(small(dataset=f"{tmp_path}/{name}")) == expected


LIST = "a list of JSON objects, or one in each line"


@pytest.mark.parametrize(
    "files, name, words",
    [
        # The name, or what it leads to.
        ({"a.csv": ""}, "a.csv", "end in .csv, such as .*a.csv; expected one of .txt"),
        ({"a.jsonl": "", "a.txt": ""}, "", "end in .jsonl, .txt, .* End the pattern in"),
        ({}, "books*.text", "no file matches"),
        ({"_SUCCESS": "", ".a.txt": ""}, "", "no file matches"),
        ({"r\udce9sum\udce9.txt": ""}, "", r"sum\\udce9.txt', which can't be .* isn't UTF-8"),
        ({}, "../odd/lin*.txt", "link.txt', which can't be"),
        ({}, "../odd/pip*.txt", "pipe.txt', which can't be"),
        ({}, "nowhere://a/*.txt", "cannot list nowhere.* package"),
        # What is in a file.
        ({"a.json": "3"}, "", f"a.json can't be read after 0 .*found 3.* Expected {LIST}"),
        ({"a.jsonl": ""}, "", "after 0 .*: it is empty.* Expected a JSON object in each"),
        ({"a.json": '[{"text": "a"}, {"te'}, "", f"Unterminated .*line 1.* Expected {LIST}"),
        ({"a.jsonl": '{"text": "a"}\n{"te'}, "", "after 1 documents: .*Unterminated.* in each"),
        ({"a.jsonl": '{"text": "a"}\n{"text": {"b": 1}}'}, "", "1 documents: .*found {'b': 1}"),
        ({"a.jsonl": '{"body": "a"}'}, "", r"found None, in the columns \['body'\]"),
        ({"a.jsonl": '{"text": "\\ud800"}\n'}, "", "surrogates not allowed"),
        ({"a.txt": b"PK\x03\x04\xff"}, "", "byte 0xff in position 4.* Expected UTF-8 text"),
        ({"a.parquet": parquet(a=["a"], b=[1])}, "", r"0 .* None, in the columns \['a', 'b'\]"),
        ({"a.parquet": parquet(text=["a", None], b=[1, 2])}, "", r"1 .*columns \['text'\]"),
        ({"a.txt.gz": gz(b"text" * 999)[:-9]}, "", "after 0"),
        ({"a.jsonl": LINE + '{"text": "longer"}'}, "", "after 1 .* more than 5 characters"),
    ],
    ids=repr,
)  # fmt: skip
def test_what_cannot_be_read_is_named(small, tmp_path, monkeypatch, files, name, words):
    monkeypatch.setattr(corpus, "LARGEST", 5)
    put(tmp_path / "books", **files)
    odd = put(tmp_path / "odd")
    (odd / "link.txt").symlink_to("nothing")
    os.mkfifo(odd / "pipe.txt")  # which would be read without an end
    name = name if "://" in name else f"{tmp_path}/books/{name}"
    with pytest.raises((ValueError, OSError), match=f"^dataset: .*{words}") as error:
        read_here(small(dataset=name))
    assert name in str(error.value)


def test_an_address_may_have_a_query():
    kind_of = corpus.kind_of
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
    return {name: [*x["text"]] for name, x in corpus.load(config).items()}


def test_dataset_of_the_hub_keeps_its_validation_split(small, tmp_path):
    """As roneneldan/TinyStories has one, beside four files to train on.

    For the first documents, the files behind them are never opened: here, two are no Parquet.
    """
    folder = hub_folder(tmp_path / "a", train=STORIES, validation=[["last", "words"]])
    stories, val = sum(STORIES, []), ["last", "words"]
    assert parts_of(small(dataset=folder)) == {"train": stories, "val": val}
    assert len(read_here(small(dataset=folder.removeprefix("hub:")))) == 202  # no sign
    for path in tmp_path.glob("a/data/train-0000[23]-*"):
        path.write_bytes(path.read_bytes()[:-99])
    found = parts_of(small(dataset=folder, max_documents=70))
    assert found == {"train": stories[:70], "val": val}
    with pytest.raises(ConnectionError, match="dataset: cannot load"):
        corpus.load(small(dataset=folder))  # all of them


def test_a_configuration_of_a_dataset_of_the_hub(small, tmp_path):
    """As wikitext has wikitext-2-raw-v1 and wikitext-103-raw-v1."""
    configs = ""
    for name in ("two", "three"):
        hub_folder(tmp_path / name, train=[[name]])
        configs += f"- config_name: {name}\n  data_files: {name}/data/*\n"
    put(tmp_path, **{"README.md": f"---\nconfigs:\n{configs}---\n"})
    config = small(dataset=f"hub:{tmp_path}", dataset_config="three")
    assert parts_of(config) == {"": ["three"]}  # a single one, which `write` divides
    assert corpus.describe(config, tokenize, [])["dataset_config"] == "three"
    with pytest.raises(ConnectionError, match="(?s)two.*three.*dataset_config"):
        corpus.load(small(dataset=f"hub:{tmp_path}"))
    files = small(dataset=f"{tmp_path}/two/data", dataset_config="two")
    with pytest.raises(ValueError, match="dataset_config: only a dataset of the hub"):
        corpus.read(files)


@pytest.mark.parametrize(
    "name, texts, column, words",
    [
        ("a", {"test": STORIES}, "text", r"dataset: cannot load.*splits \['test'\]"),
        ("a", {"train": [["a", None]]}, "text", "text_.* of strings, without gaps"),
        ("a", {"train": STORIES}, "body", "text_column: .* column 'body' of strings"),
        ("a", {"train": [[1, 2]]}, "text", "text_column: .* column 'text' of strings"),
        ("v[1]", {"train": STORIES}, "text", "a pattern.*local .txt.*train.bin"),
    ],
)
def test_what_the_hub_lacks(small, tmp_path, name, texts, column, words):
    config = small(dataset=hub_folder(tmp_path / name, **texts), text_column=column)
    with pytest.raises((ConnectionError, ValueError), match=words):
        corpus.load(config)


def test_no_seed_changes_the_split(small):
    """Of the first documents, whatever the seed; test_builtin_text has the division."""
    few = {"max_documents": 9, "val_fraction": 0.3}
    parts, again = (parts_of(small(seed=seed, **few)) for seed in (1, 2))
    assert parts == again and [len(part) for part in parts.values()] == [6, 3]


# Writing, and what is there already.


@pytest.fixture
def gpt2(small):
    """A small configuration with GPT-2's vocabulary, and a batch that few tokens fill."""
    few = {"val_fraction": 0.1, "batch_size": 1, "block_size": 1, "eval_steps": 1}
    return partial(small, vocab_size=50_257, **few)


def write(config, rows, error=None) -> dict:
    """The manifest of what is written of rows of (split, tokens), until an error comes."""

    def blocks():
        splits, documents = zip(*rows)
        tokens = [np.array(ids, np.uint16).tobytes() for ids in documents]
        yield {"split": splits, "tokens": tokens}
        if error:
            raise error

    return corpus.write(config, Blocks(blocks()), tokenize)


def written(config) -> list[list[int]]:
    paths = [token_files.path_of(config, split) for split in ("train", "val")]
    return [np.fromfile(path, np.uint16).tolist() for path in paths]


def test_documents_of_files_are_counted(gpt2, tmp_path):
    """Half of them are for validation: the first, the third, and the fifth."""
    files = [f"{tmp_path}/{name}.jsonl" for name in "abc"]
    put(tmp_path, **{f"{name}.jsonl": LINE * 2 for name in "abc"})
    rows = [("", [1, 9]), (f"2 documents in {files[0]}", [2, 9])]
    rows += [("", [3, 9]), (f"2 documents in {files[1]}", [4, 9]), ("", [5, 9])]
    options = {"dataset": f"{tmp_path}/*.jsonl", "val_fraction": 0.5}
    found = gpt2(**options, max_documents=5)
    assert write(found, rows)["files"] == dict(zip(files, (2, 2, 1)))
    assert written(found) == [[2, 9, 4, 9], [1, 9, 3, 9, 5, 9]]
    config = gpt2(**options, data_dir=f"{tmp_path}/other")
    for wrong in (rows[1:], rows[::-1], [*rows[:2], *rows[1:]]):
        with pytest.raises(ValueError, match="2 documents, and tokenize gave"):
            write(config, wrong)
    with pytest.raises(ValueError, match="c.jsonl, no document arrived, or not all"):
        write(config, rows[:4])


def test_a_split_without_documents_is_refused(gpt2):
    words = "val_fraction: 0.1 of 3 documents leaves none to"
    for split, lacking in (("train", "validate with; set"), ("val", "train on; set")):
        with pytest.raises(ValueError, match=f"{words} {lacking}"):
            write(gpt2(), [(split, [1, 2, 3])] * 3)


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
def test_what_ends_the_writing_is_said_and_leaves_nothing(gpt2, error, kind, words):
    config, number = gpt2(), getattr(error, "errno", None)
    with pytest.raises(kind, match=words) as found:
        write(config, [("train", [1]), ("val", [2])], error)
    assert getattr(found.value, "errno", None) == number
    assert not [*Path(config.data_dir).parent.glob("data*")]


def test_tokens_of_a_text_that_was_edited_are_refused(gpt2, tmp_path, capsys):
    """In place, with the same length; a copy is the same text, and tokens outlive it.

    Another `tokenize` is seen in fixed texts or, as that of "to be", in the first documents.
    """
    put(tmp_path, **{"a.txt": "to be or not to be", "b.txt": "that is the question"})
    rows = [(f"1 documents in {tmp_path}/{k}.txt", [1, 2]) for k in "ab"]
    config = gpt2(dataset=f"file://{tmp_path}/*.txt")
    cuts = (lambda text: text[:900], lambda text: text.replace("to be", "2b"))
    manifest = write(config, rows)

    def assert_known() -> None:
        assert corpus.existing(config, tokenize) == manifest
        for change in (str.upper, *cuts):

            def changed(rows, config, change=change) -> dict:
                return tokenize(rows | {"text": [*map(change, rows["text"])]}, config)

            with pytest.raises(FileExistsError, match="source: what tokenize does was"):
                corpus.existing(config, changed)

    os.utime(tmp_path / "a.txt", (0, 0))
    assert_known()
    put(tmp_path, **{"a.txt": "to be or not to do"})
    with pytest.raises(FileExistsError, match="of another source: .*digest was"):
        corpus.existing(config, tokenize)
    put(tmp_path, **{"a.txt": "to be or not to be", "c.txt": "more"})
    with pytest.raises(FileExistsError, match="files was 2, and is 3.*Choose another"):
        corpus.existing(config, tokenize)
    for path in tmp_path.glob("*.txt"):
        path.unlink()
    assert_known()
    assert "are used as they are" in capsys.readouterr().out

    path = Path(config.data_dir) / "manifest.json"  # those of older versions say less
    source = {"dataset": config.dataset, "tokenizer": "gpt2", "code": "1a2b CPython"}
    manifest = {"source": source, "documents": 2, "tokens": {"train": 2, "val": 2}}
    path.write_text(json.dumps(manifest))
    assert corpus.existing(config, tokenize) == manifest
    path.write_text(json.dumps(manifest | {"source": source | {"val_fraction": 0.5}}))
    with pytest.raises(FileExistsError, match="data_dir: .*val_fraction was 0.5"):
        corpus.existing(config, tokenize)


EVENLY = {0.0005: [0, 2_000], 0.2: [0, 5], 0.3: [0, 3, 6, 10], 0.9: [0, 1, 2]}
EVENLY[0.28] = [0, 3, 7, 10, 14, 17, 21, 25]  # in floating point, 25 x 0.28 exceeds 7


@pytest.mark.parametrize("fraction, first", EVENLY.items())
def test_documents_for_validation_are_spread_evenly(fraction, first):
    """As many as nanoGPT takes, and never others; the first, so a few have one."""
    for size in (1, 2, 9, 2_000, 4_001):
        places = [n for n in range(size) if corpus.is_val(n, fraction)]
        assert len(places) == math.ceil(round(fraction * size, 9))
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
    documents = datasets.Dataset.from_dict({"text": corpus.help_pages()})
    split = documents.train_test_split(test_size=0.1, seed=2357, shuffle=True)
    train, val = (encode(split[name]["text"]) for name in ("train", "test"))
    assert written(config) == [train, val] and len(documents) > 50
    assert manifest["tokens"] == {"train": len(train), "val": len(val)}


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


def test_datasets_byte_for_byte(tutorial, gpt2, tmp_path, monkeypatch):
    """Of the hub, with a split for validation; of files; and a single one, cut in two."""
    without_a_cluster(monkeypatch)
    text = "To be, or not to be: that is the question. " * 50
    put(tmp_path / "files", **{"a.parquet": parquet(body=TEXTS[:750])})
    put(tmp_path / "files", **{"b.parquet": parquet(body=TEXTS[750:])})
    files = {"dataset": f"{tmp_path}/files", "text_column": "body", "val_fraction": 0.2}
    hub = hub_folder(tmp_path / "a", train=[TEXTS[:50]], validation=[TEXTS[50:60]])
    single = hub_folder(tmp_path / "b", train=[[text]])
    file, ids = put(tmp_path, **{"input.txt": text}) / "input.txt", encode([text])
    place = len(ids) - math.ceil(0.1 * len(ids))
    cases = [
        ({"dataset": hub}, [encode(TEXTS[:50]), encode(TEXTS[50:60])]),
        ({"dataset": single}, [ids[:place], ids[place:]]),
        ({"dataset": str(file)}, [ids[:place], ids[place:]]),
        (files, bins_of_files(TEXTS, 5)),
        (files | {"max_documents": 755}, bins_of_files(TEXTS[:755], 5)),
    ]
    manifests = []
    for number, (options, expected) in enumerate(cases):
        config = gpt2(data_dir=f"{tmp_path}/data{number}", **options)
        manifests.append(tutorial.prepare_dataset(config))
        assert written(config) == expected
    first, last = manifests[0], manifests[-1]
    assert first["first documents"] == TEXTS[:50] and first["documents"] == 60
    assert first["source"]["files"] == 2 and first["files"] == {}
    assert [*last["files"].values()] == [750, 5]
