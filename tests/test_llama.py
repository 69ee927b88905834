"""examples/llama.py in the notebook, beside transformers' Llama and Qwen3."""

import functools
import json
import os
import signal
from functools import partial

import jax
import llamas
import numpy as np
import pytest
import torch
import transformers
from accidents import log_of
from conftest import ROOT
from safetensors.numpy import load_file, save_file
from samples import losses_alone

import trainkit.config_files
import trainkit.huggingface
import trainkit.launch
import trainkit.run_log
import trainkit.tokenization
from trainkit import checkpoint_reader
from trainkit.generate import generate

WHOLE = "model.safetensors"


@pytest.fixture
def load(llama, small):
    """A function that gives the model with the weights in a folder, as a launch loads it."""

    def load(folder, keys: dict, **changes):
        shape = trainkit.huggingface.published_shape(str(folder), "builtin")
        assert shape.items() <= keys.items()
        config = small(**keys, init_from=str(folder), tokenizer="builtin", **changes)
        state = llama.abstract_state(config, llama.create_mesh(config))
        trainkit.huggingface.check(config, state.model)
        return llama.first_state(config, state).model

    return load


@pytest.mark.parametrize("shape", llamas.SHAPES)
def test_the_same_function_in_and_out(llama, load, tmp_path, shape):
    """Logits, weights, and greedy text, with the tokenizer in the exported folder."""
    keys = llamas.SHAPES[shape]
    theirs = llamas.make(tmp_path / "theirs", keys)
    model = load(tmp_path / "theirs", keys)
    tokens = np.random.default_rng(0).integers(0, 2048, (2, 37))
    with torch.no_grad():
        expected = theirs(torch.tensor(tokens)).logits.numpy()
    found = np.asarray(model(tokens))
    assert np.abs(found - expected).max() < 1e-6 * np.abs(expected).max()
    out = trainkit.huggingface.export(model, tmp_path / "out")
    weights = (load_file(folder / WHOLE) for folder in (out, tmp_path / "theirs"))
    jax.tree.map(np.testing.assert_array_equal, *weights)
    about = json.loads((out / "config.json").read_text())
    assert about["architectures"] == [type(theirs).__name__]
    pipe = transformers.pipeline("text-generation", str(out))
    (text,) = pipe("The value", do_sample=False, max_new_tokens=9)
    assert [text["generated_text"]] == generate(model, ["The value"], 9, temperature=0)


UNTIED = "qwen3, untied"


def test_files_in_another_form(load, tmp_path):
    """Two of float16, with a constant, whose names have no prefix."""
    llamas.make(tmp_path, llamas.SHAPES[UNTIED])
    exact = load(tmp_path, llamas.SHAPES[UNTIED])
    tensors = load_file(tmp_path / WHOLE)
    (tmp_path / WHOLE).unlink()
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(3)
    tensors = [
        (k.removeprefix("model."), x.astype("float16")) for k, x in tensors.items()
    ]
    for number, part in enumerate((tensors[:7], tensors[7:]), 1):
        save_file(dict(part), tmp_path / f"model-0000{number}-of-00002.safetensors")
    found = load(tmp_path, llamas.SHAPES[UNTIED])
    near = partial(np.testing.assert_allclose, rtol=0.01, atol=1e-4)
    jax.tree.map(near, found, exact)


@pytest.mark.parametrize(
    "keys, words",
    [
        ({"rope_theta": 5e5}, "has rope_parameters .*10000.*, and .*500000"),
        ({"qk_norm": False}, "has model_type 'qwen3', and .* 'llama'"),
    ],
)
def test_weights_of_another_model_are_refused(load, tmp_path, keys, words):
    given = llamas.SHAPES[UNTIED]
    llamas.make(tmp_path, given)
    with pytest.raises(ValueError, match=words):
        load(tmp_path, given | {"model": given["model"] | keys})


def test_a_key_that_nobody_reads_is_refused(llama, small, tutorial, monkeypatch):
    """Or a typo would train the default. Also one that only GPT-2 doesn't read."""
    given = llamas.SHAPES["llama, one group"]
    check = partial(
        trainkit.dry_run.check_sharding,
        devices=1,
        create_state=llama.create_state,
        abstract_state=llama.abstract_state,
        loss_fn=llama.loss_fn,
    )
    frequencies = functools.cache(llama.frequencies)
    monkeypatch.setattr(llama, "frequencies", frequencies)
    for _ in range(2):  # what is cached reads nothing
        check(small(**given))
    typo = given | {"model": given["model"] | {"rope_scalign": llamas.SCALED}}
    with pytest.raises(ValueError, match="model: .* read rope_scalign"):
        check(small(**typo))
    given = tutorial.create_state, tutorial.abstract_state, tutorial.loss_fn
    with pytest.raises(ValueError, match="model: .* read n_kv_head"):
        trainkit.dry_run.check_sharding(small(model={"n_kv_head": 1}), 1, *given)


def test_its_first_weights_and_its_arithmetic(llama, small):
    """For MFU; heads may be wider than the model."""
    config = small(**llamas.SHAPES["qwen3, wide heads"])
    arrays = {
        f"model.{k}": x for k, x in llama.named(llama.create_model(config)).items()
    }
    for name, x in arrays.items():
        assert name.endswith("scale") or np.std(x) == pytest.approx(0.02, rel=0.1), name
    weights = sum(x.size for x in arrays.values())
    expected = 6 * weights + 12 * 2 * (6 * 16) * 40  # layers, heads, tokens
    assert trainkit.run_log.flops_per_token(config, arrays) == expected


def test_other_frequencies_are_refused(llama, small):
    given = llamas.SHAPES["llama, one group"]
    yarn = {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}
    config = small(**given | {"model": given["model"] | yarn})
    with pytest.raises(ValueError, match="model.rope_scaling: expected llama3, .*yarn"):
        llama.create_model(config)(np.zeros((1, 8), np.int32))


def test_a_gated_tokenizer_is_not_asked_for():
    path = ROOT / "configs/llama-1b-gpu.yaml"
    config = trainkit.config_files.load_config(path, "storage")
    assert config.vocab_size == 128_256 and config.token_dtype == "uint32"


@pytest.mark.extra
def test_trained_killed_continued_and_exported(llama, cluster, small, write_bins):
    """By two workers, which share each array."""
    given = llamas.SHAPES["llama, 3 heads a group"]
    config = small(**given, tokenizer="builtin", fsdp=2, dropout=0.1, max_failures=1)

    def loop(settings):
        def die(line):
            flag = config.run_path / "killed"
            if line["step"] == 14 and not flag.exists():
                flag.touch()
                os.kill(os.getpid(), signal.SIGKILL)

        llama.train_loop_per_worker(settings, die)

    write_bins(config, 4_001, 1_001)
    result = llama.make_trainer(config, loop).fit()
    log = log_of(config)
    assert [line["step"] for line in log] == [*range(1, 21)]
    assert log[-1]["loss"] < log[0]["loss"] - 0.1
    assert [line["step"] for line in log if "val_loss" in line] == [10, 20]
    expected = losses_alone(llama, config)
    found = [line["loss"] for line in log]
    np.testing.assert_allclose(found, expected, atol=2e-5)
    model = checkpoint_reader.load_model(
        result.checkpoint, llama.create_model, llama.named
    )
    out = trainkit.huggingface.export(model, config.run_path / "out")
    assert transformers.AutoModelForCausalLM.from_pretrained(out)
