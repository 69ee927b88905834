"""The same numbers as Hugging Face; weights in and out; text out."""

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import orbax.checkpoint as ocp
import pytest
import ray.train
import torch
import transformers
from conftest import WITH_PYTORCH
from flax import nnx
from safetensors.numpy import load_file, save_file

import trainkit.config
import trainkit.devices
import trainkit.generate
import trainkit.pretrained

ROOT = Path(__file__).resolve().parent.parent
ODD = {"n_layer": 3, "n_head": 5, "n_embd": 80, "block_size": 33, "vocab_size": 1237}
SMALL = {
    "n_layer": 12,
    "n_head": 12,
    "n_embd": 768,
    "block_size": 1024,
    "vocab_size": 50_257,
}


@pytest.fixture
def peer(tutorial, tmp_path):
    """A function that makes a random Hugging Face GPT-2 and its folder."""

    def make(shape, folder="theirs"):
        torch.manual_seed(0)
        config = transformers.GPT2Config(
            n_positions=shape["block_size"],
            eos_token_id=shape["vocab_size"] - 1,
            bos_token_id=shape["vocab_size"] - 1,
            **{k: v for k, v in shape.items() if k != "block_size"},
        )
        model = transformers.GPT2LMHeadModel(config).eval()
        with torch.no_grad():  # biases and norms start as constants: tell them apart
            for parameter in model.parameters():
                if parameter.dim() == 1:
                    parameter.add_(0.02 * torch.randn_like(parameter))
        model.save_pretrained(tmp_path / folder)
        return model, tmp_path / folder

    return make


def ours(tutorial, small, folder, **changes):
    shape = trainkit.pretrained.shape(str(folder))
    config = small(**(shape | {"init_from": str(folder)} | changes))
    params = tutorial.initial_state(config, trainkit.devices.make_mesh(config)).params
    return tutorial.assemble(config, params)


def save(model, path) -> ray.train.Checkpoint:
    """A checkpoint with the parameters of `model`, like those that training writes."""
    checkpointer = ocp.StandardCheckpointer()
    state = {"params": nnx.state(model, nnx.Param)}
    settings = dataclasses.asdict(model.config)
    checkpointer.save(path, state, custom_metadata=settings)
    checkpointer.wait_until_finished()
    return ray.train.Checkpoint(str(path))


@pytest.mark.parametrize("shape, length", [(ODD, 33), (SMALL, 24)], ids=["odd", "124M"])
def test_the_same_function(tutorial, small, peer, shape, length):
    theirs, folder = peer(shape)
    model = ours(tutorial, small, folder)
    tokens = np.random.default_rng(0).integers(0, shape["vocab_size"], (2, length))
    inputs = torch.tensor(tokens)
    with torch.no_grad():
        expected = theirs(inputs, labels=inputs)
    logits = np.asarray(model(tokens))[..., : shape["vocab_size"]]
    np.testing.assert_allclose(logits, expected.logits.numpy(), atol=1e-4)
    loss = float(tutorial.loss_fn(model, tokens.astype(np.uint16)))
    assert loss == pytest.approx(expected.loss.item(), abs=1e-5)


def test_in_out_in_is_exact(tutorial, small, peer, tmp_path):
    _, folder = peer(ODD)
    model = ours(tutorial, small, folder)
    checkpoint = save(model, tmp_path / "checkpoint")
    exported = tutorial.export_to_huggingface(checkpoint, tmp_path / "exported")
    before = load_file(folder / "model.safetensors")
    after = load_file(exported / "model.safetensors")
    assert before.keys() == after.keys()
    for name in before:
        np.testing.assert_array_equal(before[name], after[name], err_msg=name)
    again = ours(tutorial, small, exported)
    flat = [dict(nnx.to_flat_state(nnx.state(m, nnx.Param))) for m in (model, again)]
    for path in flat[0]:
        np.testing.assert_array_equal(flat[0][path][...], flat[1][path][...])


def test_export_works_without_our_code(tutorial, small, tmp_path):
    config = small(vocab_size=50_257, block_size=64)
    checkpoint = save(tutorial.create_model(config), tmp_path / "checkpoint")
    folder = tutorial.export_to_huggingface(checkpoint, tmp_path / "exported")
    script = f"""
import os
os.environ["HF_HUB_OFFLINE"] = "1"
from transformers import AutoModelForCausalLM, AutoTokenizer, pipeline
model = AutoModelForCausalLM.from_pretrained({str(folder)!r})
tokenizer = AutoTokenizer.from_pretrained({str(folder)!r})
text = "Hello, world! Ünïcode 漢字\\n\\n  spaces 123's"
assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
print(tokenizer(text + "<|endoftext|>")["input_ids"])
out = pipeline("text-generation", {str(folder)!r})("Once upon", max_new_tokens=5)
assert out[0]["generated_text"].startswith("Once upon"), out
"""
    result = subprocess.run(
        [sys.executable, "-c", script],
        env=WITH_PYTORCH,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, result.stderr
    import tiktoken

    encoding = tiktoken.get_encoding("gpt2")
    text = "Hello, world! Ünïcode 漢字\n\n  spaces 123's<|endoftext|>"
    expected = encoding.encode(text, allowed_special="all")
    assert result.stdout.strip().splitlines()[-1] == str(expected)


def test_export_into_a_folder_with_another_model(tutorial, small, tmp_path):
    config = small(vocab_size=50_257)
    checkpoint = save(tutorial.create_model(config), tmp_path / "checkpoint")
    folder = tutorial.export_to_huggingface(checkpoint, tmp_path / "exported")
    before = {p.name: p.read_bytes() for p in folder.iterdir()}
    with pytest.raises(FileExistsError, match="another folder"):
        tutorial.export_to_huggingface(checkpoint, folder)
    assert {p.name: p.read_bytes() for p in folder.iterdir()} == before
    assert sorted(p.name for p in tmp_path.glob("exported*")) == ["exported"]


def test_greedy_text_equals_hugging_faces(tutorial, small, peer):
    theirs, folder = peer(ODD | {"block_size": 96})
    model = ours(tutorial, small, folder)
    prompts = [[1, 2, 3], [500], [7, 8, 9, 10, 11, 1000, 1001]]
    found = trainkit.generate.generate_tokens(
        model, prompts, max_new_tokens=64, temperature=0.0
    )
    for prompt, tokens in zip(prompts, found):
        expected = theirs.generate(
            torch.tensor([prompt]), do_sample=False, max_new_tokens=64, pad_token_id=0
        )[0, len(prompt) :]
        assert tokens == expected.tolist()


def test_sampling(tutorial, small, capsys):
    model = tutorial.create_model(small(block_size=32, vocab_size=50_257))
    draw = trainkit.generate.generate_tokens
    trainkit.generate.decode.clear_cache()
    first, second, other = (
        draw(model, [[1], [2, 3]], max_new_tokens=8, seed=s) for s in (0, 0, 1)
    )
    assert first == second != other
    assert trainkit.generate.decode._cache_size() == 1
    greedy = draw(model, [[1]], max_new_tokens=8, temperature=0.0)
    assert draw(model, [[1]], max_new_tokens=8, top_k=1) == greedy
    draw(model, [list(range(40))], max_new_tokens=8)
    assert "kept the last 24 of 40 tokens" in capsys.readouterr().out
    text = trainkit.generate.generate(model, ["Hello there"], max_new_tokens=4)[0]
    assert text.startswith("Hello there") and len(text) > len("Hello there")


def test_stops_at_end_of_text(tutorial, small):
    """A model whose only good next token is the end."""
    config = small()
    model = tutorial.create_model(config)
    end = config.vocab_size - 1
    model.ln_f.scale[...] = np.zeros(config.n_embd, np.float32)
    model.ln_f.bias[...] = model.wte.embedding[end] * 1e3
    assert (
        trainkit.generate.generate_tokens(model, [[1, 2], [3]], max_new_tokens=8)
        == [[end]] * 2
    )


@pytest.mark.parametrize(
    "prompts, new, words",
    [
        ([[1, 521]], 4, "prompt 0.*0 to 520.*521"),
        ([[1], [-1]], 4, "prompt 1.*-1"),
        ([[]], 4, "found none"),
        ([[1]], 16, "max_new_tokens.*15"),
    ],
)
def test_bad_prompts(tutorial, small, prompts, new, words):
    with pytest.raises(ValueError, match=words):
        trainkit.generate.generate_tokens(tutorial.create_model(small()), prompts, new)


def test_bad_folders_name_the_tensor(tutorial, small, peer, tmp_path):
    _, folder = peer(ODD)
    tensors = load_file(folder / "model.safetensors")
    name = "transformer.h.1.mlp.c_fc.weight"
    save_file(
        tensors | {name: tensors[name][:, :-1].copy()}, folder / "model.safetensors"
    )
    with pytest.raises(
        ValueError, match=r"h.1.mlp.c_fc.weight.*\(80, 319\).*\(80, 320\)"
    ):
        ours(tutorial, small, folder)
    del tensors[name]
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ValueError, match="no tensor h.1.mlp.c_fc.weight"):
        ours(tutorial, small, folder)


@pytest.mark.parametrize(
    "setting, value",
    [
        ("activation_function", "relu"),
        ("scale_attn_by_inverse_layer_idx", True),
        ("scale_attn_weights", False),
        ("tie_word_embeddings", False),
        ("vocab_size", 50_258),  # so that the last token isn't the end of a text
    ],
)
def test_other_kinds_of_gpt2_are_refused(tutorial, tmp_path, setting, value):
    transformers.GPT2Config(**{setting: value}).save_pretrained(tmp_path)
    named = "eos_token_id 50256" if setting == "vocab_size" else f"{setting} {value!r}"
    with pytest.raises(ValueError, match=f"init_from.*{named}, expected"):
        trainkit.pretrained.shape(str(tmp_path))


def test_other_kinds_of_model_are_refused(tutorial, tmp_path):
    transformers.BertConfig().save_pretrained(tmp_path / "bert")
    with pytest.raises(ValueError, match="init_from.*model_type 'bert'"):
        trainkit.pretrained.shape(str(tmp_path / "bert"))


def test_folder_that_is_not_there(tutorial):
    with pytest.raises(
        FileNotFoundError, match="init_from: .* /none/gpt2 on this node"
    ):
        trainkit.pretrained.shape("/none/gpt2")


def test_finetune_file_takes_its_shape_from_the_weights(tutorial, peer):
    _, folder = peer(ODD)
    config = trainkit.config.load_config(
        ROOT / "configs/gpt2-finetune.yaml", init_from=os.path.relpath(folder)
    )
    shape = {key: getattr(config, key) for key in ODD}
    assert shape == ODD and config.dropout == 0.1
    assert config.init_from == str(folder)  # wherever the workers run
    with pytest.raises(ValueError, match="finetune.yaml: .*'block_size': 33"):
        trainkit.config.load_config(
            ROOT / "configs/gpt2-finetune.yaml", init_from=str(folder), block_size=16
        )


def test_hub_files_without_prefix_and_with_buffers(tutorial, small, peer):
    """The hub's own gpt2 has no `transformer.` prefix and carries attention masks."""
    theirs, folder = peer(ODD)
    tensors = load_file(folder / "model.safetensors")
    hub = {name.removeprefix("transformer."): value for name, value in tensors.items()}
    hub["h.0.attn.bias"] = np.ones((1, 1, 33, 33), np.float32)
    save_file(hub, folder / "model.safetensors")
    model = ours(tutorial, small, folder)
    expected = theirs.transformer.wpe.weight.detach().numpy()
    np.testing.assert_array_equal(model.wpe.embedding[...], expected)
