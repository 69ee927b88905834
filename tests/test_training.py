"""The optimizer and the train step, against PyTorch and against themselves."""

import dataclasses
import gzip
import json
import re
import struct
import time
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from tensorboardX.proto import event_pb2

import trainkit.config
import trainkit.huggingface
import trainkit.layers
import trainkit.run_log
import trainkit.weights


def windows_for(config, steps, seed=1):
    rng = np.random.default_rng(seed)
    shape = (steps, config.batch_size, config.block_size + 1)
    walk = np.cumsum(rng.choice([1, 2, 3], size=shape, p=[0.8, 0.1, 0.1]), axis=-1)
    return (walk % config.vocab_size).astype(np.uint16)


def run(tutorial, config, batches):
    state, losses = tutorial.create_state(config), []
    for windows in batches:
        state, metrics = tutorial.train_step(state, windows, config)
        losses.append(float(metrics["loss"]))
    return state, losses


def test_learning_rate_is_nanogpts(tutorial, small):
    config = small(warmup_steps=10, decay_steps=50)

    def nanogpt(step):
        if step < config.warmup_steps:
            return config.learning_rate * (step + 1) / (config.warmup_steps + 1)
        if step > config.decay_steps:
            return config.min_learning_rate
        done = (step - config.warmup_steps) / (config.decay_steps - config.warmup_steps)
        span = config.learning_rate - config.min_learning_rate
        return config.min_learning_rate + 0.5 * (1 + np.cos(np.pi * done)) * span

    schedule = tutorial.learning_rate_schedule(config)
    for step in range(70):
        assert float(schedule(step)) == pytest.approx(nanogpt(step), rel=1e-5), step


def test_twenty_steps_equal_pytorch(tutorial, small):
    """Same weights, same batches; AdamW with nanoGPT's groups, clipping, and schedule."""
    config = small(weight_decay=0.1, grad_clip=0.5)
    state = tutorial.create_state(config)
    peer = torch_model(tutorial, config, state.params)
    decay = [p for p in peer.parameters() if p.dim() >= 2]
    rest = [p for p in peer.parameters() if p.dim() < 2]
    optimizer = torch.optim.AdamW(
        [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}],
        betas=(config.beta1, config.beta2),
    )
    schedule = tutorial.learning_rate_schedule(config)
    for step, windows in enumerate(windows_for(config, 20)):
        state, metrics = tutorial.train_step(state, windows, config)
        tokens = torch.tensor(windows.astype(np.int64))
        logits = peer(tokens[:, :-1]).logits
        loss = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), tokens[:, 1:].flatten()
        )
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(peer.parameters(), config.grad_clip)
        for group in optimizer.param_groups:
            group["lr"] = float(schedule(step))
        optimizer.step()
        assert float(metrics["loss"]) == pytest.approx(loss.item(), abs=1e-3), step
        assert float(metrics["grad_norm"]) == pytest.approx(norm.item(), rel=1e-2), step
    assert loss.item() < 5.5  # from 6.26: the comparison covered real learning


def torch_model(tutorial, config, params):
    """A transformers.GPT2LMHeadModel with the same weights."""
    import transformers

    model = transformers.GPT2LMHeadModel(trainkit.huggingface.their_config(config))
    tensors = {
        k: torch.tensor(v) for k, v in trainkit.weights.tensors(config, params).items()
    }
    missing, unexpected = model.load_state_dict(tensors, strict=False)
    assert missing == ["lm_head.weight"] and not unexpected  # tied to wte
    model.tie_weights()
    return model.eval()


@pytest.mark.parametrize("k", [2, 4])
def test_accumulation_equals_the_large_batch(tutorial, small, k):
    batches = windows_for(small(batch_size=8), 5)
    whole, losses = run(tutorial, small(batch_size=8), batches)
    parts, part_losses = run(
        tutorial, small(batch_size=8, gradient_accumulation_steps=k), batches
    )
    np.testing.assert_allclose(losses, part_losses, atol=1e-5)
    for a, b in zip(jax.tree.leaves(whole.params), jax.tree.leaves(parts.params)):
        np.testing.assert_allclose(a, b, atol=1e-4)


def test_accumulation_costs_one_buffer(tutorial, small):
    """From 2 to 8 micro-batches, temporary memory doesn't grow."""

    def temporary(k):
        config = small(batch_size=32, gradient_accumulation_steps=k)
        state = jax.eval_shape(lambda: tutorial.create_state(config))
        windows = jax.ShapeDtypeStruct((32, config.block_size + 1), np.uint16)
        compiled = tutorial.train_step.lower(state, windows, config).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    assert temporary(8) <= temporary(2)


def test_padding_is_never_trained(tutorial, small):
    config = small()
    before = tutorial.create_state(config).params["wte"]["embedding"][...]
    state, _ = run(tutorial, config, windows_for(config, 5))
    after = np.asarray(state.params["wte"]["embedding"][...])[config.vocab_size :]
    padding = np.asarray(before)[config.vocab_size :]
    assert (
        padding.size
        and not state.opt_state[1][0]
        .mu["wte"]["embedding"][...][config.vocab_size :]
        .any()
    )
    # Only weight decay touches it: no gradient ever does.
    assert np.abs(after).max() <= np.abs(padding).max()


def test_step_is_deterministic_and_depends_on_the_step_number(tutorial, small):
    config = small(dropout=0.3)
    batches = windows_for(config, 4)
    first, second = (run(tutorial, config, batches) for _ in range(2))
    assert first[1] == second[1]
    same = np.broadcast_to(batches[0], batches.shape)
    _, losses = run(tutorial, config, same)
    other = run(tutorial, dataclasses.replace(config, seed=1), same)[1]
    assert len({*losses, *other}) == 8


def test_one_compilation(tutorial, small):
    config = small()
    tutorial.train_step.clear_cache()
    run(tutorial, config, windows_for(config, 5))
    assert tutorial.train_step._cache_size() == 1


def test_evaluation_is_the_mean_without_dropout(tutorial, small):
    config = small(dropout=0.5, gradient_accumulation_steps=2)
    params = tutorial.create_state(config).params
    windows = windows_for(config, 1)[0]
    loss = tutorial.eval_step(params, windows, config)
    expected = tutorial.loss_fn(tutorial.assemble(config, params), windows)
    assert float(loss) == pytest.approx(float(expected), abs=1e-5)


def test_memorizes_one_batch(tutorial, small):
    config = small(learning_rate=1e-2, min_learning_rate=1e-2)
    windows = np.broadcast_to(windows_for(config, 1), (60, 4, 17))
    _, losses = run(tutorial, config, windows)
    assert losses[-1] < 0.5 < 6 < losses[0]


def test_log_line_has_speed_and_mfu(tutorial, small, monkeypatch):
    """On a device whose peak is known, by nanoGPT's formula."""
    gpt2 = trainkit.config.TrainingConfig()
    assert trainkit.run_log.flops_per_token(gpt2) == pytest.approx(855.2e6, rel=1e-3)
    monkeypatch.setitem(trainkit.run_log.PEAK_FLOPS, jax.devices()[0].device_kind, 1e12)
    config = small()
    config.run_path.mkdir(parents=True)
    log = trainkit.run_log.RunLog(config, 0)
    for step in (1, 2):
        log.add(step, {"loss": jax.numpy.float32(3), "grad_norm": jax.numpy.float32(1)})
    log.write()
    (line,) = map(
        json.loads, (config.run_path / "metrics.jsonl").read_text().splitlines()
    )
    assert (line["step"], line["tokens"], line["loss"]) == (2, 2 * 4 * 16, 3.0)
    flops = line["tokens_per_s"] * trainkit.run_log.flops_per_token(config)
    assert line["mfu"] == pytest.approx(flops / 1e12, rel=0.01)


def test_log_forgets_what_comes_after_the_checkpoint(tutorial, small):
    config = small()
    config.run_path.mkdir(parents=True)
    path = config.run_path / "metrics.jsonl"
    path.write_text(
        "".join(f'{{"step": {n}}}\n' for n in range(1, 6)) + '{"step": 6, "lo'
    )
    trainkit.run_log.RunLog(config, 3)
    assert path.read_text() == "".join(f'{{"step": {n}}}\n' for n in range(1, 4))


def events_of(folder) -> list:
    """TensorBoard's events, from files of length, checksum, event, checksum."""
    data, events = b"".join(f.read_bytes() for f in sorted(folder.iterdir())), []
    while data:
        (length,) = struct.unpack("<Q", data[:8])
        events.append(event_pb2.Event.FromString(data[12 : 12 + length]))
        data = data[16 + length :]
    return events


def test_log_is_there_for_tensorboard_too(tutorial, small):
    config = small()
    config.run_path.mkdir(parents=True)
    log = trainkit.run_log.RunLog(config, 0)
    log.add(1, {"loss": jax.numpy.float32(3), "grad_norm": jax.numpy.float32(1)})
    log.write()
    time.sleep(3)  # a thread writes the events
    values = {
        value.tag: value.simple_value
        for event in events_of(config.run_path / "tensorboard")
        for value in event.summary.value
        if event.step == 1
    }
    assert values["loss"] == 3 and values["grad_norm"] == 1
    assert values.keys() >= {"tokens", "tokens_per_s"}


def test_profile_of_chosen_steps(tutorial, small):
    config = small(profile_steps=[2, 4])
    config.run_path.mkdir(parents=True)
    state = tutorial.create_state(config)
    for step, windows in enumerate(windows_for(config, 5), 1):
        state, _ = tutorial.train_step(state, windows, config)
        trainkit.run_log.profile(config, step, state)
    trainkit.run_log.profile(config, 4, state)  # as in a run that restarted at step 3
    (trace,) = Path(config.run_path).rglob("perfetto_trace.json.gz")
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    calls = [e for e in events if e.get("name") == "PjitFunction(train_step)"]
    assert len(calls) in (
        2,
        4,
    )  # of 5 steps, the third and fourth; JAX shows a call twice


@pytest.mark.parametrize(
    "savings", [{"loss_chunks": 2}, {"loss_chunks": 8}, {"scan_layers": True}]
)
def test_saving_memory_changes_no_result(tutorial, small, savings):
    config = small(dropout=0.0 if "scan_layers" in savings else 0.1)
    saving = dataclasses.replace(config, **savings)
    windows = windows_for(config, 3)
    states, losses = zip(*(run(tutorial, c, windows) for c in (config, saving)))
    np.testing.assert_allclose(losses[1], losses[0], atol=1e-6)
    for a, b in zip(*(jax.tree.leaves(state.params) for state in states)):
        # Of steps of 0.01. AdamW magnifies how the sum of the chunks is rounded.
        np.testing.assert_allclose(
            a, b, atol=1e-5 if "scan_layers" in savings else 1e-4
        )


def test_a_frequent_token_learns_in_bfloat16_as_well(tutorial, small):
    """Its gradient is a sum over 4,000 places, which bfloat16 couldn't hold."""
    config = small(loss_chunks=2)
    rng = np.random.default_rng(0)
    windows = rng.integers(0, config.vocab_size, (500, 17)).astype(np.int32)
    windows[:, 1::2] = 7  # half of all inputs

    def gradient(compute_dtype):
        half = dataclasses.replace(config, compute_dtype=compute_dtype)
        model = tutorial.create_model(half, seed=3)
        gradients = nnx.grad(tutorial.loss_fn)(model, windows)
        return np.asarray(gradients["wte"]["embedding"][...])[7]

    exact, found = gradient("float32"), gradient("bfloat16")
    assert np.linalg.norm(found - exact) < 0.02 * np.linalg.norm(exact)


@pytest.mark.parametrize("loss_chunks", [1, 2, 8])
def test_gradients_of_the_loss_are_those_that_jax_finds(tutorial, small, loss_chunks):
    """The notebook writes them down; `jax.grad` of all logits at once is the oracle."""
    config = small(dropout=0.1, loss_chunks=loss_chunks)
    (windows,) = windows_for(config, 1).astype(np.int32)

    def ours(model):
        rngs = nnx.Rngs(dropout=1)
        return 3 * tutorial.loss_fn(model, windows, rngs)  # not the loss itself

    def plain(model):
        logits = model(windows[:, :-1], rngs=nnx.Rngs(dropout=1))
        scores = jax.nn.log_softmax(logits)
        picked = jnp.take_along_axis(scores, windows[:, 1:, None], axis=-1)
        return -3 * picked.mean()

    model = tutorial.create_model(config)
    loss, gradients = nnx.value_and_grad(ours)(model)
    expected_loss, expected = nnx.value_and_grad(plain)(model)
    assert float(loss) == pytest.approx(float(expected_loss), rel=1e-6)
    leaves = jax.tree.leaves(gradients), jax.tree.leaves(expected)
    for found, wanted in zip(*leaves, strict=True):
        largest = np.abs(wanted).max()
        np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-5 * largest)


def test_scanned_layers_drop_out_as_the_key_says(tutorial, small):
    config = small(dropout=0.5, scan_layers=True)
    model = tutorial.create_model(config)
    x = jax.random.normal(jax.random.key(0), (1, config.block_size, config.n_embd))
    keys = nnx.Rngs(dropout=0), nnx.Rngs(dropout=0), nnx.Rngs(dropout=1)
    first, again, other = (trainkit.layers.scan_blocks(model.h, x, key) for key in keys)
    np.testing.assert_array_equal(first, again)
    assert not np.allclose(first, other)


def logits_that_exist(tutorial, config) -> int:
    """The largest number of float32 logits in one array of the compiled step."""
    state = jax.eval_shape(partial(tutorial.create_state, config))
    shape = (config.batch_size, config.block_size + 1)
    windows = jax.ShapeDtypeStruct(shape, np.uint16)
    text = tutorial.train_step.lower(state, windows, config).compile().as_text()
    shapes = re.findall(rf"f32\[([\d,]*\b{config.padded_vocab_size})\]", text)
    return max(np.prod([int(n) for n in shape.split(",")]) for shape in shapes)


def test_chunks_keep_the_logits_of_the_batch_from_existing(tutorial, small):
    config = small(batch_size=8, block_size=64)
    chunked = dataclasses.replace(config, loss_chunks=4)
    tokens = config.batch_size * config.block_size
    assert logits_that_exist(tutorial, config) == tokens * config.padded_vocab_size
    assert logits_that_exist(tutorial, chunked) * 4 <= tokens * config.padded_vocab_size
