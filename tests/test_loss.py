"""Cross-entropy in parts: its value, its gradients, and the memory that it saves."""

import dataclasses
import math
import re
from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from samples import random_tokens, windows_for

import trainkit.layers


def test_targets_are_inputs_shifted_by_one(tutorial, small):
    """The loss of a model that always predicts its input plus one."""
    config = small()

    def next_token(tokens, rngs=None):
        return jax.nn.one_hot((tokens + 1) % config.vocab_size, config.vocab_size)

    wte = SimpleNamespace(embedding=100 * jnp.eye(config.vocab_size))
    oracle = SimpleNamespace(features=next_token, wte=wte, config=config)
    counting = (np.arange(17)[None] % config.vocab_size).astype(np.uint16)
    assert float(tutorial.loss_fn(oracle, counting)) < 1e-3
    assert float(tutorial.loss_fn(oracle, counting[:, ::-1])) > 50


def test_first_loss_is_a_guess(tutorial, small):
    config = small()
    windows = random_tokens(config, (8, 17)).astype(np.uint16)
    loss = tutorial.loss_fn(tutorial.create_model(config), windows)
    assert loss.dtype == jnp.float32
    assert float(loss) == pytest.approx(math.log(config.vocab_size), abs=0.1)


def test_bfloat16_loss_is_summed_in_float32(tutorial, small):
    """Changes far below bfloat16's resolution, 2^-6 near 6.26, still show."""
    config = small(compute_dtype="bfloat16")
    model = tutorial.create_model(config)
    loss_fn = nnx.jit(tutorial.loss_fn)
    losses = {
        float(loss_fn(model, random_tokens(config, (4, 17), seed)))
        for seed in range(16)
    }
    assert len(losses) == 16
    assert any(loss != float(jnp.bfloat16(loss)) for loss in losses)
    exact = tutorial.create_model(dataclasses.replace(config, compute_dtype="float32"))
    windows = random_tokens(config, (4, 17))
    difference = loss_fn(model, windows) - loss_fn(exact, windows)
    assert abs(float(difference)) < 0.02


@pytest.mark.parametrize("loss_chunks", [1, 2, 8])
def test_gradients_of_the_loss_are_those_that_jax_finds(tutorial, small, loss_chunks):
    """They are written down; `jax.grad` of all logits at once is the oracle."""
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
    loss, gradients = nnx.jit(nnx.value_and_grad(ours))(model)
    expected_loss, expected = nnx.jit(nnx.value_and_grad(plain))(model)
    assert float(loss) == pytest.approx(float(expected_loss), rel=1e-6)
    leaves = jax.tree.leaves(gradients), jax.tree.leaves(expected)
    for found, wanted in zip(*leaves, strict=True):
        # A bias of keys changes no attention: its gradient is 0, or rounding.
        atol = 1e-5 * np.abs(wanted).max() + 1e-9
        np.testing.assert_allclose(found, wanted, rtol=0, atol=atol)


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


@pytest.mark.parametrize("chunks", [1, 2, 4])
def test_parts_add_up_to_the_whole(chunks):
    """For any table and features; rows beyond the vocabulary take no part."""
    table, features, _ = jnp.split(
        jax.random.normal(jax.random.key(0), (36, 6)), [7, 31]
    )
    features = features.reshape(3, 8, 6)
    targets = np.random.default_rng(0).integers(0, 5, (3, 8))
    value_and_grad = jax.value_and_grad(trainkit.layers.cross_entropy, argnums=(0, 1))
    found, (d_table, d_features) = value_and_grad(table, features, targets, 5, chunks)

    def plain(table, features):
        scores = jax.nn.log_softmax(features @ table[:5].T)
        return -jnp.take_along_axis(scores, targets[..., None], axis=-1).mean()

    expected, wanted = jax.value_and_grad(plain, argnums=(0, 1))(table, features)
    assert float(found) == pytest.approx(float(expected), rel=1e-6)
    np.testing.assert_allclose(d_table, wanted[0], atol=1e-6)
    np.testing.assert_allclose(d_features, wanted[1], atol=1e-6)
    assert not d_table[5:].any()
    scores = trainkit.layers.score_tokens(table, features, 5)
    assert np.isneginf(scores[..., 5:]).all() and np.isfinite(scores[..., :5]).all()
