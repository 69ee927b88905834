"""Step 2: documents become tokens, in order and all of them; what is refused."""

import json
import time
from functools import partial
from pathlib import Path

import datasets
import numpy as np
import pytest
import ray.data
import tiktoken

from trainkit import corpus, token_files


@pytest.fixture
def gpt2(small):
    """A small configuration with GPT-2's vocabulary, and a batch that few tokens fill."""
    options = {"batch_size": 1, "block_size": 1, "eval_steps": 1, "dataset": "few"}
    return partial(small, **options | {"vocab_size": 50_257})


@pytest.fixture
def prepare(tutorial, cluster):
    """`corpus.write` with the notebook's `tokenize_all`."""
    return partial(corpus.write, tokenize=tutorial.tokenize_all)


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


def few() -> list[ray.data.Dataset]:
    return from_rows({"text": "to be"}, {"text": "or not"})


def tokenize_to(made):
    """Makes this of each document."""
    return lambda documents, config: documents.map(lambda row: made)


def test_a_dataset_of_the_hub_byte_for_byte(gpt2, prepare, tmp_path):
    """As nanoGPT's prepare.py writes it; two tasks read from the library's cache."""
    texts = [f"{i}<|endoftext|> é 漢字 {'lorem ipsum, ' * 900}" for i in range(1_000)]
    lines = [json.dumps({"title": i, "text": text}) for i, text in enumerate(texts)]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    options = {"data_files": f"{tmp_path}/a.jsonl", "cache_dir": f"{tmp_path}/cache"}
    pages = datasets.load_dataset("json", split="train", **options)
    parts = pages.train_test_split(test_size=0.05, seed=2357, shuffle=True)
    manifest = prepare(gpt2(), lambda: parts)
    assert written(gpt2()) == [encode(part["text"]) for part in parts.values()]
    assert manifest["documents"] == {"train": 950, "val": 50}
    (read, _) = corpus.documents(gpt2(), lambda: (pages, pages))
    assert read.materialize().num_blocks() == 2


def test_builtin_text_byte_for_byte(gpt2, prepare):
    manifest = prepare(gpt2(dataset="builtin"), corpus.builtin)
    pages = datasets.Dataset.from_dict({"text": corpus.help_pages()})
    parts = pages.train_test_split(test_size=0.1, seed=2357, shuffle=True).values()
    assert written(gpt2()) == [encode(part["text"]) for part in parts]
    assert [*manifest["tokens"].values()] == [len(tokens) for tokens in written(gpt2())]


def test_documents_keep_their_order(gpt2, cluster):
    def one(row: dict) -> dict:
        time.sleep(0.2 if int(row["text"]) < 10 else 0)  # the first of four blocks
        return {"tokens": np.uint16(row["text"]).tobytes()}

    numbers = ray.data.range(40, override_num_blocks=4)
    part = numbers.map(lambda row: {"text": str(row["id"])})
    corpus.write(gpt2(), lambda: [part, part], lambda part, config: part.map(one))
    assert written(gpt2()) == [[*range(40)]] * 2


@pytest.mark.parametrize(
    "rows",
    [[{"text": None}], [{"text": 3.5}], [{"a": 1}], [{"text": ""}] * 100 + [{"text": 0}]],
    ids=["null", "number", "other columns", "after what `documents` reads"],
)  # fmt: skip
def test_what_is_no_text_is_named(gpt2, prepare, rows):
    words = f"expected a string in a column text, found {rows[-1]}"
    with pytest.raises(ray.exceptions.RayTaskError, match=words):
        prepare(gpt2(), lambda: from_rows(*rows))
    assert nothing_in(gpt2())


@pytest.mark.parametrize(
    "made, words",
    [
        (None, "Error validating None"),  # a row is lost
        ({"ids": b"\0\0"}, "tokens"),
        ({"tokens": [1, 2]}, "expected a bytes-like object, list found"),
        ({"tokens": np.array([1, 2]).tobytes()}, "isn't uint16: every second is 0"),
        ({"tokens": b"\xff" * 4}, "has the token 65535, and vocab_size is 50257"),
    ],
)
def test_a_wrong_tokenize_is_refused(gpt2, cluster, made, words):
    errors = (ray.exceptions.RayTaskError, KeyError, TypeError, ValueError)
    with pytest.raises(errors, match=words):
        corpus.write(gpt2(), few, tokenize_to(made))


def test_too_few_documents_or_windows(gpt2, cluster):
    """Tokens that a smaller batch can use stay."""
    nine = tokenize_to({"tokens": b"\1\0" * 9})
    with pytest.raises(ValueError, match="empty part in {'train': 2, 'val': 0}"):
        corpus.write(gpt2(), lambda: [few()[0], few()[1].limit(0)], nine)
    assert nothing_in(gpt2())
    with pytest.raises(ValueError, match="{'train': 17, 'val': 17} windows.* 18 of"):
        corpus.write(gpt2(batch_size=18), few, nine)
    assert corpus.write(gpt2(), few, nine)["documents"] == {"train": 2, "val": 2}


def test_a_dataset_has_two_parts(gpt2, cluster):
    """Train comes first, in whatever order a library names its splits."""
    make = datasets.Dataset.from_dict
    named = {name: make({"text": [name]}) for name in ("a", "train")}
    first, second = corpus.documents(gpt2(), lambda: named)
    assert [first.take(1), second.take(1)] == [[{"text": "train"}], [{"text": "a"}]]
    with pytest.raises(ValueError, match="few has 1 parts, not 2"):
        corpus.documents(gpt2(), lambda: few()[:1])


def test_two_preparations_at_once(gpt2, tutorial, cluster):
    """Both succeed: the one that ends later uses the files of the other."""
    manifests = []

    def tokenize(documents, config):
        if not manifests:
            manifests.append("the other has begun")
            manifests.append(corpus.write(config, few, tokenize))
        return tutorial.tokenize_all(documents, config)

    assert corpus.write(gpt2(), few, tokenize) == manifests[1]
    assert written(gpt2()) == [encode(["to be", "or not"])] * 2
    assert len([*Path(gpt2().data_dir).parent.glob("data*")]) == 1


def test_tokens_that_were_made_in_another_way_are_refused(gpt2, prepare, monkeypatch):
    """With the lines that differ; a run with another seed uses the tokens, unread."""
    manifest = prepare(gpt2(), few)
    with monkeypatch.context() as patch:
        patch.setattr(corpus, "documents", None)
        assert prepare(gpt2(seed=2), few) == manifest
    with pytest.raises(FileExistsError, match="(?s)another name.*or delete") as error:
        corpus.write(gpt2(), few, encode)  # in place of `tokenize_all`
    lines = str(error.value).splitlines()
    assert "-    tokenizer = tokenizers.load(config.tokenizer)" in lines
    assert "+    encoding = tiktoken.get_encoding('gpt2')" in lines
    for changes, line in (
        ({"dataset": "many"}, "dataset: few"),
        ({"tokenizer": "builtin"}, "tokenizer: gpt2 of tiktoken"),
        ({"vocab_size": 65_537}, "dtype: uint16"),
    ):
        with pytest.raises(FileExistsError, match=f"\n-{line}\n"):
            prepare(gpt2(**changes), few)


def test_bare_files_are_taken(small, write_bins, tutorial, capsys):
    config = write_bins(small())
    prepare = partial(corpus.write, tokenize=tutorial.tokenize_all)
    assert prepare(config, few)["tokens"] == {"train": 2_001, "val": 401}
    assert "no manifest: taken for tokens of gpt2" in capsys.readouterr().out
    token_files.path_of(config, "val").unlink()
    with pytest.raises(FileExistsError, match="no train.bin or no val.bin"):
        prepare(config, few)
