"""Tokenizers by name: their tokens in the files, in the text, and in what is exported."""

import json
import os
import pickle
import subprocess
import sys
from pathlib import Path

import huggingface_hub
import numpy as np
import pytest
import tiktoken
import tokenizers
import transformers
import yaml
from notebook_module import initial_state
from samples import END, byte_pairs

import trainkit.corpus
import trainkit.generate
import trainkit.huggingface
import trainkit.sharding
import trainkit.token_files
import trainkit.tokenizers
from trainkit.config import TrainingConfig, load_config

ROOT = Path(__file__).resolve().parent.parent
TEXTS = [
    "Some text, and more of it.\n",
    "It costs 3 € <|endoftext|> or so.",
    "漢字 ünï",
]


def bytes_and_pairs(path: Path) -> None:
    """A tokenizer of 256 bytes, of all 65,536 pairs of bytes, and of the end of a text."""
    letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    pairs = [(a, b) for a in letters for b in letters]
    ids = [*letters, *(a + b for a, b in pairs), END]
    vocabulary = {token: id for id, token in enumerate(ids)}
    found = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, pairs))
    found.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(False, use_regex=False)
    found.decoder = tokenizers.decoders.ByteLevel()
    found.save(str(path))


def changed(path: Path, **changes) -> Path:
    """The tokenizer.json with these contents instead."""
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return path


@pytest.fixture
def mine(tmp_path):
    """A configuration with a tokenizer and text of one's own, and the tokenizer."""
    theirs = byte_pairs(tmp_path / "mine/tokenizer.json", TEXTS)
    for number in range(8):
        (tmp_path / f"{number}.txt").write_text(TEXTS[number % 3] * (number + 1))
    settings = yaml.safe_load(Path("configs/smoke.yaml").read_text())
    settings |= {"dataset": f"{tmp_path}/*.txt", "tokenizer": f"{tmp_path}/mine"}
    settings |= {"data_dir": f"{tmp_path}/data", "storage_path": f"{tmp_path}/runs"}
    settings |= {"n_layer": 1, "n_head": 2, "n_embd": 16, "block_size": 16}
    settings |= {"batch_size": 2, "eval_steps": 1, "val_fraction": 0.4}
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(settings))
    return load_config(tmp_path / "mine.yaml", num_workers=1), theirs


def test_a_tokenizer_of_ones_own_from_text_to_text(mine, tutorial, cluster, tmp_path):
    config, theirs = mine
    assert (config.vocab_size, config.token_dtype) == (300, "uint16")
    manifest = tutorial.prepare_dataset(config)
    assert manifest["source"]["tokenizer"] == f"{tmp_path}/mine"
    trainkit.token_files.check(config)
    texts = [TEXTS[n % 3] * (n + 1) for n in (1, 3, 4, 6)]  # the others are for val
    theirs.encode_special_tokens = True  # what a text says is text
    expected = [[*theirs.encode(text).ids, 0] for text in texts]
    found = trainkit.token_files.open_tokens(config, "train")
    assert found.tolist() == sum(expected, [])
    assert found.tolist().count(0) == len(texts)

    model = tutorial.create_model(config)
    (text,) = trainkit.generate.generate(model, ["Some text"], max_new_tokens=4)
    assert text.startswith("Some text")
    folder = trainkit.huggingface.export(model, tmp_path / "exported")
    exported = transformers.AutoTokenizer.from_pretrained(folder)
    assert exported(TEXTS[0])["input_ids"] == theirs.encode(TEXTS[0]).ids
    assert exported.eos_token_id == 0
    assert json.loads((folder / "config.json").read_text())["eos_token_id"] == 0


def test_another_tokenizer_is_another_recipe_and_other_tokens(mine, tutorial, tmp_path):
    config, _ = mine
    folder, was = (
        Path(config.data_dir),
        trainkit.corpus.describe(config, tutorial.tokenize, []),
    )
    folder.mkdir()
    manifest = {"source": was, "tokens": {}}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    byte_pairs(tmp_path / "mine/tokenizer.json", TEXTS, 290)  # in place
    other = load_config(tmp_path / "mine.yaml", num_workers=1)
    assert other.vocab_size == 290 and other.run_name != config.run_name
    with pytest.raises(FileExistsError, match="tokenizer_identity was '300 tokens"):
        trainkit.corpus.existing(other, tutorial.tokenize)
    gpt2 = load_config(tmp_path / "mine.yaml", tokenizer="gpt2")
    assert gpt2.vocab_size == 50_257 and gpt2.run_name != config.run_name


def test_more_tokens_than_sixteen_bits_can_count(small, tutorial, cluster, tmp_path):
    bytes_and_pairs(tmp_path / "tokenizer.json")
    for i in range(10):
        (tmp_path / f"{i}.txt").write_text(f"{i} éa" * 100)
    config = small(
        dataset=f"{tmp_path}/*.txt",
        tokenizer=f"{tmp_path}/tokenizer.json",
        vocab_size=65_793,
        val_fraction=0.4,
        batch_size=2,
        eval_steps=1,
    )
    manifest = tutorial.prepare_dataset(config)
    assert manifest["source"]["dtype"] == "uint32"
    assert tutorial.prepare_dataset(config) == manifest  # they are there
    tokenizer = trainkit.tokenizers.load(config.tokenizer)
    texts = [f"{i} éa" * 100 for i in (1, 3, 4, 6, 8, 9)]  # the others are for val
    ids = [[*tokenizer.encode_ordinary(text), 65_792] for text in texts]
    found = np.fromfile(tmp_path / config.data_dir / "train.bin", np.uint32)
    assert found.tolist() == sum(ids, [])

    mesh = trainkit.sharding.make_mesh(config)
    state = initial_state(tutorial, config, mesh)
    numbers = next(trainkit.token_files.window_numbers(config, "train", range(1)))
    (row,) = tutorial.make_token_dataset(config, "train", numbers).take(1)
    assert row["tokens"].dtype == np.uint32
    loss = tutorial.train_step(state, row["tokens"], config)[1]["loss"]
    assert float(loss) == pytest.approx(np.log(65_793), abs=0.2)


def test_an_encoding_of_tiktoken_goes_out_as_it_is():
    """All of them are converted in the same way; this one's vocabulary is at hand."""
    theirs = tiktoken.get_encoding("gpt2")
    exported = trainkit.huggingface.their_tokenizer(theirs)
    for text in [*TEXTS, *trainkit.corpus.help_pages()]:
        expected = theirs.encode(text, allowed_special="all")
        assert exported(text)["input_ids"] == expected
        assert exported.decode(expected) == text


def test_end_of_text_is_what_its_settings_say(tmp_path):
    path = tmp_path / "tokenizer.json"
    byte_pairs(path, TEXTS)
    tokens = [{"id": id, "content": text, "special": True} | dict.fromkeys(
        ("single_word", "lstrip", "rstrip", "normalized"), False
    ) for id, text in ((0, END), (300, "[END]"))]  # fmt: skip
    changed(path, added_tokens=tokens)
    identities = {trainkit.tokenizers.identity(str(path))}
    for named in ("[END]", {"content": "[END]"}):
        settings = json.dumps({"eos_token": named})
        (tmp_path / "tokenizer_config.json").write_text(settings)
        found = trainkit.tokenizers.load(str(path))
        assert found.decode([found.eot_token]) == "[END]"
        identities.add(trainkit.tokenizers.identity(str(path)))
    assert len(identities) == 2  # though the tokens of all texts are the same


def test_what_is_no_tokenizer_is_named(tmp_path):
    path = tmp_path / "tokenizer.json"
    for place in (path, tmp_path):  # a file, or a folder that lacks it
        with pytest.raises(
            FileNotFoundError, match=f"tokenizer: there is no {path} on"
        ):
            trainkit.tokenizers.load(str(place))
    path.write_text("{")
    with pytest.raises(ValueError, match=f"tokenizer: {path} can't be read"):
        trainkit.tokenizers.load(str(path))
    byte_pairs(path, TEXTS)
    path.write_text(path.read_text().replace(END, "[x]"))
    with pytest.raises(ValueError, match="no token that ends a text.*as eos_token in"):
        trainkit.tokenizers.load(str(path))
    with pytest.raises(ConnectionError, match="'gpt3' is no file.*cl100k_base.*gpt2"):
        trainkit.tokenizers.load("gpt3")


def test_a_vocabulary_that_is_too_small_is_refused(mine, tmp_path):
    with pytest.raises(
        ValueError, match=r"vocab_size \(299\): expected 300 or more, as tokenizer"
    ):
        load_config(tmp_path / "mine.yaml", vocab_size=299)
    assert TrainingConfig(vocab_size=2**16).token_dtype == "uint16"
    assert TrainingConfig(vocab_size=2**16 + 1).token_dtype == "uint32"


FRAME = {
    "type": "TemplateProcessing",
    "single": [{"Sequence": {"id": "A", "type_id": 0}},
               {"SpecialToken": {"id": END, "type_id": 0}}],
    "pair": [{"Sequence": {"id": "A", "type_id": 0}}],
    "special_tokens": {END: {"id": END, "ids": [0], "tokens": [END]}},
}  # fmt: skip
CUT = {"direction": "Right", "max_length": 8, "strategy": "LongestFirst", "stride": 0}
PADDED = {"strategy": {"Fixed": 4_000}, "direction": "Right", "pad_to_multiple_of": None,
          "pad_id": 1, "pad_type_id": 0, "pad_token": "!"}  # fmt: skip
ORDINARY = {"id": 0, "content": END, "single_word": False, "lstrip": True, "rstrip": True,
            "normalized": True, "special": False}  # fmt: skip


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"truncation": CUT},
        {"padding": PADDED},
        {"post_processor": FRAME},
        {"added_tokens": [ORDINARY]},
        {"dropout": 0.5},
        {"added_tokens": [ORDINARY, ORDINARY | {"id": 300, "content": "of"}]},
    ],
    ids=lambda more: "-".join(more),
)  # fmt: skip
def test_a_tokenizer_only_tokenizes(tmp_path, more):
    """Whatever else its file says; and what a text spells is text."""
    path = tmp_path / "tokenizer.json"
    theirs = byte_pairs(path, TEXTS)
    theirs.encode_special_tokens = True
    if "dropout" in more:
        more = {"model": json.loads(path.read_text())["model"] | more}
    changed(path, **more)
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
        (
            {"normalizer": {"type": "Strip", "strip_left": True, "strip_right": True}},
            "m",
        ),
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


def test_a_word_without_tokens_is_named(tmp_path):
    vocabulary = {"a": 0, END: 1}
    found = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="?"))
    found.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(
        ValueError, match="^tokenizer: .* can't encode the text that beg"
    ):
        trainkit.tokenizers.load(str(tmp_path))


@pytest.mark.parametrize(
    "text",
    ["a" + " " * 10**6 + "b", "\n" * 10**6 + "a", " " * 2_500_000 + "b", "a " * 10**6],
)
def test_long_runs_of_spaces_have_tokens(text):
    """For tiktoken, a million of them before a word are too many."""
    tokenizer, theirs = trainkit.tokenizers.load("gpt2"), tiktoken.get_encoding("gpt2")
    ids = tokenizer.encode_ordinary(text)
    assert tokenizer.decode(ids) == text
    if text[:2] == "a ":
        start = text[:900_000]
        assert ids[:400_000] == theirs.encode_ordinary(start)[:400_000]
    assert pickle.loads(pickle.dumps(tokenizer)).encode_ordinary("a b") == [64, 275]


def test_vocabulary_that_is_not_there_and_cannot_be_fetched(tmp_path):
    """In a process of its own: tiktoken keeps what it has read."""
    result = subprocess.run(
        [sys.executable, "-c", "import trainkit.tokenizers as t; t.load('gpt2')"],
        cwd=ROOT,
        env=os.environ
        | {"TIKTOKEN_CACHE_DIR": str(tmp_path), "HTTPS_PROXY": "http://127.0.0.1:9"},
        capture_output=True,
        text=True,
    )
    (line,) = [x for x in result.stderr.splitlines() if x.startswith("ConnectionError")]
    assert (
        "the vocabulary of gpt2 is not on this machine" in line
        and "TIKTOKEN_CACHE_DIR" in line
    )
    assert "ci/offline_vocabulary.py" in line


@pytest.mark.parametrize("has_it", [True, False])
def test_a_tokenizer_of_the_hub(tmp_path, monkeypatch, has_it):
    """As `snapshot_download` brings it, which can't be run here."""
    asked = []

    def download(name, allow_patterns):
        asked.append((name, allow_patterns))
        return str(tmp_path)

    trainkit.tokenizers.download.cache_clear()
    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    if has_it:
        byte_pairs(tmp_path / "tokenizer.json", TEXTS)
        found = trainkit.tokenizers.find_file("someone/tokenizer")
        assert found == tmp_path / "tokenizer.json"
    else:
        with pytest.raises(ConnectionError, match="someone/tokenizer.*hub has no such"):
            trainkit.tokenizers.find_file("someone/tokenizer")
    patterns = ["tokenizer.json", "tokenizer_config.json"]
    assert asked == [("someone/tokenizer", patterns)]
