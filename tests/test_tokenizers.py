"""Tokenizers by name: their tokens in the files, in the text, and in what is exported."""

import json
from functools import partial
from pathlib import Path

import huggingface_hub
import numpy as np
import pytest
import tokenizers
import transformers
from conftest import ROOT
from samples import END, byte_pairs, python, without_a_cluster

import trainkit.corpus
import trainkit.huggingface
import trainkit.token_files
import trainkit.tokenizers
from trainkit.config import load_config

TEXTS = ["Some text, and more of it.\n", "It costs 3 € <|endoftext|>.", "漢字 ünï"]


def change(path: Path, end: str | dict | None = None, **changes) -> None:
    """The tokenizer.json gets these contents; beside it, settings may name its end."""
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    if end:
        settings = path.with_name("tokenizer_config.json")
        settings.write_text(json.dumps({"eos_token": end}))


@pytest.mark.parametrize("size, end", [(300, 0), (65_537, 65_536)])
def test_a_tokenizer_from_text_to_text(tutorial, tmp_path, monkeypatch, size, end):
    """Also with more tokens than sixteen bits can count, of which the last ends a text."""
    without_a_cluster(monkeypatch)
    path = tmp_path / "mine/tokenizer.json"
    theirs = byte_pairs(path, TEXTS)
    theirs.encode_special_tokens = True  # what a text says is text
    if end:
        model = json.loads(path.read_text())["model"]
        model["vocab"] |= {f"<{id}>": id for id in range(300, end)} | {"[END]": end}
        change(path, end="[END]", model=model)
    texts = [TEXTS[n % 3] * (n + 9) for n in range(8)]
    for number, text in enumerate(texts):
        (tmp_path / f"{number}.txt").write_text(text)
    changes = {
        **{"dataset": f"{tmp_path}/*.txt", "tokenizer": f"{tmp_path}/mine"},
        **{"data_dir": f"{tmp_path}/data", "storage_path": f"{tmp_path}/runs"},
        **{"n_layer": 1, "n_head": 2, "n_embd": 16, "block_size": 16},
        **{"batch_size": 2, "eval_steps": 1, "val_fraction": 0.5, "num_workers": 1},
    }
    load = partial(load_config, ROOT / "configs/smoke.yaml", **changes)
    config, dtype = load(), "uint32" if end else "uint16"
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
    path.with_name("tokenizer_config.json").unlink(missing_ok=True)
    other, gpt2 = load(), load(tokenizer="gpt2")
    assert (other.vocab_size, gpt2.vocab_size) == (290, 50_257)
    assert len({config.run_name, other.run_name, gpt2.run_name}) == 3
    with pytest.raises(FileExistsError, match=f"tokenizer_identity was '{size} tokens"):
        trainkit.corpus.existing(other, tutorial.tokenize)
    with pytest.raises(ValueError, match=r"vocab_size \(289\): expected 290 or more"):
        load(vocab_size=289)


def test_a_tokenizer_of_the_hub(tmp_path, monkeypatch):
    """As `snapshot_download` brings it, which can't be run here; or what was looked for."""
    words = "is no tokenizer.json on this node.*cl100k_base.*no model of the Hugging"
    path = tmp_path / "tokenizer.json"
    for name in (str(path), str(tmp_path), "gpt3"):  # a folder that lacks it
        with pytest.raises(ConnectionError, match=f"tokenizer: '{name}.* {words}"):
            trainkit.tokenizers.load(name)

    def download(name, allow_patterns):
        assert allow_patterns == ["tokenizer.json", "tokenizer_config.json"]
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    with pytest.raises(ConnectionError, match="someone/nothing.*no model of the"):
        trainkit.tokenizers.load("someone/nothing")
    byte_pairs(path, TEXTS)
    assert trainkit.tokenizers.load("someone/tokenizer").n_vocab == 300


def test_a_tokenizer_only_tokenizes(tmp_path):
    """Whatever more its file says; and what a text spells is text."""
    path = tmp_path / "tokenizer.json"
    theirs = byte_pairs(path, TEXTS)
    theirs.encode_special_tokens = True
    more = tokenizers.Tokenizer.from_file(str(path))
    more.model.dropout = 0.5
    more.enable_truncation(8)
    more.enable_padding(length=4_000)
    frame = {"single": f"$A {END}", "pair": "$A $B", "special_tokens": [(END, 0)]}
    more.post_processor = tokenizers.processors.TemplateProcessing(**frame)
    spaced = tokenizers.AddedToken("of", lstrip=True, rstrip=True)
    more.add_tokens([spaced, "[END]"])
    more.save(str(path))
    for name in (tmp_path, path):  # a folder, or a file
        found = trainkit.tokenizers.load(str(name))
        for text in (*TEXTS, " ".join(TEXTS * 40)):
            ids = found.encode_ordinary(text)
            assert ids == theirs.encode(text).ids and found.eot_token == 0
            assert found.decode(ids) == text and 0 not in ids
            assert found.decode([*ids, 0]) == text + END
    before = trainkit.tokenizers.identity(str(path))
    change(
        path, end={"content": "[END]"}
    )  # the settings name the token that ends a text
    assert trainkit.tokenizers.load(str(path)).eot_token == more.token_to_id("[END]")
    assert trainkit.tokenizers.identity(str(path)) != before  # of the same tokens


WORD = {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "?"}


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"normalizer": {"type": "Lowercase"}}, "makes .* on h.* of the text .* on H"),
        ({"normalizer": {"type": "NFKD"}}, "makes .* of the text 'Ça coûte"),
        ({"end": "t"}, "makes .* without tokens that end a text"),
        ({"end": "#"}, "makes ' ' of the text '# ##', without"),
        ({"model": None}, "can't be read"),
        ({"model": WORD}, "can't encode the text that b"),
        ({"model": WORD, "added_tokens": []}, "has no token.* Name it as eos_token in"),
    ],
    ids=str,
)
def test_a_tokenizer_that_cannot_be_used_is_refused(tmp_path, changes, words):
    """If it changes texts, with the text, and what became of it."""
    path = tmp_path / "tokenizer.json"
    byte_pairs(path, TEXTS)
    change(path, **changes)
    with pytest.raises(ValueError, match=f"(?s)^tokenizer: {path} {words}"):
        trainkit.tokenizers.load(str(path))


def test_vocabulary_that_is_not_there_and_cannot_be_fetched(tmp_path):
    """In a process of its own: tiktoken keeps what it has read."""
    nowhere = {"TIKTOKEN_CACHE_DIR": str(tmp_path), "HTTPS_PROXY": "http://127.0.0.1:9"}
    words = "the vocabulary of gpt2 is not on this machine.*ci/offline_vocabulary.py"
    with pytest.raises(AssertionError, match=f"\nConnectionError: .*{words}"):
        python("import trainkit.tokenizers as t; t.load('gpt2')", **nowhere)
