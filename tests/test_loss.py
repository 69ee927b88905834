"""The loss of the model: its value and its gradients."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from samples import loss_of, random_tokens, windows_for


class Oracle(nnx.Module):
    """Always predicts its input plus one."""

    def __init__(self, config):
        self.size = config.vocab_size
        self.wte = nnx.Embed(self.size, self.size, rngs=nnx.Rngs(0))
        self.wte.embedding[...] = 100 * jnp.eye(self.size)

    def features(self, tokens, rngs=None):
        return jax.nn.one_hot((tokens + 1) % self.size, self.size)


def test_targets_are_inputs_shifted_by_one(tutorial, small, monkeypatch):
    config = small()
    monkeypatch.setattr(tutorial, "create_model", Oracle)
    counting = (np.arange(17)[None] % config.vocab_size).astype(np.uint16)
    assert loss_of(tutorial, Oracle(config), counting, config) < 1e-3
    assert loss_of(tutorial, Oracle(config), counting[:, ::-1], config) > 50


def test_bfloat16_loss_is_summed_in_float32(tutorial, small):
    """Changes far below bfloat16's resolution, 2^-6 near 6.26, still show."""
    config = small(compute_dtype="bfloat16")
    batches = [random_tokens(config, (4, 17), seed) for seed in range(16)]
    model = tutorial.create_model(config)
    losses = [loss_of(tutorial, model, batch) for batch in batches]
    assert len(set(losses)) == 16
    assert any(loss != float(jnp.bfloat16(loss)) for loss in losses)
    exact = tutorial.create_model(dataclasses.replace(config, compute_dtype="float32"))
    assert losses[0] == pytest.approx(loss_of(tutorial, exact, batches[0]), abs=0.02)
    assert losses[0] == pytest.approx(math.log(config.vocab_size), abs=0.1)  # a guess


@pytest.mark.parametrize("loss_chunks", [1, 2, 8])
def test_gradients_of_the_loss_are_those_that_jax_finds(tutorial, small, loss_chunks):
    """They are written down; `jax.grad` of all logits at once is the oracle."""
    config = small(dropout=0.1, loss_chunks=loss_chunks)
    (windows,) = windows_for(config, 1).astype(np.int32)

    def ours(params):  # not the loss itself
        return 3 * tutorial.loss_fn(params, windows, jax.random.key(1), config)

    def plain(model):
        logits = model(windows[:, :-1], rngs=nnx.Rngs(dropout=1))
        scores = jax.nn.log_softmax(logits)
        picked = jnp.take_along_axis(scores, windows[:, 1:, None], axis=-1)
        return -3 * picked.mean()

    model = tutorial.create_model(config)
    params = nnx.state(model, nnx.Param)
    loss, gradients = jax.jit(jax.value_and_grad(ours))(params)
    expected_loss, expected = nnx.jit(nnx.value_and_grad(plain))(model)
    assert float(loss) == pytest.approx(float(expected_loss), rel=1e-6)
    leaves = jax.tree.leaves(gradients), jax.tree.leaves(expected)
    for found, wanted in zip(*leaves, strict=True):
        # A bias of keys changes no attention: its gradient is 0, or rounding.
        atol = 1e-5 * np.abs(wanted).max() + 1e-9
        np.testing.assert_allclose(found, wanted, rtol=0, atol=atol)
