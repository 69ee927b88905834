"""Tokenizers by name: tiktoken's, the built-in one, and Hugging Face's as they are."""

import json
from pathlib import Path

import huggingface_hub
import numpy as np
import pytest
import ray.data
import tokenizers
from samples import END, byte_pairs, python

from trainkit import corpus
from trainkit import tokenizers as ours

TEXTS = ["Some text,    and more of it.\n", f"It costs 3 € {END}.", "漢字 ünï <7>"]


def change(path: Path, end: str | None = None, **changes) -> None:
    """The tokenizer.json gets these contents; beside it, settings may name its end."""
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    settings = {"eos_token": {"content": end}} if end else {}
    path.with_name("tokenizer_config.json").write_text(json.dumps(settings))


def documents() -> list[ray.data.Dataset]:
    return [ray.data.from_items([{"text": text} for text in TEXTS])] * 2


def test_tokens_are_those_of_the_library(
    tutorial, cluster, small, tmp_path, monkeypatch
):
    """With added ones that aren't special, as the runs of spaces of GPT-NeoX, but without
    truncation, padding, and a frame; in files, too, if sixteen bits can't count them.
    """
    path = tmp_path / "tokenizer.json"
    theirs = byte_pairs(path, TEXTS)
    spaces = tokenizers.AddedToken("    ", normalized=False)
    theirs.add_tokens([spaces, *(f"<{i}>" for i in range(66_000))])
    theirs.enable_truncation(8)
    theirs.enable_padding(length=4_000)
    frame = {"single": f"$A {END}", "pair": "$A $B", "special_tokens": [(END, 0)]}
    theirs.post_processor = tokenizers.processors.TemplateProcessing(**frame)
    theirs.save(str(path))
    theirs.no_truncation()
    theirs.no_padding()
    theirs.encode_special_tokens = True  # what a text spells is text
    for name in (tmp_path, path):  # a folder, or a file
        found = ours.load(str(name))
        assert found.n_vocab == 66_301 and found.eot_token == 0
        for text in (*TEXTS, " ".join(TEXTS * 40)):
            ids = found.encode_ordinary(text)
            assert ids == theirs.encode(text, add_special_tokens=False).ids
            assert found.decode(ids) == text and 0 not in ids
    assert {300, 308} < {*ids}

    before = ours.identity(str(path))
    change(path, end="<65999>")  # which isn't special, by the file
    end = ours.load(str(path))
    assert end.eot_token == 66_300 and ours.identity(str(path)) != before
    assert 66_300 not in end.encode_ordinary("words <65999>")
    few = {"batch_size": 1, "block_size": 4, "eval_steps": 1, "dataset": "few"}
    config = small(tokenizer=str(tmp_path), vocab_size=66_301, **few)
    monkeypatch.setitem(tutorial.DATASETS, "few", documents)
    tutorial.prepare_dataset(config)
    ids = [[*found.encode_ordinary(text), 66_300] for text in TEXTS]
    assert np.fromfile(f"{config.data_dir}/val.bin", "uint32").tolist() == sum(ids, [])


WORDS = {"type": "WordLevel", "vocab": {"a": 0, END: 1, "?": 2}, "unk_token": "?"}


@pytest.mark.parametrize(
    "changes, words",
    [
        (
            {"normalizer": {"type": "Lowercase"}},
            "changes the text 'Some text.*'some text",
        ),
        ({"normalizer": {"type": "NFKD"}}, "changes the text .*ünï"),
        ({"model": WORDS, "added_tokens": []}, "changes the text .*or ends it"),
        ({"end": "[END]"}, r"has none of \[END\] to end a text.*as eos_token in"),
    ],
    ids=["lower", "decomposed", "words", "no end"],
)
def test_what_changes_texts_is_refused(cluster, small, tmp_path, changes, words):
    path = tmp_path / "tokenizer.json"
    byte_pairs(path, TEXTS)
    change(path, **changes)
    with pytest.raises(ValueError, match=f"(?s)^tokenizer: .*{words}"):
        corpus.checked(small(tokenizer=str(path)), documents())


def test_a_tokenizer_of_the_hub_and_in_place(tmp_path, monkeypatch):
    """`snapshot_download`, which can't be run here, is asked once for each name."""
    names = []

    def download(name, allow_patterns):
        names.append(name)
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    for size in (300, 290):
        byte_pairs(tmp_path / "tokenizer.json", TEXTS, size)
        assert ours.load("someone/tokenizer").n_vocab == size
    assert names == ["someone/tokenizer"]


def test_what_tasks_import_is_light():
    """Neither JAX, which claims devices, nor what takes seconds in each process."""
    script = "import sys; from trainkit import corpus, token_files; assert not "
    python(
        script + "{'jax', 'flax', 'orbax', 'transformers', 'torch'} & {*sys.modules}"
    )
