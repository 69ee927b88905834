"""Attention kernels and scanned blocks."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.experimental.pallas import tpu as pltpu

import trainkit.config
import trainkit.devices
import trainkit.layers


def test_splash_attention_equals_the_plain_one():
    """The TPU kernel, interpreted: the same results and gradients, over several blocks."""
    shape = (1, 2 * trainkit.config.SPLASH_BLOCK, 2, 64)  # B, T, H, D/H
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


def test_scanned_layers_drop_out_as_the_key_says(tutorial, small):
    config = small(dropout=0.5, scan_layers=True)
    model = tutorial.create_model(config)
    x = jax.random.normal(jax.random.key(0), (1, config.block_size, config.n_embd))
    keys = nnx.Rngs(dropout=0), nnx.Rngs(dropout=0), nnx.Rngs(dropout=1)
    first, again, other = (trainkit.layers.scan_blocks(model.h, x, key) for key in keys)
    np.testing.assert_array_equal(first, again)
    assert not np.allclose(first, other)


def test_a_cache_gives_what_the_whole_window_gives():
    """Token by token, though the cache has room for more."""
    q, k, v = jax.random.normal(jax.random.key(0), (3, 2, 5, 3, 8))  # B, T, H, D/H
    expected = trainkit.layers.attend("xla", q, k, v)
    room = jnp.zeros((2, 9, 3, 8))
    cache = {"key": room, "value": room}
    for t in range(5):
        cache["position"] = jnp.int32(t)
        token = (x[:, t : t + 1] for x in (q, k, v))
        found = trainkit.layers.attend_to_cache(*token, cache)
        np.testing.assert_allclose(found[:, 0], expected[:, t], atol=1e-6)
    assert not cache["key"][:, 5:].any()


def test_a_scan_computes_what_the_blocks_compute_one_by_one(tutorial, small):
    config = small(n_layer=3)
    blocks = tutorial.create_model(config).h
    x = jax.random.normal(jax.random.key(0), (2, config.block_size, config.n_embd))
    one_by_one = trainkit.layers.run_blocks(blocks, x, None)
    scanned = trainkit.layers.scan_blocks(blocks, x, None)
    np.testing.assert_allclose(scanned, one_by_one, atol=1e-6)
    assert not np.allclose(trainkit.layers.run_blocks(blocks[:2], x, None), scanned)
