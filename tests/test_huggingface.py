"""The same numbers as Hugging Face; weights in and out."""

import json
import os
import shutil
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers
import torch
import transformers
from conftest import ROOT
from flax import nnx
from peers import ODD, make_peer, ours
from safetensors.numpy import load_file, save_file
from samples import END, byte_pairs, hub_of

import trainkit.config_files
import trainkit.huggingface
import trainkit.tokenization

WHOLE, WTE = "model.safetensors", "transformer.wte.weight"


@pytest.fixture
def folder(tmp_path):
    """That of a random Hugging Face GPT-2."""
    make_peer(tmp_path / "theirs")
    return tmp_path / "theirs"


def test_the_same_function(tutorial, small, tmp_path):
    theirs = make_peer(tmp_path)
    model = ours(tutorial, small, tmp_path)
    tokens = np.random.default_rng(0).integers(0, ODD["vocab_size"], (2, 33))
    with torch.no_grad():
        expected = theirs(torch.tensor(tokens)).logits.numpy()
    np.testing.assert_allclose(model(tokens), expected, atol=1e-6, rtol=0)


@pytest.mark.parametrize(
    "change",
    [
        lambda tensors: tensors | {"lm_head.weight": tensors[WTE].copy()},
        lambda tensors: {name: x.astype("bfloat16") for name, x in tensors.items()},
        # As in OpenAI's own files on the hub, whose names have no prefix
        lambda tensors: (
            {k.removeprefix("transformer."): x for k, x in tensors.items()}
            | {"h.0.attn.bias": np.ones((1, 1, 4, 4), np.uint8)}
            | {"h.0.attn.masked_bias": np.ones(1, np.float32)}
        ),
    ],
)
def test_in_out_in_is_exact(tutorial, small, folder, tmp_path, change):
    """Of multiples of 1/128, which numbers of two bytes can be; divided as the model is."""
    tensors = {k: np.round(x * 128) / 128 for k, x in load_file(folder / WHOLE).items()}
    tensors[WTE] = tensors[WTE][:2000].copy()  # 48 rows of ours are padding
    save_file(change(tensors), folder / WHOLE)
    config = small(**ODD | {"vocab_size": 2000}, init_from=str(folder))
    abstract = tutorial.abstract_state(config, tutorial.create_mesh(config))
    model = tutorial.first_state(config, abstract).model
    for x, like in zip(jax.tree.leaves(model), jax.tree.leaves(abstract.model)):
        assert x.sharding == like.sharding and x.shape == like.shape
    exported = trainkit.huggingface.export(model, tmp_path / "exported")
    jax.tree.map(np.testing.assert_array_equal, load_file(exported / WHOLE), tensors)


def test_export_works_without_our_code(tutorial, small, tmp_path):
    """And goes into no folder that has another model."""
    config = small(tokenizer="builtin", vocab_size=2048, block_size=64)
    model = tutorial.create_model(config)
    folder = trainkit.huggingface.export(model, tmp_path / "exported")
    pipe = transformers.pipeline("text-generation", str(folder))
    (out,) = pipe("The value of", max_new_tokens=5)
    assert out["generated_text"].startswith("The value of")
    text = "Hello, world! Ünïcode 漢字\n\n  spaces 123's"
    tokenizer = trainkit.tokenization.load("builtin")
    expected = [*tokenizer.encode_ordinary(text), tokenizer.eot_token]
    found = pipe.tokenizer(text + pipe.tokenizer.eos_token)["input_ids"]
    assert found == expected and pipe.model.config.eos_token_id == expected[-1]
    assert (folder / WHOLE).stat().st_mode & 0o777 == 0o644  # as others may read
    about = json.loads((folder / "config.json").read_text())
    assert about["architectures"] == ["GPT2LMHeadModel"]
    assert {about[f"{part}_pdrop"] for part in ("resid", "embd", "attn")} == {0}
    assert about["bos_token_id"] == tokenizer.eot_token
    with pytest.raises(OSError, match="exported"):
        trainkit.huggingface.export(model, folder)


@pytest.mark.parametrize(
    "change, message",
    [
        ({WTE: np.zeros((9, 80))}, rf"has {WTE} \(9, 80\), expected \(2048, 80\)"),
        ({"adapter.weight": np.zeros(3)}, r"adapter.weight \(3,\), expected None"),
        (
            {"lm_head.weight": np.zeros((2048, 80))},
            "lm_head.weight in .* isn't the embeddings",
        ),
        (
            {"transformer.ln_f.bias": np.zeros(80, "int8")},
            "ln_f.bias as int8, expected",
        ),
    ],
)
def test_weights_that_are_others_are_refused(tutorial, small, folder, change, message):
    save_file(load_file(folder / WHOLE) | change, folder / WHOLE)
    with pytest.raises(ValueError, match=f"init_from: .*{message}"):
        ours(tutorial, small, folder)


def test_weights_in_several_files(tutorial, small, folder, monkeypatch, tmp_path):
    """As transformers writes large models, here and on the hub."""
    whole = ours(tutorial, small, folder)
    tensors = [*load_file(folder / WHOLE).items()]
    (folder / WHOLE).unlink()
    for i, part in enumerate((tensors[:9], tensors[9:]), 1):
        save_file(dict(part), folder / f"model-0000{i}-of-00002.safetensors")
    download = hub_of(folder, tmp_path / "cache")
    monkeypatch.setattr(trainkit.huggingface, "snapshot_download", download)
    for name in (folder, "someone/model"):
        found = map(jax.tree.leaves, (ours(tutorial, small, name), whole))
        jax.tree.map(np.testing.assert_array_equal, *found)


def test_the_shape_of_a_run_is_that_of_its_weights(folder):
    """Or else refused, as is a tokenizer that the folder of the weights contradicts."""
    path = ROOT / "configs/gpt2-finetune.yaml"
    load = partial(trainkit.config_files.load_config, path, "storage")
    weights = os.path.relpath(folder)
    config = load(init_from=weights, n_layer=ODD["n_layer"])
    assert {key: getattr(config, key) for key in ODD} == ODD
    assert config.init_from == str(folder)  # wherever the workers run
    with pytest.raises(ValueError, match="block_size is 16, and init_from, .* has 33"):
        load(init_from=weights, block_size=16)
    shutil.copy(trainkit.tokenization.load("builtin").path, folder / "tokenizer.json")
    with pytest.raises(
        ValueError, match="init_from: .* other tokens than tokenizer, gpt2"
    ):
        load(init_from=weights)
    assert load(init_from=weights, tokenizer="builtin").vocab_size == 2048
    end = {"eos_token": "@"}  # all tokens but the end of a text are the same
    (folder / "tokenizer_config.json").write_text(json.dumps(end))
    with pytest.raises(ValueError, match="other tokens than tokenizer, builtin"):
        load(init_from=weights, tokenizer="builtin")
    assert load(init_from=weights, tokenizer=str(folder)).vocab_size == 2048


OTHERS = {  # what a person makes of GPT-2
    "one more": (
        lambda m: setattr(m, "head", nnx.Linear(32, 9, rngs=nnx.Rngs(0))),
        r"head.bias \(9,\), expected None",
    ),
    "another scale": (
        lambda m: setattr(m.ln_f, "extra", nnx.Param(jnp.ones(32))),
        "two of its arrays are transformer.ln_f.weight",
    ),
    "wider": (
        lambda m: setattr(m.h[1].mlp, "c_fc", nnx.Linear(32, 96, rngs=nnx.Rngs(0))),
        r"h.1.mlp.c_fc.bias \(96,\), expected \(128,\)",
    ),
}


@pytest.mark.parametrize("edit", OTHERS)
def test_what_is_no_gpt2_is_not_exported(tutorial, small, tmp_path, edit):
    """Its file would say that it is one."""
    change, words = OTHERS[edit]
    model = tutorial.create_model(small(tokenizer="builtin"))
    change(model)
    with pytest.raises(ValueError, match=f"the model is no GPT.*: .*{words}"):
        trainkit.huggingface.export(model, tmp_path / "exported")
    assert not [*tmp_path.iterdir()]


def test_an_exported_tokenizer_adds_nothing(tutorial, small, tmp_path, monkeypatch):
    """Whatever the template in its file adds; and it knows how long texts may be."""
    monkeypatch.setenv("HOME", str(tmp_path))
    path = tmp_path / "tokenizer.json"
    theirs = byte_pairs(path, ["some words to learn"])
    special = [(END, theirs.token_to_id(END))]
    template = {"single": f"{END} $A {END}", "special_tokens": special}
    theirs.post_processor = tokenizers.processors.TemplateProcessing(**template)
    theirs.save(str(path))
    config = small(tokenizer=str(path), vocab_size=theirs.get_vocab_size())
    folder = trainkit.huggingface.export(tutorial.create_model(config), "~/out")
    assert folder == tmp_path / "out"
    found = transformers.AutoTokenizer.from_pretrained(folder)
    text = "some words" * 20
    expected = trainkit.tokenization.load(str(path)).encode_ordinary(text)
    assert found(text)["input_ids"] == expected
    assert len(found(text, truncation=True)["input_ids"]) == config.block_size


def test_a_tokenizer_on_the_hub_is_compared_too(folder, monkeypatch, tmp_path):
    """It is fetched with the weights, whatever was fetched before."""
    shutil.copy(trainkit.tokenization.load("builtin").path, folder / "tokenizer.json")
    download = hub_of(folder, tmp_path / "cache")
    monkeypatch.setattr(trainkit.huggingface, "snapshot_download", download)
    with pytest.raises(ValueError, match="other tokens than tokenizer, gpt2"):
        trainkit.huggingface.published_shape("someone/model", "gpt2")


def test_other_kinds_of_gpt2_are_refused(tutorial, small, folder):
    """What a file leaves out, as the hub's own gpt2 leaves out later keys, is as usual."""
    config = small(**ODD, init_from=str(folder))
    model = jax.eval_shape(partial(tutorial.create_model, config))
    about = json.loads((folder / "config.json").read_text())
    others = {"activation_function": "relu", "scale_attn_by_inverse_layer_idx": True}
    others |= {"scale_attn_weights": False, "layer_norm_epsilon": 1e-6}
    for key, value in others.items():
        kept = {k: v for k, v in about.items() if k not in others}
        (folder / "config.json").write_text(json.dumps(kept))
        trainkit.huggingface.check(config, model)
        (folder / "config.json").write_text(json.dumps(kept | {key: value}))
        with pytest.raises(ValueError, match=f"has {key} {value!r}, and the model"):
            trainkit.huggingface.check(config, model)
