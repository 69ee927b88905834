"""The same numbers as Hugging Face; weights in and out."""

import dataclasses
import json
import os
import re
from functools import partial
from pathlib import Path

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
import ray.train
import tiktoken
import torch
import transformers
from conftest import ROOT, WITH_PYTORCH
from flax import nnx
from peers import ODD, make_peer, ours
from safetensors.numpy import load_file, save_file
from samples import byte_pairs, loss_of, python

import trainkit.config
import trainkit.generate
import trainkit.huggingface
import trainkit.tokenizers


@pytest.fixture
def folder(tmp_path):
    """That of a random Hugging Face GPT-2."""
    make_peer(ODD, tmp_path / "theirs")
    return tmp_path / "theirs"


def save(model, path) -> ray.train.Checkpoint:
    """A checkpoint with the parameters of `model`, like those that training writes."""
    checkpointer = ocp.StandardCheckpointer()
    state = {"params": nnx.state(model, nnx.Param)}
    settings = dataclasses.asdict(model.config)
    checkpointer.save(path, state, custom_metadata=settings)
    checkpointer.wait_until_finished()
    return ray.train.Checkpoint(str(path))


def test_the_same_function(tutorial, small, tmp_path):
    theirs = make_peer(ODD, tmp_path)
    model = ours(tutorial, small, tmp_path)
    tokens = np.random.default_rng(0).integers(0, ODD["vocab_size"], (2, 33))
    with torch.no_grad():
        expected = theirs(torch.tensor(tokens), labels=torch.tensor(tokens))
    logits = expected.logits.numpy()
    np.testing.assert_allclose(model(tokens), logits, atol=1e-6, rtol=0)
    loss = loss_of(tutorial, model, tokens.astype(np.uint16))
    assert loss == pytest.approx(expected.loss.item(), abs=1e-5)


def test_in_out_in_is_exact(tutorial, small, folder, tmp_path, capsys):
    """Without GPT-2's tokenizer, which would turn tokens of another into nonsense."""
    checkpoint = save(ours(tutorial, small, folder), tmp_path / "checkpoint")
    model = trainkit.generate.load_model(tutorial.create_model, checkpoint)
    exported = trainkit.huggingface.export(model, tmp_path / "exported")
    before, after = (load_file(x / WHOLE) for x in (folder, exported))
    jax.tree.map(np.testing.assert_array_equal, before, after)
    assert not [*exported.glob("*token*")]
    assert "no tokenizer: gpt2 has" in capsys.readouterr().out


PROGRAM = """
import sys
from transformers import pipeline
folder, text = sys.argv[1:]
pipe = pipeline("text-generation", folder)
(out,) = pipe("Once upon", max_new_tokens=5)
assert out["generated_text"].startswith("Once upon"), out
ids = pipe.tokenizer(text + "<|endoftext|>")["input_ids"]
assert pipe.tokenizer.decode(ids[:-1]) == text
print(ids)
"""


def test_export_works_without_our_code(tutorial, small, tmp_path, monkeypatch):
    """And goes into no folder that has another model; a failed one leaves nothing."""
    model = tutorial.create_model(small(vocab_size=50_257, block_size=64))
    folder = trainkit.huggingface.export(model, tmp_path / "exported")
    text = "Hello, world! Ünïcode 漢字\n\n  spaces 123's"
    path = WITH_PYTORCH.get("PYTHONPATH")
    said = python(PROGRAM, folder, text, PYTHONPATH=path, HF_HUB_OFFLINE="1")
    expected = [*tiktoken.get_encoding("gpt2").encode(text), 50_256]
    assert said.splitlines()[-1] == str(expected)
    generation = json.loads((folder / "generation_config.json").read_text())
    assert generation["max_length"] == 64  # or a pipeline writes beyond the positions
    before = {p.name: p.read_bytes() for p in folder.iterdir()}
    with pytest.raises(FileExistsError, match="another folder"):
        trainkit.huggingface.export(model, folder)
    assert {p.name: p.read_bytes() for p in folder.iterdir()} == before
    assert len({p.stat().st_mode for p in folder.iterdir()}) == 1  # as others may read
    monkeypatch.setattr(trainkit.tokenizers, "load", lambda name: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        trainkit.huggingface.export(model, tmp_path / "exported-too")
    assert sorted(p.name for p in tmp_path.glob("exported*")) == ["exported"]


def test_exported_tokens_keep_their_numbers(tmp_path, monkeypatch):
    """Also those that have a name, wherever they stand; and tiktoken's cache stays as it is."""
    gpt2, special = tiktoken.get_encoding("gpt2"), {"<|endoftext|>": 259, "<|x|>": 257}
    ranks = {token: n for token, n in gpt2._mergeable_ranks.items() if n < 257}
    ranks |= {b" the": 258}
    ours = tiktoken.Encoding(
        "ours", pat_str=gpt2._pat_str, mergeable_ranks=ranks, special_tokens=special
    )
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))
    theirs = trainkit.huggingface.their_tokenizer(ours)
    assert theirs.eos_token_id == 259 and len(theirs) == 260
    text = "In the end<|x|> is the end<|endoftext|>"
    assert theirs.encode(text) == ours.encode(text, allowed_special="all")
    assert [*tmp_path.iterdir()] == []


WHOLE, INDEX = "model.safetensors", "model.safetensors.index.json"
WTE, ZEROS = "transformer.wte.weight", np.zeros((1237, 80))
OTHERS = {"old.safetensors": {"wte.weight": np.zeros(3)}}  # which nothing names


def put(folder: Path, files: dict[str, dict | str]) -> None:
    """Tensors or texts in these files, instead of the weights that are there."""
    (folder / WHOLE).unlink()
    for name, contents in files.items():
        if isinstance(contents, str):
            (folder / name).write_text(contents)
        else:
            save_file(contents, folder / name)


def in_shards(tensors) -> dict:
    names, files = sorted(tensors), {}
    for file, part in (("a.safetensors", names[::2]), ("b.safetensors", names[1::2])):
        files[file] = {name: tensors[name] for name in part}
    where = {name: file for file, part in files.items() for name in part}
    return files | {INDEX: json.dumps({"weight_map": where})}


def as_type(dtype: str, tensors) -> dict:
    return {WHOLE: {name: x.astype(dtype) for name, x in tensors.items()}}


def with_masks(tensors) -> dict:
    """As in OpenAI's own files on the hub, whose names have no prefix."""
    plain = {k.removeprefix("transformer."): v for k, v in tensors.items()}
    return {WHOLE: plain | {"h.0.attn.bias": np.ones((1, 1, 4, 4), np.uint8)}}


@pytest.mark.parametrize(
    "change",
    [
        lambda tensors: {WHOLE: tensors} | OTHERS,
        lambda tensors: {WHOLE: tensors | {"lm_head.weight": tensors[WTE].copy()}},
        lambda tensors: in_shards(tensors) | OTHERS,
        with_masks,
        *(partial(as_type, name) for name in ("float64", "float16", "bfloat16")),
    ],
)
def test_weights_are_those_that_the_names_say(tutorial, small, folder, change):
    """Here, they are multiples of 1/128, which numbers of two bytes can be."""
    weights = load_file(folder / WHOLE).items()
    expected = {name: np.round(tensor * 128) / 128 for name, tensor in weights}
    put(folder, change(expected))
    model = ours(tutorial, small, folder)
    found = trainkit.huggingface.to_tensors(model.config, nnx.state(model, nnx.Param))
    for name, tensor in expected.items():
        np.testing.assert_array_equal(found[name.removeprefix("transformer.")], tensor)


BOTH = "expected .*model.safetensors or model.safetensors.index.json, found"


@pytest.mark.parametrize(
    "change, message",
    [
        ({WTE: np.zeros((9, 80))}, r"wte.weight \(9, 80\), expected \(1237, 80\)"),
        ({"adapter.weight": np.zeros(3)}, r"adapter.weight \(3,\), expected none"),
        ({"lm_head.weight": ZEROS}, "lm_head.weight and wte.weight"),
        ({"wte.weight": ZEROS}, "has wte.weight twice"),
        ({WTE: ZEROS.astype(np.int8)}, "has wte.weight as int8; expected"),
        (lambda x: {WHOLE: {WTE: x[WTE]}}, "of 40 tensors, 39 .*: found h.0.* none"),
        (lambda x: {WHOLE: x, INDEX: "{}"}, f"{BOTH} both"),
        (lambda x: OTHERS, f"{BOTH} neither"),
        (lambda x: {WHOLE: "cut off"}, "model.safetensors can't be read"),
        (lambda x: in_shards(x) | {"b.safetensors": ""}, "b.safetensors can't be read"),
        (lambda x: {INDEX: '{"weight_map": 3}'}, "index.json can't be read"),
        (lambda x: {INDEX: '{"weight_map": {"a": "../a"}}'}, "isn't in that folder"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_weights_that_are_others_are_refused(tutorial, small, folder, change, message):
    tensors = load_file(folder / WHOLE)
    files = {WHOLE: tensors | change} if isinstance(change, dict) else change(tensors)
    put(folder, files)
    with pytest.raises(ValueError, match=f"init_from: .*{message}"):
        ours(tutorial, small, folder)


def test_shape_and_tokenizer_of_a_run_are_those_of_its_weights(folder):
    load = partial(trainkit.config.load_config, ROOT / "configs/gpt2-finetune.yaml")
    config = load(init_from=os.path.relpath(folder))
    assert {key: getattr(config, key) for key in ODD} == ODD  # no tokenizer to compare
    assert config.init_from == str(folder)  # wherever the workers run
    with pytest.raises(ValueError, match="finetune.yaml: .*'block_size': 33"):
        load(init_from=str(folder), block_size=16)
    byte_pairs(folder / "tokenizer.json", ["the value of some words"], 300)
    with pytest.raises(ValueError, match=f"that of {folder}, .*'The value of"):
        load(init_from=str(folder))
    config = load(init_from=str(folder), tokenizer=str(folder))
    assert config.tokenizer == str(folder)
    gpt2 = trainkit.huggingface.their_tokenizer(trainkit.tokenizers.load("gpt2"))
    gpt2.save_pretrained(folder)
    assert load(init_from=str(folder)).tokenizer == "gpt2"


OTHER_KINDS = {
    **{"activation_function": "relu", "layer_norm_epsilon": 1e-6, "n_inner": 100},
    **{"scale_attn_by_inverse_layer_idx": True, "scale_attn_weights": False},
    **{"tie_word_embeddings": False, "add_cross_attention": True},
    **{"quantization_config": {"bits": 8}, "model_type": "bert"},
}


def shape_of(folder: Path, settings: str) -> dict[str, int]:
    (folder / "config.json").write_text(settings)
    return trainkit.huggingface.published_shape(str(folder))


def test_other_kinds_of_gpt2_are_refused(tmp_path):
    usual = transformers.GPT2Config().to_dict()
    for key, value in OTHER_KINDS.items():
        words = re.escape(f" has {key} {value!r}, expected ")
        with pytest.raises(ValueError, match=f"init_from: .*{words}"):
            shape_of(tmp_path, json.dumps(usual | {key: value}))
            pytest.fail(f"{key} {value} is taken")
    for damaged in ("{", "3", '{"n_layer": "1"}'):
        with pytest.raises(ValueError, match="init_from: .*config.json can't be read"):
            shape_of(tmp_path, damaged)
    with pytest.raises(ConnectionError, match="init_from: 'a b/c/d' is no folder"):
        trainkit.huggingface.published_shape("a b/c/d")
    # What the hub's own gpt2 leaves out, the keys that later models brought, is as usual.
    sizes = {"n_layer": 1, "n_head": 2, "n_embd": 4, "vocab_size": 9}
    found = shape_of(tmp_path, json.dumps(sizes | {"n_inner": 16}))
    assert found == {"block_size": 1_024} | sizes


def test_a_checkpoint_of_gpus_answers_on_a_cpu(tutorial, small, tmp_path):
    """With the attention that runs here, for which its configuration need not change."""
    shape = {"n_embd": 32, "n_head": 2, "compute_dtype": "bfloat16"}
    model = tutorial.create_model(small(platform="gpu", attention="cudnn", **shape))
    checkpoint = save(model, tmp_path / "step")
    loaded = trainkit.generate.load_model(tutorial.create_model, checkpoint)
    tokens = np.arange(8)[None]
    alike = tutorial.create_model(small(attention="xla", **shape))
    np.testing.assert_array_equal(loaded(tokens), alike(tokens))
