"""Steps 4 and 5: the optimizer and the train step, against PyTorch and against themselves."""

import jax
import llamas
import numpy as np
import optax
import pytest
import tiktoken
import torch
import transformers
from safetensors.numpy import load_file
from samples import run_from_guide, windows_for

import trainkit.huggingface


def test_windows_of_a_stream(tutorial, small):
    """Each begins with the last token of the one before; what is left over isn't used."""
    texts = np.array(["Some text of several tokens", "", "more text"])
    run_from_guide("def cut_windows(", vars(tutorial))
    rows = tutorial.cut_windows({"text": texts}, small(block_size=4))
    encode = tiktoken.get_encoding("gpt2").encode_ordinary
    ids = sum(([*encode(text), 50_256] for text in texts), [])
    assert rows["tokens"].tolist() == [ids[:5], ids[4:9]]


def test_learning_rate_is_nanogpts(tutorial, small):
    config = small(learning_rate=1.0, warmup_steps=10, decay_steps=50)

    def nanogpt(step):
        if step < 10:
            return (step + 1) / 11
        if step > 50:
            return 0.1
        return 0.1 + 0.45 * (1 + np.cos(np.pi * (step - 10) / 40))

    schedule = tutorial.learning_rate_schedule(config)
    for step in range(70):
        assert float(schedule(step)) == pytest.approx(nanogpt(step), rel=1e-5), step


def test_the_rate_is_that_of_the_optimizer(tutorial, small, monkeypatch):
    """Which may count other steps than the loop, follow another schedule, or keep none."""
    config = small(n_layer=1, warmup_steps=10)
    schedule = tutorial.learning_rate_schedule(config)
    several = optax.MultiSteps(tutorial.create_optimizer(config), 2)
    other = optax.inject_hyperparams(lambda learning_rate: optax.sgd(learning_rate))
    for optimizer, expected in (
        (
            tutorial.create_optimizer(config),
            [float(schedule(step)) for step in range(3)],
        ),
        # Its second call makes the first update.
        (several.gradient_transformation(), [float(schedule(0))] * 3),
        (other(lambda count: 0.5**count), [1, 0.5, 0.25]),
        (optax.adamw(schedule), [None] * 3),
        (optax.chain(other(schedule), other(schedule)), [None] * 3),
    ):
        jax.clear_caches()
        monkeypatch.setattr(tutorial, "create_optimizer", lambda c, o=optimizer: o)
        state, rates = tutorial.create_state(config), []
        for windows in windows_for(config, 3):
            state, metrics = tutorial.train_step(state, windows, config)
            rates.append(metrics.get("learning_rate"))
        assert rates == pytest.approx(expected)


@pytest.mark.parametrize("kind", ["gpt2", "qwen3, wide heads"])
def test_twenty_steps_equal_pytorch(tutorial, llama, small, tmp_path, kind):
    """Same weights, same batches; evaluation, AdamW with its groups, clipping, schedule."""
    tutorial = llama if kind in llamas.SHAPES else tutorial
    shape = llamas.SHAPES.get(kind, {}) | {"vocab_size": 521, "block_size": 16}
    config = small(**shape, weight_decay=1.0, grad_clip=0.5, device_batch_size=2)
    state = tutorial.create_state(config)
    before = trainkit.huggingface.export(state.model, tmp_path / "before")
    peer = transformers.AutoModelForCausalLM.from_pretrained(before).eval()
    decay = [p for p in peer.parameters() if p.dim() >= 2]
    rest = [p for p in peer.parameters() if p.dim() < 2]
    optimizer = torch.optim.AdamW(
        [{"params": decay, "weight_decay": 1.0}, {"params": rest, "weight_decay": 0.0}],
        betas=(config.beta1, config.beta2),
    )
    for step, windows in enumerate(windows_for(config, 20)):
        evaluated = tutorial.eval_step(state.model, windows, config)
        state, metrics = tutorial.train_step(state, windows, config)
        tokens = torch.tensor(windows.astype(np.int64))
        logits = peer(tokens[:, :-1]).logits.mT
        loss = torch.nn.functional.cross_entropy(logits, tokens[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(peer.parameters(), config.grad_clip)
        for group in optimizer.param_groups:
            group["lr"] = float(metrics["learning_rate"])
        optimizer.step()
        for found in evaluated, metrics["loss"]:
            assert float(found) == pytest.approx(loss.item(), abs=1e-4), step
        assert float(metrics["grad_norm"]) == pytest.approx(norm.item(), rel=1e-3), step
    assert loss.item() < 5.5  # from 6.26: the comparison covered real learning
    after = trainkit.huggingface.export(state.model, tmp_path / "after")
    theirs = dict(peer.named_parameters())
    for name, array in load_file(after / "model.safetensors").items():
        difference = np.linalg.norm(array - theirs[name].detach().numpy())
        # 0.0015 at most when measured; 0.1 when biases were decayed, too.
        assert difference < 0.01 * np.linalg.norm(array), name


def test_accumulation_costs_one_buffer(tutorial, small):
    """From 2 to 8 micro-batches of one size, no further gradients are kept."""

    def temporary(k):
        config = small(batch_size=4 * k, device_batch_size=4)
        state = jax.eval_shape(lambda: tutorial.create_state(config))
        (windows,) = windows_for(config, 1)
        compiled = tutorial.train_step.lower(state, windows, config).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    model = jax.tree.leaves(tutorial.create_model(small()))
    assert temporary(8) - temporary(2) < sum(x.nbytes for x in model) / 10
