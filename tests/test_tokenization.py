"""Tokenizers by name: tiktoken's, the built-in one, and Hugging Face's as they are."""

import json
from pathlib import Path

import huggingface_hub
import numpy as np
import pytest
import ray.data
import tokenizers
import transformers
from samples import END, byte_pairs, hub_of

from trainkit import corpus, tokenization as ours

TEXTS = ["Some text,    and more of it.\n", f"It costs 3 € {END}.", "漢字 ünï <7>"]


def change(path: Path, end: str | None = None, **changes) -> None:
    """The tokenizer.json gets these contents; beside it, settings may name its end."""
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    settings = {"eos_token": {"content": end}} if end else {}
    path.with_name("tokenizer_config.json").write_text(json.dumps(settings))


def documents(downloads: str) -> list[ray.data.Dataset]:
    return [
        ray.data.from_items([{"text": end + text} for text in TEXTS])
        for end in ("", ".")
    ]


def test_ids_with_gaps_fit_the_vocabulary(tmp_path):
    path = tmp_path / "tokenizer.json"
    byte_pairs(path, TEXTS)
    model = json.loads(path.read_text())["model"]
    last = max(model["vocab"], key=model["vocab"].get)
    model["vocab"][last] = 500
    change(path, model=model)
    assert ours.load(str(path)).n_vocab == 501


def test_ids_are_the_library_s(tmp_path, monkeypatch):
    """With tokens added that aren't special, without truncation, padding, or a frame. Workers
    run elsewhere, so the name of a folder that is here is the hub's."""
    path, asked = tmp_path / "tokenizer.json", []
    theirs = byte_pairs(path, TEXTS)
    theirs.add_tokens([tokenizers.AddedToken("    ", normalized=False), "<7>"])
    theirs.enable_truncation(8)
    theirs.enable_padding(length=4_000)
    theirs.post_processor = tokenizers.processors.BertProcessing((END, 0), (END, 0))
    theirs.save(str(path))
    theirs.no_truncation()
    theirs.no_padding()
    theirs.encode_special_tokens = True

    def download(name, allow_patterns):  # from the hub, which can't be asked here
        asked.append(name)
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    monkeypatch.chdir(tmp_path.parent)
    for name in (tmp_path, path, tmp_path.name):
        for text in (*TEXTS, " ".join(TEXTS * 40)):
            found = ours.load(str(name))
            ids = found.encode_ordinary(text)
            assert ids == theirs.encode(text, add_special_tokens=False).ids
            assert found.decode(ids) == text and 0 not in ids
        assert found.n_vocab == 302 and found.eot_token == 0 and {300, 301} < {*ids}
    assert asked == [tmp_path.name]  # once
    byte_pairs(path, TEXTS, 290)  # in place
    assert ours.load(str(path)).n_vocab == 290


def test_more_ids_than_uint16(tutorial, cluster, small, tmp_path):
    """The last of which ends a text, which only the settings beside the file say."""
    path = tmp_path / "tokenizer.json"
    theirs = byte_pairs(path, TEXTS)
    theirs.add_tokens([f"<{i}>" for i in range(66_000)])
    theirs.save(str(path))
    before = ours.identity(str(path))
    settings = json.dumps(
        {"eos_token": "<65999>"}
    )  # beside the same file, in one process
    path.with_name("tokenizer_config.json").write_text(settings)
    assert ours.identity(str(path)) != before
    found = ours.load(str(path))
    assert found.eot_token == 66_299 not in found.encode_ordinary("words <65999>")
    few = {"batch_size": 1, "block_size": 4, "eval_windows": 1, "dataset": "few"}
    config = small(tokenizer=str(tmp_path), vocab_size=66_300, **few)
    corpus.write(config, documents, tutorial.tokenize)
    ids = [[*found.encode_ordinary(f".{text}"), 66_299] for text in TEXTS]
    assert np.fromfile(f"{config.data_dir}/val.bin", "uint32").tolist() == sum(ids, [])


def test_a_tokenizer_of_the_hub_brings_what_ends_a_text(tmp_path, monkeypatch):
    """That is an ordinary token here, and no text may have it."""
    path = tmp_path / "theirs/tokenizer.json"
    theirs = byte_pairs(path, TEXTS)
    change(path, end="e")
    download = hub_of(path.parent, tmp_path / "cache")
    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    found = ours.load("someone/model")
    assert found.eot_token == theirs.token_to_id("e")
    with pytest.raises(ValueError, match="changes or ends the text 'e'"):
        found.encode_ordinary("e")


def test_a_tokenizer_is_told_by_what_it_holds(tmp_path):
    """Wherever it is, and whatever was there before."""
    paths = [tmp_path / name / "tokenizer.json" for name in ("a", "b")]
    for path in paths:
        byte_pairs(path, TEXTS)
    before = ours.identity(str(paths[0]))
    assert before == ours.identity(str(paths[1]))
    byte_pairs(paths[0], TEXTS, 290)
    assert ours.identity(str(paths[0])) != before


WORDS = {"type": "WordLevel", "vocab": {"a": 0, END: 1, "?": 2}, "unk_token": "?"}


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"normalizer": {"type": "Lowercase"}}, "changes or ends the text .*Some text"),
        ({"normalizer": {"type": "NFKD"}}, "changes or ends the text .*ünï"),
        ({"model": WORDS, "added_tokens": []}, "changes or ends the text"),
        ({"end": "[END]"}, r"has none of \[END\] to end a text.*as eos_token in"),
    ],
)
def test_what_changes_texts_is_refused(tmp_path, changes, words):
    path = tmp_path / "tokenizer.json"
    byte_pairs(path, TEXTS)
    change(path, **changes)
    with pytest.raises(ValueError, match=f"(?s)^tokenizer: .*{words}"):
        for text in (END, *TEXTS):
            ours.load(str(path)).encode_ordinary(text)


@pytest.mark.parametrize(
    "changes, text",
    [
        ({"normalizer": {"type": "NFC"}}, "e\u0301"),
        ({"model": WORDS, "added_tokens": []}, "b"),
        ({"pre_tokenizer": {"type": "Whitespace"}, "decoder": None}, "a\n a"),
        ({"pre_tokenizer": {"type": "Whitespace"}, "decoder": None}, "漢"),
    ],
)
def test_a_text_that_is_changed_later_is_refused(tmp_path, changes, text):
    """Whichever document it is in: by a normalizer, an unknown token, or none, or without
    its spaces.
    """
    path = tmp_path / "tokenizer.json"
    byte_pairs(path, TEXTS)
    change(path, **changes)
    found = ours.load(str(path))
    assert found.decode(found.encode_ordinary("a")) == "a"
    with pytest.raises(ValueError, match="tokenizer: .* changes or ends the text"):
        found.encode_ordinary(text)


def test_an_older_form_is_named_and_can_be_converted(tmp_path):
    """vocab.json and merges.txt, which transformers reads, as the message says."""
    theirs = byte_pairs(tmp_path / "new/tokenizer.json", TEXTS)
    (tmp_path / "old").mkdir()
    theirs.model.save(str(tmp_path / "old"))
    settings = {"tokenizer_class": "GPT2Tokenizer", "eos_token": END}
    (tmp_path / "old/tokenizer_config.json").write_text(json.dumps(settings))
    with pytest.raises(
        FileNotFoundError, match="^tokenizer: .*old/tokenizer.json isn't"
    ):
        ours.load(str(tmp_path / "old"))
    old = transformers.AutoTokenizer.from_pretrained(tmp_path / "old")
    old.save_pretrained(tmp_path / "converted")
    found = ours.load(str(tmp_path / "converted"))
    theirs.encode_special_tokens = True
    for text in TEXTS:
        assert found.encode_ordinary(text) == theirs.encode(text).ids
    assert found.eot_token == 0


def test_a_file_that_is_cut_off_is_named(tmp_path):
    path = tmp_path / "tokenizer.json"
    byte_pairs(path, TEXTS)
    path.write_text(path.read_text()[:-9])
    with pytest.raises(
        ValueError, match=f"^tokenizer: {path} is no tokenizer.json: EOF"
    ):
        ours.load(str(path))
