"""Attention kernels, scanned blocks, and the loss in parts, for any arrays."""

import math
import re
from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import trainkit.sharding
from flax import nnx
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import PartitionSpec
from samples import equations

import trainkit.config
from trainkit.layers import attend, cross_entropy, run_blocks


def test_splash_attention_equals_the_plain_one():
    """The TPU kernel, interpreted: the same results and gradients, over several blocks."""
    shape = (1, 2 * trainkit.config.SPLASH_BLOCK, 1, 64)  # B, T, H, D/H
    q, k, v, weight = jax.random.normal(jax.random.key(0), (4, *shape))

    def run(kind):
        y, pull = jax.vjp(partial(attend, kind), q, k, v)
        return y, *pull(weight)

    with pltpu.force_tpu_interpret_mode():
        for plain, fast in zip(run("xla"), jax.jit(run, static_argnums=0)("splash")):
            np.testing.assert_allclose(fast, plain, atol=1e-4)


def test_a_kernel_gets_its_devices_heads():
    """XLA can't divide a kernel's work; the plain attention it can."""
    mesh = trainkit.sharding.make_mesh(trainkit.config.TrainingConfig(platform="cpu"))
    q = jnp.zeros((1, trainkit.config.SPLASH_BLOCK, 2, 64))
    windows = PartitionSpec(("data", "fsdp"))

    def specs(kind, *manual):
        inside = jax.shard_map(  # as in sharding.mean
            lambda q: attend(kind, q, q, q),
            in_specs=windows,
            out_specs=windows,
            axis_names={"data", "fsdp", *manual},
            check_vma=False,
        )
        with jax.set_mesh(mesh):
            maps = equations(jax.make_jaxpr(inside)(q).jaxpr, "shard_map")
        return [(set(each["newly_manual_axes"]), each["in_specs"][-1]) for each in maps]

    outer = ({"data", "fsdp"}, windows)
    heads = PartitionSpec(None, None, "tensor")
    assert specs("xla") == [outer]
    assert specs("splash") == [outer, ({"tensor"}, heads)]
    assert specs("splash", "tensor") == [({"data", "fsdp", "tensor"}, windows)]


def test_a_scanned_block_keeps_its_input_and_its_parameters(tutorial, small):
    """For the backward pass, which computes the rest again."""
    x = jax.random.normal(jax.random.key(0), (2, 16, 32))

    def kept(n_layer):
        blocks = tutorial.create_model(small(n_layer=n_layer)).h
        _, pull = jax.vjp(lambda x: run_blocks(blocks, x, scan=True), x)
        return sum(np.size(array) for array in jax.tree.leaves(pull))

    block = jax.tree.leaves(nnx.state(tutorial.create_model(small()).h[0]))
    expected = x.size + sum(parameter.size for parameter in block)
    assert (kept(5) - kept(2)) / 3 == pytest.approx(expected, rel=0.02)


def test_blocks_that_differ_are_not_scanned():
    """The loop would run all of them as the first."""
    blocks = nnx.List([nnx.Dropout(rate) for rate in (0.1, 0.1, 0.2)])
    with pytest.raises(ValueError, match="expected equal blocks, and block 2 differs"):
        run_blocks(blocks, jnp.ones((1, 2, 4)), scan=True)


def test_fewer_keys_than_queries_are_cached_for_all():
    """Each key serves two queries, as in the kernels."""
    q, k, v = np.random.default_rng(0).normal(size=(3, 1, 5, 4, 8)).astype(np.float32)
    k, v = k[:, :, :2], v[:, :, :2]
    whole = attend("xla", q, k, v)
    cache = {"key": jnp.zeros((1, 5, 4, 8)), "value": jnp.zeros((1, 5, 4, 8))}
    cache["position"] = 0
    for i in range(5):
        found = attend("xla", *(x[:, i : i + 1] for x in (q, k, v)), cache)
        np.testing.assert_allclose(found, whole[:, i : i + 1], atol=1e-6)


@pytest.mark.parametrize(
    "dtypes, near",
    [
        (["float32", "float32"], 1e-5),
        (["float32", "bfloat16"], 0.02),
        (["bfloat16", "bfloat16"], 0.02),  # an untied head, cast before the loss
    ],
)
@pytest.mark.parametrize("chunks", [1, 3])
def test_loss_and_gradients_are_pytorchs(dtypes, near, chunks):
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

    config = SimpleNamespace(vocab_size=7, loss_chunks=chunks)

    def loss(table, features):
        return -2 * cross_entropy(table, features, targets, config)

    given = map(jnp.asarray, (table, features), dtypes)
    found, gradients = jax.value_and_grad(loss, argnums=(0, 1))(*given)
    assert [x.dtype for x in (found, *gradients)] == ["float32", *dtypes]
    assert float(found) == pytest.approx(-2 * expected.item(), rel=near)
    for mine, other in zip(gradients, theirs):
        wanted = other.grad.numpy()
        mine = np.asarray(mine, np.float32)
        np.testing.assert_allclose(mine, wanted, atol=near * np.abs(wanted).max())
    assert not gradients[0][7:].any()


def test_the_loss_scatters_nothing_and_has_one_parts_logits():
    """Comparing with the target instead of scattering is much faster on accelerators."""
    gradients = jax.jit(jax.grad(cross_entropy, (0, 1)), static_argnums=3)
    given = jnp.ones((640, 64)), jnp.ones((4, 24, 64)), jnp.zeros((4, 24), int)
    for chunks in (1, 2):
        config = trainkit.config.ModelConfig(vocab_size=521, loss_chunks=chunks)
        text = gradients.lower(*given, config).compile().as_text()
        assert " scatter(" not in text
        shapes = re.findall(r"f32\[([\d,]+),640\]", text)
        tokens = max(math.prod(map(int, shape.split(","))) for shape in shapes)
        assert tokens == 4 * 24 // chunks
