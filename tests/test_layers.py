"""Attention kernels and scanned blocks."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import PartitionSpec
from samples import equations

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

    with pltpu.force_tpu_interpret_mode():
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


def test_with_scan_there_is_one_loop_and_none_with_caches(tutorial, small):
    """A block that is scanned can't fill a cache, so to generate there is no loop."""
    config = small(n_layer=3)
    blocks = tutorial.create_model(config).h
    x = jax.random.normal(jax.random.key(0), (2, 1, config.n_embd))
    room = jnp.zeros((2, 4, config.n_head, config.n_embd // config.n_head))

    def loops(x, scan, cached):
        caches = [{"key": room, "value": room, "position": 0} for _ in blocks]
        options = {"caches": caches if cached else None, "scan": scan}
        return trainkit.layers.run_blocks(blocks, x, None, **options)

    for scan, cached, expected in ((1, 0, 1), (0, 0, 0), (1, 1, 0), (0, 1, 0)):
        jaxpr = jax.make_jaxpr(loops, static_argnums=(1, 2))(
            x, bool(scan), bool(cached)
        )
        names = [equation.primitive.name for equation in jaxpr.eqns]
        assert names.count("scan") == expected, (scan, cached)


def test_a_scanned_block_keeps_its_input_and_its_parameters(tutorial, small):
    """For the backward pass, which computes the rest again."""
    x = jax.random.normal(jax.random.key(0), (2, 16, 32))

    def kept(n_layer):
        blocks = tutorial.create_model(small(n_layer=n_layer)).h
        _, pull = jax.vjp(lambda x: trainkit.layers.scan_blocks(blocks, x, None), x)
        return sum(np.size(array) for array in jax.tree.leaves(pull))

    block = jax.tree.leaves(nnx.state(tutorial.create_model(small()).h[0]))
    expected = x.size + sum(parameter.size for parameter in block)
    assert (kept(5) - kept(2)) / 3 == pytest.approx(expected, rel=0.02)


def test_a_kernel_gets_its_devices_heads():
    """XLA can't divide a kernel's work; the plain attention it can."""
    config = trainkit.config.TrainingConfig(platform="cpu")
    mesh = trainkit.devices.make_mesh(config)
    q = jnp.zeros((1, trainkit.config.SPLASH_BLOCK, 2, 64))
    windows = PartitionSpec(("data", "fsdp"))

    def specs(kind, *manual):
        def attend(q):
            return trainkit.layers.attend(kind, q, q, q)

        attend = jax.shard_map(  # as in gradients.over_devices
            attend,
            in_specs=windows,
            out_specs=windows,
            axis_names={"data", "fsdp", *manual},
            check_vma=False,
        )
        with jax.set_mesh(mesh):
            maps = equations(jax.make_jaxpr(attend)(q).jaxpr, "shard_map")
        return [(set(each["newly_manual_axes"]), each["in_specs"][-1]) for each in maps]

    outer = ({"data", "fsdp"}, windows)
    heads = PartitionSpec(None, None, "tensor")
    assert specs("xla") == [outer]
    assert specs("splash") == [outer, ({"tensor"}, heads)]
    assert specs("splash", "tensor") == [({"data", "fsdp", "tensor"}, windows)]


def test_attention_is_pytorchs():
    """Of several heads, windows, and lengths."""
    q, k, v = jax.random.normal(jax.random.key(1), (3, 2, 7, 3, 5))  # B, T, H, D/H
    theirs = [torch.tensor(np.asarray(x)).transpose(1, 2) for x in (q, k, v)]
    expected = torch.nn.functional.scaled_dot_product_attention(*theirs, is_causal=True)
    found = trainkit.layers.attend("xla", q, k, v)
    np.testing.assert_allclose(found, expected.transpose(1, 2), atol=1e-6)


def test_attention_to_a_cache_is_worked_out_by_hand():
    """One head of size 4: scores q.k / 2 of the first two places of three."""
    key = jnp.array([[2.0, 0, 0, 0], [0, 0, 0, 0], [9, 9, 9, 9]])
    value = jnp.array([[1.0, 2, 3, 4], [0, 0, 0, 0], [99, 99, 99, 99]])
    cache = {"key": key.reshape(1, 3, 1, 4), "value": value.reshape(1, 3, 1, 4)}
    cache["position"] = jnp.int32(1)
    token = [jnp.reshape(jnp.array(x), (1, 1, 1, 4)) for x in (
        [1.0, 0, 0, 0], [4.0, 0, 0, 0], [5.0, 6, 7, 8]
    )]  # fmt: skip
    found = trainkit.layers.attend_to_cache(*token, cache)
    first, second = math.exp(1) / (math.exp(1) + math.exp(2)), 1 / (1 + math.exp(-1))
    expected = [first * a + second * b for a, b in zip((1, 2, 3, 4), (5, 6, 7, 8))]
    np.testing.assert_allclose(found.ravel(), expected, rtol=1e-6)
    assert cache["key"][0, :, 0, 0].tolist() == [2, 4, 9]
    assert cache["value"][0, :, 0, 0].tolist() == [1, 5, 99]


class Draw(nnx.Module):
    """A block that adds a number, if it is given a stream."""

    def __init__(self, scale):
        self.scale = nnx.Param(jnp.float32(scale))

    def __call__(self, x, rngs=None, cache=None):
        drawn = jax.random.uniform(rngs.dropout(), x.shape) if rngs else 0
        return self.scale[...] * x + drawn


def test_a_scan_draws_for_each_block_and_place_anew():
    x = jnp.zeros((2, 3, 4))
    one = trainkit.layers.scan_blocks(nnx.List([Draw(1.0)]), x, nnx.Rngs(dropout=0))
    blocks = nnx.List([Draw(1.0), Draw(-1.0)])
    both = trainkit.layers.scan_blocks(blocks, x, nnx.Rngs(dropout=0))
    assert len(np.unique(one)) == one.size  # between 0 and 1, and all different
    assert len(np.unique(np.abs(both))) == both.size  # not two draws that cancel out
    assert not trainkit.layers.scan_blocks(blocks, x, None).any()
    seven = trainkit.layers.scan_blocks(nnx.List([Draw(3.0), Draw(2.0)]), x + 1, None)
    assert (seven == 6).all()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("chunks", [1, 3])
def test_loss_and_gradients_are_pytorchs(dtype, chunks):
    """Of nine rows, two of which pad the vocabulary; with a weight of -2."""
    rng = np.random.default_rng(3)
    table, features = rng.normal(size=(9, 4)), rng.normal(size=(2, 6, 4))
    targets = rng.integers(0, 7, (2, 6))
    theirs = [torch.tensor(x, requires_grad=True) for x in (table, features)]
    logits = theirs[1] @ theirs[0][:7].T
    expected = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), torch.tensor(targets).flatten()
    )
    (-2 * expected).backward()

    def loss(table, features):
        return -2 * trainkit.layers.cross_entropy(
            table, features.astype(dtype), targets, 7, chunks
        )

    found, gradients = jax.value_and_grad(loss, argnums=(0, 1))(
        jnp.float32(table), jnp.float32(features)
    )
    near = {"float32": 1e-5, "bfloat16": 0.02}[dtype]
    assert found.dtype == jnp.float32
    assert float(found) == pytest.approx(-2 * expected.item(), rel=near)
    for mine, other in zip(gradients, theirs):
        wanted = other.grad.numpy()
        np.testing.assert_allclose(mine, wanted, atol=near * np.abs(wanted).max())


def test_loss_is_in_one_part_unless_it_is_told():
    features, targets = jnp.ones((1, 5, 2)), np.zeros((1, 5), int)  # 5 is prime
    loss = trainkit.layers.cross_entropy(jnp.zeros((3, 2)), features, targets, 3)
    assert float(loss) == pytest.approx(math.log(3))


def test_scores_of_rows_that_pad_the_vocabulary():
    table, features = jnp.eye(3), jnp.array([[[2.0, 3.0, 4.0]]])
    scores = trainkit.layers.score_tokens(table, features, 2)
    assert scores.tolist() == [[[2.0, 3.0, -math.inf]]]
    assert trainkit.layers.score_tokens(table, features, 3)[0, 0, 2] == 4
