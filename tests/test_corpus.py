"""Step 3: documents become tokens, in order and all of them; what is refused."""

import json
import re
import string
import threading
import time
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import datasets
import numpy as np
import pandas as pd
import pytest
import ray.data
import tiktoken
from samples import END, run_from_guide

from trainkit import corpus, documents, token_files, tokenization


@pytest.fixture
def gpt2(small):
    """A small configuration with GPT-2's vocabulary, and a batch that few tokens fill."""
    options = {"batch_size": 1, "block_size": 1, "eval_windows": 1, "dataset": "few"}
    return partial(small, **options | {"vocab_size": 50_257})


@pytest.fixture
def prepare(tutorial, cluster):
    """`corpus.write` with the notebook's `tokenize`."""
    return partial(corpus.write, tokenize=tutorial.tokenize)


def nothing_in(config) -> bool:
    return not [*Path(config.data_dir).parent.glob("data*")]


def written(config) -> list[list[int]]:
    paths = [token_files.path_of(config, split) for split in token_files.SPLITS]
    return [np.fromfile(path, config.token_dtype).tolist() for path in paths]


def encode(texts) -> list[int]:
    """What encode_ordinary gives, and an end of text after each."""
    encoding = tiktoken.get_encoding("gpt2")
    ids = ([*encoding.encode_ordinary(text), encoding.eot_token] for text in texts)
    return [id for document in ids for id in document]


def from_rows(*rows: dict) -> list[ray.data.Dataset]:
    return [ray.data.from_items([*rows])] * 2


def few(downloads: str = "") -> list[ray.data.Dataset]:
    texts = ("to be", "or not"), ("the same", "question")
    return [ray.data.from_items([{"text": text} for text in part]) for part in texts]


GIVEN = []  # what the next function returns


def given(downloads: str):
    return GIVEN[0]


@pytest.fixture
def tokenize_to(monkeypatch):
    """A function that makes `config.made` of each document; it is sent by value."""
    monkeypatch.setattr(corpus, "_MOST_REPEATED", 1)  # all documents are the same

    def tokenize(row: dict, config):
        return config.made

    return tokenize


def with_tokens(config, made):
    """A configuration with which `tokenize_to` makes this of each document."""
    object.__setattr__(config, "made", made)
    return config


def test_a_dataset_of_the_hub_byte_for_byte(gpt2, prepare, tmp_path):
    """As nanoGPT's prepare.py writes it; two tasks read from the library's cache."""
    texts = [f"{i}<|endoftext|> é 漢字 {'lorem ipsum, ' * 900}" for i in range(1_000)]
    lines = [json.dumps({"title": i, "text": text}) for i, text in enumerate(texts)]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    options = {"data_files": f"{tmp_path}/a.jsonl", "cache_dir": f"{tmp_path}/cache"}
    pages = datasets.load_dataset("json", split="train", **options)
    parts = pages.train_test_split(test_size=0.05, seed=2357, shuffle=True)
    GIVEN[:] = [parts]
    manifest = prepare(gpt2(), given)
    assert written(gpt2()) == [encode(part["text"]) for part in parts.values()]
    assert manifest["documents"] == {"train": 950, "val": 50}
    assert manifest["bytes"]["val"] == sum(
        len(x.encode()) for x in parts["test"]["text"]
    )
    (read, _) = documents.read(gpt2(), lambda downloads: (pages, pages))
    assert read.materialize().num_blocks() == 2


def test_builtin_text_byte_for_byte(gpt2, prepare):
    manifest = prepare(gpt2(dataset="builtin"), documents.builtin)
    pages = datasets.Dataset.from_dict({"text": documents.help_pages()})
    parts = pages.train_test_split(test_size=0.1, seed=2357, shuffle=True).values()
    assert written(gpt2()) == [encode(part["text"]) for part in parts]
    assert [*manifest["tokens"].values()] == [len(tokens) for tokens in written(gpt2())]


def test_documents_keep_their_order(gpt2, cluster):
    def one(row: dict, config) -> dict:
        time.sleep(0.2 if int(row["text"]) < 10 else 0)  # the first of four blocks
        return {"tokens": np.uint16(row["text"]).tobytes()}

    numbers = ray.data.range(40, override_num_blocks=4)
    train = numbers.map(lambda row: {"text": str(row["id"])})
    val = numbers.map(lambda row: {"text": str(139 - row["id"])})
    GIVEN[:] = [[train, val]]
    found = corpus.write(gpt2(), given, one)
    assert written(gpt2()) == [[*range(40)], [*range(139, 99, -1)]]
    assert found["largest_id"] == {"train": 39, "val": 139}


def test_what_is_no_text_is_refused(gpt2, prepare):
    """And leaves nothing, also after what is text."""
    GIVEN[:] = [from_rows(*[{"text": ""}] * 100, {"text": None})]
    with pytest.raises(ray.exceptions.RayTaskError, match="TypeError"):
        prepare(gpt2(), given)
    assert nothing_in(gpt2())


@pytest.mark.parametrize(
    "made, words",
    [
        (None, "object is not a mapping"),  # a row is lost
        ({"tokens": [1, 2]}, "list"),
        ({"tokens": np.array([1, 2]).tobytes()}, "isn't uint16: every second is 0"),
        ({"tokens": b"\xff" * 4}, "has the token 65535, and vocab_size is 50257"),
    ],
)
def test_a_wrong_tokenize_is_refused(gpt2, cluster, tokenize_to, made, words):
    errors = (ray.exceptions.RayTaskError, KeyError, TypeError, ValueError)
    with pytest.raises(errors, match=words):
        corpus.write(with_tokens(gpt2(), made), few, tokenize_to)


def test_too_few_documents_or_windows(gpt2, cluster, tokenize_to):
    """Tokens that a smaller batch can use stay."""
    config, larger = (
        with_tokens(gpt2(eval_windows=size), {"tokens": b"\1\0" * 9})
        for size in (1, 18)
    )
    for empty in (few()[1].limit(0), hub(text=[])):
        GIVEN[:] = [[few()[0], empty]]
        with pytest.raises(ValueError, match="empty part in {'train': 2, 'val': 0}"):
            corpus.write(config, given, tokenize_to)
    assert nothing_in(config)
    with pytest.raises(ValueError, match="{'train': 17, 'val': 17} windows.* 18 of"):
        corpus.write(larger, few, tokenize_to)
    found = corpus.write(config, few, tokenize_to)
    assert found["documents"] == {"train": 2, "val": 2}


def hub(**columns) -> datasets.Dataset:
    return datasets.Dataset.from_dict(columns or {"text": ["some", "text"]})


@pytest.mark.parametrize("other", ["validation", "val", "test"])
def test_a_dataset_has_two_parts(gpt2, cluster, other):
    """Train comes first, in whatever order a library names its splits."""
    splits = {name: hub(text=[name]) for name in (other, "train")}
    first, second = documents.read(gpt2(), lambda downloads: splits)
    assert [first.take(1), second.take(1)] == [[{"text": "train"}], [{"text": other}]]


WRONG = {
    "no train": ({"test": 1, "validation": 1}, "returned .'dict'.*one is train"),
    "three": (dict.fromkeys(["train", "test", "val"], hub()), "'Dataset', 'Dataset', "),
    "one": (hub(), "returned .'Dataset'.*Expected two"),
    "transform": (
        [hub().with_transform(lambda rows: rows), hub()],
        "with_transform and set_transform would have no effect",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_a_dataset_is_not_is_named(gpt2, cluster, case):
    """With what was found, and what is expected."""
    made, words = WRONG[case]
    with pytest.raises(ValueError, match=f"^dataset: .*{words}"):
        documents.read(gpt2(), lambda downloads: made)


def numbered(numbers) -> ray.data.Dataset:
    return ray.data.from_items([{"text": f"text {i}"} for i in numbers])


def test_documents_of_val_in_train(gpt2, prepare, capsys, tmp_path):
    """Some are said, because texts repeat; many are refused: the source shuffles anew."""
    GIVEN[:] = [[numbered(range(40)), numbered(range(38, 48))]]
    prepare(gpt2(), given)
    said = "2 of 10 different documents in val are in train, too"
    assert said in capsys.readouterr().out
    GIVEN[:] = [[numbered(range(40)), numbered(range(37, 47))]]
    config = gpt2(data_dir=f"{tmp_path}/other")
    with pytest.raises(ValueError, match="dataset: 3 of 10 .* shuffles anew"):
        prepare(config, given)
    assert not Path(config.data_dir).exists()


def test_tokens_that_were_made_in_another_way_are_refused(
    gpt2, prepare, monkeypatch, capsys
):
    """With the lines that differ. A run with another seed uses the tokens, unread, and a line
    says what they are.
    """
    manifest = prepare(gpt2(), few)
    with monkeypatch.context() as patch:
        patch.setattr(documents, "read", None)
        capsys.readouterr()
        assert prepare(gpt2(seed=2), few) == manifest
        said = r"data is used again: {'train': 6, 'val': 5} tokens, made 20.* by few and tok"
        assert re.search(said, capsys.readouterr().out)
    with pytest.raises(FileExistsError, match="(?s)another name.*or delete") as error:
        corpus.write(gpt2(), few, encode)  # in place of `tokenize`
    lines = str(error.value).splitlines()
    assert "-    tokenizer = tokenization.load(config.tokenizer)" in lines
    assert '+    encoding = tiktoken.get_encoding("gpt2")' in lines
    for changes, line in (
        ({"dataset": "many"}, "dataset: few"),
        ({"tokenizer": "builtin"}, "tokenizer: gpt2 of tiktoken"),
        ({"vocab_size": 65_537}, "dtype: uint16"),
    ):
        with pytest.raises(FileExistsError, match=f"\n-{line}\n"):
            prepare(gpt2(**changes), few)


def test_my_text_as_the_page_has_it(tutorial, gpt2, cluster, monkeypatch, tmp_path):
    """Texts that are there twice are in one part, and most are to train with."""
    texts = [f"text {i // 2}" for i in range(400)]
    read = ray.data.from_pandas(pd.DataFrame({"body": texts, "n": 0}))
    monkeypatch.setattr(ray.data, "read_parquet", lambda address: read)
    parts = documents.read(gpt2(), tutorial.my_text)
    train, val = ([row["text"] for row in part.take_all()] for part in parts)
    assert sorted(train + val) == sorted(texts) and not {*train} & {*val}
    assert 0 < len(val) < 50


def test_openwebtext_is_split_as_nanogpt_splits_it(
    gpt2, cluster, monkeypatch, tmp_path
):
    """Of a folder as the hub has it. Its cache is beside `data_dir`, where all nodes see it."""
    pages = hub(text=[f"page {i}" for i in range(4_000)])
    files = tmp_path / "Skylion007/openwebtext/plain_text"
    files.mkdir(parents=True)
    for shard in range(2):
        half = pages.shard(2, shard, contiguous=True)
        half.to_parquet(files / f"train-0000{shard}-of-00002.parquet")
    monkeypatch.chdir(tmp_path)  # where a name of the hub is that of a folder
    found = documents.read(gpt2(), documents.openwebtext)
    expected = pages.train_test_split(test_size=0.0005, seed=2357, shuffle=True)
    for part, split in zip(found, ("train", "test")):
        assert [row["text"] for row in part.take_all()] == [*expected[split]["text"]]
    assert [*Path(f"{gpt2().data_dir}-downloads").glob("*")]


def test_stories_are_those_that_are_published(gpt2, cluster, monkeypatch):
    """The first part of theirs to train with, and theirs to validate with."""

    def load(name: str, split: list[str], cache_dir: str):
        return [hub(text=[x]) for x in split]

    monkeypatch.setattr(datasets, "load_dataset", load)
    stories = documents.read(gpt2(), documents.tinystories)
    first, second = (part.take(1)[0]["text"] for part in stories)
    assert first.startswith("train[") and second == "validation"


def test_json_lines_of_one_s_own_and_their_tokenizer(
    tutorial, cluster, gpt2, tmp_path, monkeypatch
):
    """By the guide's lines: without null and empty texts, and texts that are there twice in one
    part. A date stays a text, another key may be anything, and a file may have no text.
    """
    texts = [f"text {i // 2}" for i in range(400)] + [None, "", "2024-01-01"]
    rows = [{"body": text, "n": i} for i, text in enumerate(texts)]
    dates = [{"body": f"2024-01-{day:02}", "n": "a"} for day in range(2, 30)]
    files = {"a": rows, "b": dates, "c": [{"n": 1}, {"body": None}]}
    (tmp_path / "texts").mkdir()
    for name, lines in files.items():
        file = tmp_path / f"texts/{name}.jsonl"
        file.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    names, read = vars(tutorial) | {"storage": tmp_path}, ray.data.read_json
    monkeypatch.setattr(
        ray.data, "read_json", lambda path, **how: read(f"{tmp_path}/texts", **how)
    )
    run_from_guide("parse_options=options", names)
    run_from_guide("ByteLevelBPETokenizer", names)
    tokenizer = tokenization.load(f"{tmp_path}/mine")
    own = {"tokenizer": f"{tmp_path}/mine", "vocab_size": tokenizer.n_vocab}
    config = gpt2(**own, dataset="my_text")
    corpus.write(config, names["my_text"], tutorial.tokenize)
    train, val = (tokenizer.decode(ids).split(END)[:-1] for ids in written(config))
    assert not {*train} & {*val} and 0 < len(val) < 50
    expected = [text for text in texts if text] + [line["body"] for line in dates]
    assert sorted(train + val) == sorted(expected)


@pytest.fixture
def served(tmp_path):
    """A folder, and the address at which its files are."""
    folder = tmp_path / "served"
    folder.mkdir()
    handler = partial(SimpleHTTPRequestHandler, directory=folder)
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever).start()
        yield folder, f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_shakespeare_is_nanogpt_s_tokens(gpt2, prepare, monkeypatch, served):
    """Of the file that is served where GitHub's would be: a number for each character, in the
    order of all of them. nanoGPT ends no text.
    """
    folder, address = served
    text = "\n !$&',-.3:;?" + string.ascii_letters + "\nExeunt.\n\n" * 3_000
    (folder / "input.txt").write_text(text)
    load = datasets.load_dataset

    def load_what_is_served(*arguments, data_files: str, **options):
        assert data_files.endswith("/char-rnn/master/data/tinyshakespeare/input.txt")
        return load(*arguments, data_files=f"{address}/input.txt", **options)

    monkeypatch.setattr(datasets, "load_dataset", load_what_is_served)
    config = gpt2(tokenizer="characters", vocab_size=66, dataset="shakespeare")
    prepare(config, documents.shakespeare)
    number = {character: i for i, character in enumerate(sorted({*text}))}
    assert len(number) == 65
    cut = int(len(text) * 0.9)
    parts = text[:cut], text[cut:]
    assert written(config) == [[*(number[x] for x in part), 65] for part in parts]


def test_help_pages_are_prose():
    """Whole paragraphs, without marks."""
    pages = documents.help_pages()
    paragraphs = [line for page in pages for line in page.split("\n")]
    assert all(re.fullmatch(r"[A-Z][^*“”\"]+[.:]", text) for text in paragraphs)


def factory(n):
    def made(downloads: str):
        return few()[:n]

    return made


@pytest.mark.parametrize(
    "function", [partial(few, "a"), lambda downloads: few(), factory(2), print]
)
def test_what_cant_be_compared_next_time_is_refused(gpt2, prepare, function):
    """A partial, a lambda, what uses values of an enclosing function, or has no source."""
    with pytest.raises(ValueError, match="can't be compared.*give it a name with def"):
        prepare(gpt2(), function)
    assert nothing_in(gpt2())


def test_bare_files_are_taken(small, write_bins, tutorial, capsys):
    config = write_bins(small())
    prepare = partial(corpus.write, tokenize=tutorial.tokenize)
    assert prepare(config, few)["tokens"] == {"train": 2_001, "val": 401}
    assert "no manifest: {'train': 2001, 'val': 401} tokens" in capsys.readouterr().out
    with pytest.raises(ValueError, match="has the token .*, and vocab_size is 400"):
        prepare(small(vocab_size=400), few)
    token_files.path_of(config, "val").unlink()
    with pytest.raises(FileExistsError, match="has .'train.bin'., and not"):
        prepare(config, few)
