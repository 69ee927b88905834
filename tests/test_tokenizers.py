"""Tokenizers by name: their tokens in the files, in the text, and in what is exported."""

import json
import pickle
from functools import partial
from pathlib import Path

import huggingface_hub
import numpy as np
import pytest
import tiktoken
import tokenizers
import transformers
from conftest import ROOT
from samples import END, byte_pairs, python, without_a_cluster

import trainkit.corpus
import trainkit.huggingface
import trainkit.token_files
import trainkit.tokenizers
from trainkit.config import load_config

TEXTS = [
    "Some text, and more of it.\n",
    "It costs 3 € <|endoftext|> or so.",
    "漢字 ünï",
]


def changed(path: Path, **changes) -> Path:
    """The tokenizer.json with these contents instead."""
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return path


def added(id: int, text: str) -> dict:
    """A token that a file adds, with all that it may say of one."""
    flags = {"single_word": False, "lstrip": True, "rstrip": True, "normalized": True}
    return {"id": id, "content": text, "special": False} | flags


@pytest.mark.parametrize("size, end", [(300, 0), (65_537, 65_536)])
def test_a_tokenizer_of_ones_own_from_text_to_text(
    tutorial, tmp_path, monkeypatch, size, end
):
    """Also with more tokens than sixteen bits can count, of which the last ends a text."""
    without_a_cluster(monkeypatch)
    path = tmp_path / "mine/tokenizer.json"
    settings = path.with_name("tokenizer_config.json")
    theirs = byte_pairs(path, TEXTS)
    theirs.encode_special_tokens = True  # what a text says is text
    if end:
        model = json.loads(path.read_text())["model"]
        model["vocab"] |= {f"<{id}>": id for id in range(300, end)} | {"[END]": end}
        changed(path, model=model)
        settings.write_text('{"eos_token": "[END]"}')
    texts = [TEXTS[n % 3] * (n + 9) for n in range(8)]
    for number, text in enumerate(texts):
        (tmp_path / f"{number}.txt").write_text(text)
    changes = {"dataset": f"{tmp_path}/*.txt", "tokenizer": f"{tmp_path}/mine"}
    changes |= {"data_dir": f"{tmp_path}/data", "storage_path": f"{tmp_path}/runs"}
    changes |= {"n_layer": 1, "n_head": 2, "n_embd": 16, "block_size": 16}
    changes |= {"batch_size": 2, "eval_steps": 1, "val_fraction": 0.5, "num_workers": 1}
    load = partial(load_config, ROOT / "configs/smoke.yaml")
    config = load(**changes)
    dtype = "uint32" if end else "uint16"
    assert (config.vocab_size, config.token_dtype) == (size, dtype)
    manifest = tutorial.prepare_dataset(config)
    assert manifest["source"]["tokenizer"] == f"{tmp_path}/mine"
    assert tutorial.prepare_dataset(config) == manifest  # the tokens are there
    found = trainkit.token_files.open_tokens(config, "train")
    ids = [[*theirs.encode(text).ids, end] for text in texts[1::2]]
    assert found.tolist() == sum(ids, []) and (found == end).sum() == len(ids)
    windows = trainkit.token_files.read(config, "train", np.arange(2))
    assert windows.dtype == dtype and windows[1, 0] == found[16]

    model = tutorial.create_model(config)
    folder = trainkit.huggingface.export(model, tmp_path / "exported")
    exported = transformers.AutoTokenizer.from_pretrained(folder)
    assert exported(TEXTS[0])["input_ids"] == theirs.encode(TEXTS[0]).ids
    assert exported.eos_token_id == end
    assert json.loads((folder / "config.json").read_text())["eos_token_id"] == end

    byte_pairs(path, TEXTS, 290)  # in place
    settings.unlink(missing_ok=True)
    other = load(**changes)
    assert other.vocab_size == 290 and other.run_name != config.run_name
    with pytest.raises(FileExistsError, match=f"tokenizer_identity was '{size} tokens"):
        trainkit.corpus.existing(other, tutorial.tokenize)
    gpt2 = load(**changes | {"tokenizer": "gpt2"})
    assert gpt2.vocab_size == 50_257 and gpt2.run_name != config.run_name
    with pytest.raises(ValueError, match=r"vocab_size \(289\): expected 290 or more"):
        load(**changes, vocab_size=289)


def test_end_of_text_is_what_its_settings_say(tmp_path):
    path = tmp_path / "tokenizer.json"
    byte_pairs(path, TEXTS)
    changed(path, added_tokens=[added(0, END), added(300, "[END]")])
    before = trainkit.tokenizers.identity(str(path))
    settings = json.dumps({"eos_token": {"content": "[END]"}})
    (tmp_path / "tokenizer_config.json").write_text(settings)
    found = trainkit.tokenizers.load(str(path))
    assert found.decode([found.eot_token]) == "[END]"
    # Though the tokens of all texts are the same:
    assert trainkit.tokenizers.identity(str(path)) != before


def test_what_is_no_tokenizer_is_named(tmp_path):
    path = tmp_path / "tokenizer.json"
    for name in (str(path), str(tmp_path), "gpt3"):  # a folder that lacks it
        words = f"tokenizer: '{name}.* is no tokenizer.json on this node.*cl100k_base"
        with pytest.raises(ConnectionError, match=words):
            trainkit.tokenizers.load(name)
    path.write_text("{")
    with pytest.raises(ValueError, match=f"tokenizer: {path} can't be read"):
        trainkit.tokenizers.load(str(path))
    byte_pairs(path, TEXTS)
    path.write_text(path.read_text().replace(END, "[x]"))
    with pytest.raises(ValueError, match="no token that ends a text.*as eos_token in"):
        trainkit.tokenizers.load(str(path))
    theirs = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, END: 1}, "?"))
    theirs.save(str(path))  # of letters, it knows one
    with pytest.raises(ValueError, match="^tokenizer: .* can't encode the text that b"):
        trainkit.tokenizers.load(str(path))


MORE = {  # than tokens
    "truncation": {"direction": "Right", "max_length": 8, "strategy": "LongestFirst",
                   "stride": 0},
    "padding": {"strategy": {"Fixed": 4_000}, "direction": "Right", "pad_id": 1,
                "pad_to_multiple_of": None, "pad_type_id": 0, "pad_token": "!"},
    "post_processor": {
        "type": "TemplateProcessing",
        "single": [{"Sequence": {"id": "A", "type_id": 0}},
                   {"SpecialToken": {"id": END, "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}],
        "special_tokens": {END: {"id": END, "ids": [0], "tokens": [END]}},
    },
    "added_tokens": [added(0, END), added(300, "of")],
}  # fmt: skip


def test_a_tokenizer_only_tokenizes(tmp_path):
    """Whatever else its file says; and what a text spells is text."""
    path = tmp_path / "tokenizer.json"
    theirs = byte_pairs(path, TEXTS)
    theirs.encode_special_tokens = True
    model = json.loads(path.read_text())["model"] | {"dropout": 0.5}
    changed(path, model=model, **MORE)
    for name in (tmp_path, path):  # a folder, or a file
        found = trainkit.tokenizers.load(str(name))
        for text in (*TEXTS, " ".join(TEXTS * 40)):
            ids = found.encode_ordinary(text)
            assert ids == theirs.encode(text).ids and found.eot_token == 0
            assert found.decode(ids) == text and 0 not in ids
            assert found.decode([*ids, 0]) == text + END


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"normalizer": {"type": "Lowercase"}}, "makes .* on h.* of the text .* on H"),
        ({"normalizer": {"type": "NFKD"}}, "makes .* of the text 'Ça coûte"),
        ({"decoder": None}, "makes .*Ġ"),
        ({"end": "t"}, "makes .* without tokens that end a text"),
    ],
    ids=str,
)
def test_a_tokenizer_that_changes_texts_is_refused(tmp_path, changes, words):
    """With the text, and what became of it."""
    path = tmp_path / "tokenizer.json"
    byte_pairs(path, TEXTS)
    if "end" in changes:
        settings = json.dumps({"eos_token": changes["end"]})
        (tmp_path / "tokenizer_config.json").write_text(settings)
    else:
        changed(path, **changes)
    with pytest.raises(ValueError, match=f"(?s)^tokenizer: {path} {words}"):
        trainkit.tokenizers.load(str(path))


def test_long_runs_of_spaces_have_tokens():
    """For tiktoken, a million of them before a word are too many."""
    tokenizer, theirs = trainkit.tokenizers.load("gpt2"), tiktoken.get_encoding("gpt2")
    tokenizer = pickle.loads(pickle.dumps(tokenizer))
    for text in ("a" + "\n" * 10**6 + "b", " " * 2_500_000 + "b", "a " * 10**6):
        ids = tokenizer.encode_ordinary(text)
        assert tokenizer.decode(ids) == text
    start = text[:900_000]
    assert ids[:400_000] == theirs.encode_ordinary(start)[:400_000]


def test_vocabulary_that_is_not_there_and_cannot_be_fetched(tmp_path):
    """In a process of its own: tiktoken keeps what it has read."""
    script = "import trainkit.tokenizers as t; t.load('gpt2')"
    nowhere = {"TIKTOKEN_CACHE_DIR": str(tmp_path), "HTTPS_PROXY": "http://127.0.0.1:9"}
    words = "the vocabulary of gpt2 is not on this machine.*ci/offline_vocabulary.py"
    words = f"\nConnectionError: .*{words}.* TIKTOKEN_CACHE_DIR"
    with pytest.raises(AssertionError, match=words):
        python(script, **nowhere)


def test_a_tokenizer_of_the_hub(tmp_path, monkeypatch):
    """As `snapshot_download` brings it, which can't be run here."""

    def download(name, allow_patterns):
        assert allow_patterns == ["tokenizer.json", "tokenizer_config.json"]
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    with pytest.raises(ConnectionError, match="someone/nothing.*no model of the"):
        trainkit.tokenizers.load("someone/nothing")
    byte_pairs(tmp_path / "tokenizer.json", TEXTS)
    assert trainkit.tokenizers.load("someone/tokenizer").n_vocab == 300
