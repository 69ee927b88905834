"""GPT-2 as published: size, initialization, causality, precision."""

import dataclasses
import math
from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.experimental.pallas import tpu as pltpu

import trainkit.checks
import trainkit.config
import trainkit.devices
import trainkit.layers


def random_tokens(config, shape, seed=0):
    return np.random.default_rng(seed).integers(0, config.vocab_size, shape)


@pytest.mark.parametrize(
    "layers, heads, width, parameters",
    [
        (12, 12, 768, 124_439_808),
        (48, 25, 1600, 1_557_611_200),
    ],
)
def test_parameter_counts_of_the_published_models(
    tutorial, layers, heads, width, parameters
):
    shape = {"n_layer": layers, "n_head": heads, "n_embd": width}
    assert tutorial.count_parameters(trainkit.config.ModelConfig(**shape)) == parameters


def test_initialization(tutorial):
    config = trainkit.config.ModelConfig(
        n_layer=8, n_embd=192, n_head=3, block_size=256
    )
    params = nnx.state(tutorial.create_model(config), nnx.Param)
    residual = 0.02 / math.sqrt(2 * config.n_layer)
    for path, param in nnx.to_flat_state(params):
        value, name = np.asarray(param[...]), ".".join(map(str, path))
        assert value.dtype == np.float32
        if name.endswith("bias"):
            assert not value.any(), name
        elif name.endswith("scale"):
            assert (value == 1).all(), name
        else:
            expected = residual if "c_proj" in name else 0.02
            assert value.std() == pytest.approx(expected, rel=0.03), name
            assert abs(value.mean()) < expected / 20, name


def test_logits_have_shape_dtype_and_no_padding(tutorial, small):
    config = small(compute_dtype="bfloat16")
    model = tutorial.create_model(config)
    logits = model(random_tokens(config, (3, 16)))
    assert logits.shape == (3, 16, config.padded_vocab_size)
    assert logits.dtype == jnp.bfloat16
    assert np.isneginf(logits[..., config.vocab_size :].astype(np.float32)).all()
    assert np.isfinite(logits[..., : config.vocab_size].astype(np.float32)).all()


def test_a_later_token_never_changes_an_earlier_logit(tutorial, small):
    config = small()
    model = nnx.jit(tutorial.create_model(config))
    tokens = random_tokens(config, (1, 16))
    logits = np.asarray(model(tokens))
    for place in range(1, 16):
        changed = tokens.copy()
        changed[0, place] = (changed[0, place] + 1) % config.vocab_size
        now = np.asarray(model(changed))
        np.testing.assert_array_equal(now[0, :place], logits[0, :place])
        assert (now[0, place] != logits[0, place]).any()


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
    losses = {
        float(tutorial.loss_fn(model, random_tokens(config, (4, 17), seed)))
        for seed in range(16)
    }
    assert len(losses) == 16
    assert any(loss != float(jnp.bfloat16(loss)) for loss in losses)
    exact = tutorial.create_model(dataclasses.replace(config, compute_dtype="float32"))
    windows = random_tokens(config, (4, 17))
    difference = tutorial.loss_fn(model, windows) - tutorial.loss_fn(exact, windows)
    assert abs(float(difference)) < 0.02


def test_dropout_is_on_only_with_a_stream(tutorial, small):
    config = small(dropout=0.5)
    model, tokens = tutorial.create_model(config), random_tokens(config, (1, 16))
    drop = partial(model, tokens)
    assert (drop() == drop()).all()
    streams = [nnx.Rngs(dropout=jax.random.key(i)) for i in range(2)]
    assert (drop(rngs=streams[0]) != drop(rngs=streams[1])).any()


def test_splash_attention_equals_the_plain_one(tutorial):
    """The TPU kernel, interpreted: the same results and gradients, over several blocks."""
    shape = (1, 2 * trainkit.checks.SPLASH_BLOCK, 2, 64)  # B, T, H, D/H
    q, k, v, weight = jax.random.normal(jax.random.key(0), (4, *shape))

    def run(kind):
        def total(q, k, v):
            y = trainkit.layers.attend(kind, q, k, v)
            return (y * weight).sum(), y

        gradient = jax.value_and_grad(total, argnums=(0, 1, 2), has_aux=True)
        (_, y), gradients = jax.jit(gradient)(q, k, v)
        return y, *gradients

    config = trainkit.config.TrainingConfig(platform="cpu")
    with (
        jax.set_mesh(trainkit.devices.make_mesh(config)),
        pltpu.force_tpu_interpret_mode(),
    ):
        for plain, fast in zip(run("xla"), run("splash")):
            np.testing.assert_allclose(fast, plain, atol=1e-4)
