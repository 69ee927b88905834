"""GPT-2 as published: size, initialization, precision."""

from functools import partial

import jax
import numpy as np
import pytest

from trainkit.config import TrainingConfig


def test_initialization(tutorial, small):
    """Of the published number of parameters, by the seed."""
    shapes = jax.eval_shape(partial(tutorial.create_model, TrainingConfig()))
    found = sum(x.size for x in jax.tree.leaves(shapes))
    assert found == 124_439_808 + 47 * 768  # rows of padding
    sizes = {"n_layer": 4, "n_embd": 192, "n_head": 3, "block_size": 256}
    config = TrainingConfig(**sizes, vocab_size=1000)
    for name, x in tutorial.named(tutorial.create_model(config)).items():
        value = np.asarray(x)
        if name.endswith("bias"):
            assert not value.any(), name
        elif name.endswith("scale"):
            assert (value == 1).all(), name
        else:
            expected = 0.02 / 8**0.5 if "c_proj" in name else 0.02
            assert value.std() == pytest.approx(expected, rel=0.03), name
    tables = [tutorial.create_model(small(seed=s)).wte.embedding[...] for s in (5, 6)]
    assert (tables[0] != tables[1]).any()


def test_rows_that_pad_the_table_have_no_logits(tutorial, small):
    """Their tokens would be drawn, and stand for no text."""
    model = tutorial.create_model(small())
    assert len(model.wte.embedding[...]) == 640
    assert model(np.zeros((1, 16), np.int32)).shape == (1, 16, 521)


def test_bfloat16_sums_in_float32(tutorial, small):
    """The loss, and the gradient of a frequent token, a sum over 4,000 places. XLA for CPUs
    would compute in float32 whatever is asked.
    """
    asked = {"xla_allow_excess_precision": False}
    windows = np.random.default_rng(0).integers(0, 521, (500, 17))
    windows[:, 1::2] = 7  # half of all inputs

    def loss_and_gradient(compute_dtype):
        config = small(compute_dtype=compute_dtype)
        both = jax.value_and_grad(tutorial.loss_fn)
        both = jax.jit(both, static_argnames="config", compiler_options=asked)
        loss, gradient = both(tutorial.create_model(config), windows, config)
        return float(loss), np.asarray(gradient.wte.embedding[7])

    (exact_loss, exact), (loss, found) = map(loss_and_gradient, ("float32", "bfloat16"))
    assert loss == pytest.approx(exact_loss, abs=2e-3)
    assert np.linalg.norm(found - exact) < 0.02 * np.linalg.norm(exact)
