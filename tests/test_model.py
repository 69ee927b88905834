"""GPT-2 as published: size, initialization, causality, precision, loss."""

import dataclasses
import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from samples import random_tokens

from trainkit.config import TrainingConfig


def test_initialization(tutorial):
    """And how many parameters there are, as published."""
    shapes = jax.eval_shape(partial(tutorial.create_model, TrainingConfig()))
    padding = 47 * 768  # rows of the table, of 50,304
    assert sum(x.size for x in jax.tree.leaves(shapes)) - padding == 124_439_808
    small = {"n_layer": 4, "n_embd": 192, "n_head": 3, "block_size": 256}
    config = TrainingConfig(**small, vocab_size=1000)
    residual = 0.02 / math.sqrt(2 * config.n_layer)
    for name, x in tutorial.named(tutorial.create_model(config)).items():
        value = np.asarray(x)
        assert value.dtype == np.float32
        if name.endswith("bias"):
            assert not value.any(), name
        elif name.endswith("scale"):
            assert (value == 1).all(), name
        else:
            expected = residual if "c_proj" in name else 0.02
            assert value.std() == pytest.approx(expected, rel=0.03), name
            assert abs(value.mean()) < expected / 20, name


def test_weights_follow_the_seed(tutorial, small):
    configs = [small(n_layer=1, seed=seed) for seed in (5, 5, 6)]
    tables = [tutorial.create_model(config).wte.embedding[...] for config in configs]
    five, again, six = map(np.asarray, tables)
    found = tutorial.create_state(configs[0]).model.wte.embedding[...]
    assert (five == again).all() and (found == five).all() and (five != six).any()


def test_a_later_token_never_changes_an_earlier_logit(tutorial, small):
    config = small()
    model = partial(jax.jit(lambda model, x: model(x)), tutorial.create_model(config))
    tokens = random_tokens(config, (1, 16))
    logits = np.asarray(model(tokens))
    for place in range(1, 16):
        changed = tokens.copy()
        changed[0, place] = (changed[0, place] + 1) % config.vocab_size
        now = np.asarray(model(changed))
        np.testing.assert_array_equal(now[0, :place], logits[0, :place])
        assert (now[0, place] != logits[0, place]).any()


def test_bfloat16_sums_in_float32(tutorial, small):
    """The loss to far below bfloat16's resolution, 2^-6 near 6.26.

    And the gradient of a frequent token, a sum over 4,000 places, which bfloat16 couldn't hold.
    """
    config = small(loss_chunks=2)
    windows = random_tokens(config, (500, 17))
    windows[:, 1::2] = 7  # half of all inputs

    def loss_and_gradient(compute_dtype):
        half = dataclasses.replace(config, compute_dtype=compute_dtype)
        loss = partial(tutorial.loss_fn, windows=windows, config=half)
        found = jax.jit(jax.value_and_grad(loss))(tutorial.create_model(half))
        return float(found[0]), np.asarray(found[1].wte.embedding[...])[7]

    (exact_loss, exact), (loss, found) = map(loss_and_gradient, ("float32", "bfloat16"))
    assert loss != float(jnp.bfloat16(loss))
    assert loss == pytest.approx(exact_loss, abs=2e-3)
    assert loss == pytest.approx(math.log(config.vocab_size), abs=0.1)  # a guess
    assert np.linalg.norm(found - exact) < 0.02 * np.linalg.norm(exact)
