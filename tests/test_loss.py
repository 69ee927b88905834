"""The loss of the model: its value and its gradients."""

import dataclasses
import math
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from samples import random_tokens, windows_for


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


def test_bfloat16_loss_is_summed_in_float32(tutorial, small):
    """Changes far below bfloat16's resolution, 2^-6 near 6.26, still show."""
    config = small(compute_dtype="bfloat16")
    loss_fn = nnx.jit(tutorial.loss_fn)
    batches = [random_tokens(config, (4, 17), seed) for seed in range(16)]
    model = tutorial.create_model(config)
    losses = [float(loss_fn(model, batch)) for batch in batches]
    assert len(set(losses)) == 16
    assert any(loss != float(jnp.bfloat16(loss)) for loss in losses)
    exact = tutorial.create_model(dataclasses.replace(config, compute_dtype="float32"))
    assert losses[0] == pytest.approx(float(loss_fn(exact, batches[0])), abs=0.02)
    assert losses[0] == pytest.approx(math.log(config.vocab_size), abs=0.1)  # a guess


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
