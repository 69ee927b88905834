"""Tokenizers by name: their tokens in the files, in the text, and in what is exported."""

import json
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
import trainkit.devices
import trainkit.generate
import trainkit.huggingface
import trainkit.token_files
import trainkit.tokenizers
from trainkit.config import TrainingConfig, load_config

TEXTS = [
    "Some text, and more of it.\n",
    "It costs 3 € <|endoftext|> or so.",
    "漢字 ünï",
]


def words(path: Path, size: int) -> None:
    """A tokenizer of that many words, w0, w1, and so on, and a token that ends a text."""
    ids = {f"w{i}": i for i in range(size)} | {END: size}
    found = tokenizers.Tokenizer(tokenizers.models.WordLevel(ids, unk_token="w0"))
    found.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    found.save(str(path))


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
    source = trainkit.corpus.describe(config, tutorial.tokenize)
    folder = Path(config.data_dir)
    folder.mkdir()
    trainkit.token_files.write_manifest(folder, source, 1, {})
    byte_pairs(tmp_path / "mine/tokenizer.json", TEXTS, 290)  # in place
    trainkit.tokenizers.load.cache_clear()
    other = load_config(tmp_path / "mine.yaml", num_workers=1)
    assert other.vocab_size == 290 and other.run_name != config.run_name
    with pytest.raises(FileExistsError, match="tokenizer_digest was"):
        now = trainkit.corpus.describe(other, tutorial.tokenize)
        trainkit.token_files.existing(other, now)
    gpt2 = load_config(tmp_path / "mine.yaml", tokenizer="gpt2")
    assert gpt2.vocab_size == 50_257 and gpt2.run_name != config.run_name


def test_more_tokens_than_sixteen_bits_can_count(small, tutorial, cluster, tmp_path):
    words(tmp_path / "tokenizer.json", 70_000)
    numbers = np.random.default_rng(0).integers(0, 70_000, (10, 100))
    for i, row in enumerate(numbers):
        (tmp_path / f"{i}.txt").write_text(" ".join(f"w{n}" for n in row))
    config = small(
        dataset=f"{tmp_path}/*.txt",
        tokenizer=f"{tmp_path}/tokenizer.json",
        vocab_size=70_001,
        val_fraction=0.4,
        batch_size=2,
        eval_steps=1,
    )
    manifest = tutorial.prepare_dataset(config)
    assert manifest["source"]["dtype"] == "uint32"
    assert manifest["tokens"] == {"train": 606, "val": 404}
    trainkit.token_files.check(config)
    assert tutorial.prepare_dataset(config) == manifest  # they are there
    train = numbers[[1, 3, 4, 6, 8, 9]]  # the others are for val
    expected = np.pad(train, ((0, 0), (0, 1)), constant_values=70_000).ravel()
    found = np.fromfile(tmp_path / config.data_dir / "train.bin", np.uint32)
    assert found.tolist() == expected.tolist()

    mesh = trainkit.devices.make_mesh(config)
    state = initial_state(tutorial, config, mesh)
    numbers = trainkit.token_files.window_numbers(config, "train", range(1))
    (row,) = tutorial.make_token_dataset(config, "train", numbers).take(1)
    assert row["tokens"].dtype == np.uint32
    loss = tutorial.train_step(state, row["tokens"], config)[1]["loss"]
    assert float(loss) == pytest.approx(np.log(70_001), abs=0.2)


def test_an_encoding_of_tiktoken_goes_out_as_it_is():
    """All of them are converted in the same way; this one's vocabulary is at hand."""
    theirs = tiktoken.get_encoding("gpt2")
    exported = trainkit.huggingface.their_tokenizer(theirs)
    for text in [*TEXTS, *trainkit.corpus.help_pages()]:
        expected = theirs.encode(text, allowed_special="all")
        assert exported(text)["input_ids"] == expected
        assert exported.decode(expected) == text


def test_end_of_text_is_what_its_settings_say(tmp_path):
    byte_pairs(tmp_path / "tokenizer.json", TEXTS)
    for named in ("a", {"content": "a"}):
        (tmp_path / "tokenizer_config.json").write_text(
            json.dumps({"eos_token": named})
        )
        found = trainkit.tokenizers.HuggingFaceTokenizer(tmp_path / "tokenizer.json")
        assert found.decode([found.eot_token]) == "a"


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
    words(path, 3)
    path.write_text(path.read_text().replace(END, "w3"))
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


def test_what_a_text_says_is_text(tmp_path):
    """Only a document's end has the token; a tokenizer's own frame of a text is left out."""
    theirs = byte_pairs(tmp_path / "tokenizer.json", TEXTS)
    theirs.post_processor = tokenizers.processors.TemplateProcessing(
        single=f"$A {END}", special_tokens=[(END, 0)]
    )
    theirs.save(str(tmp_path / "tokenizer.json"))
    for name in (tmp_path, tmp_path / "tokenizer.json"):
        found = trainkit.tokenizers.load(str(name))
        ids = found.encode_ordinary(TEXTS[1])
        assert found.eot_token == 0 and 0 not in ids
        assert found.decode(ids) == TEXTS[1]
        assert found.decode([*ids, 0]) == TEXTS[1] + END


def test_a_vocabulary_that_cannot_be_fetched_names_the_way_out(monkeypatch, tmp_path):
    def get(name):
        raise OSError("no route to host")

    monkeypatch.setattr(tiktoken, "get_encoding", get)
    with pytest.raises(
        ConnectionError, match="vocabulary of p50k_edit .*no route to host"
    ):
        trainkit.tokenizers.load("p50k_edit")


@pytest.mark.parametrize("has_it", [True, False])
def test_a_tokenizer_of_the_hub(tmp_path, monkeypatch, has_it):
    """As `snapshot_download` brings it, which can't be run here."""
    asked = []

    def download(name, allow_patterns):
        asked.append((name, allow_patterns))
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    if has_it:
        byte_pairs(tmp_path / "tokenizer.json", TEXTS)
        found = trainkit.tokenizers.find_file("someone/tokenizer")
        assert found == tmp_path / "tokenizer.json"
    else:
        with pytest.raises(FileNotFoundError, match="someone/tokenizer on the hub has"):
            trainkit.tokenizers.find_file("someone/tokenizer")
    patterns = ["tokenizer.json", "tokenizer_config.json"]
    assert asked == [("someone/tokenizer", patterns)]
