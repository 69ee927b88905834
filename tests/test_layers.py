"""Attention kernels on a mesh, scanned blocks, the loss in parts, and a model's parameters."""

import math
import re
from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import AbstractMesh, PartitionSpec
from samples import equations

from trainkit import layers


def test_splash_attention_equals_the_plain_one():
    """The TPU kernel, interpreted: the same results and gradients, over two of its blocks."""
    shape = (1, 1024, 1, 64)  # B, T, H, D/H
    q, k, v, weight = jax.random.normal(jax.random.key(0), (4, *shape))

    def run(kernel):
        y, pull = jax.vjp(kernel, q, k, v)
        return y, *pull(weight)

    plain = run(partial(jax.nn.dot_product_attention, is_causal=True))
    with pltpu.force_tpu_interpret_mode():
        fast = jax.jit(run, static_argnums=0)(layers.splash_attention)
    for expected, found in zip(plain, fast):
        np.testing.assert_allclose(found, expected, atol=1e-4)


def test_a_kernel_gets_its_devices_windows_and_heads():
    """Of its replica, of which each has its own over data."""
    mesh = AbstractMesh((2, 2, 2), ("data", "fsdp", "tensor"))
    kernel = layers.on_each_device(lambda q, k, v: q)
    of_replicas = jax.vmap(lambda q: kernel(q, q, q), spmd_axis_name="data")
    with jax.sharding.use_abstract_mesh(mesh):
        jaxpr = jax.make_jaxpr(of_replicas)(jnp.zeros((2, 4, 8, 6, 3)))
    (found,) = equations(jaxpr.jaxpr, "shard_map")
    part = PartitionSpec("data", "fsdp", None, "tensor")
    assert {*found["in_specs"], *found["out_specs"]} == {part}


def test_a_scanned_block_keeps_its_input_and_its_parameters(tutorial, small):
    """For the backward pass, which computes the rest again."""
    x = jax.random.normal(jax.random.key(0), (2, 16, 32))

    def kept(n_layer):
        blocks = tutorial.create_model(small(n_layer=n_layer)).h
        _, pull = jax.vjp(lambda x: layers.scan_blocks(blocks, x), x)
        return sum(np.size(array) for array in jax.tree.leaves(pull))

    parameters = jax.tree.leaves(tutorial.create_model(small()).h[0])
    expected = x.size + sum(parameter.size for parameter in parameters)
    assert (kept(5) - kept(2)) / 3 == pytest.approx(expected, rel=0.02)


def test_blocks_that_differ_are_not_scanned():
    """The loop would run all of them as the first."""
    rngs = nnx.Rngs(0)
    blocks = [nnx.LayerNorm(4, epsilon=10.0**-i, rngs=rngs) for i in (5, 5, 6)]
    with pytest.raises(ValueError, match="metadata"):
        layers.scan_blocks(blocks, jnp.ones((1, 2, 4)))


@pytest.mark.parametrize("half", ["", "features", "table features"])  # an untied head
@pytest.mark.parametrize("chunks", [1, 3])
def test_loss_and_gradients_are_pytorchs(tutorial, half, chunks):
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
        return -2 * layers.cross_entropy(table, features, targets, config)

    names, near = ("table", "features"), 0.02 if half else 1e-5
    dtypes = ["bfloat16" if name in half else "float32" for name in names]
    given = map(jnp.asarray, (table, features), dtypes)
    found, gradients = jax.value_and_grad(loss, argnums=(0, 1))(*given)
    assert [x.dtype for x in (found, *gradients)] == ["float32", *dtypes]
    assert float(found) == pytest.approx(-2 * expected.item(), rel=near)
    for mine, other in zip(gradients, theirs):
        wanted, mine = other.grad.numpy(), np.asarray(mine, np.float32)
        np.testing.assert_allclose(mine, wanted, atol=near * np.abs(wanted).max())
    assert not gradients[0][7:].any()


def test_the_loss_scatters_nothing_and_has_one_parts_logits(tutorial):
    """Comparing with the target instead of scattering is much faster on accelerators."""
    gradients = jax.jit(jax.grad(layers.cross_entropy, (0, 1)), static_argnums=3)
    given = jnp.ones((640, 64)), jnp.ones((4, 24, 64)), jnp.zeros((4, 24), int)
    for chunks in (1, 2):
        config = tutorial.TrainingConfig(vocab_size=521, loss_chunks=chunks)
        text = gradients.lower(*given, config).compile().as_text()
        assert " scatter(" not in text
        shapes = re.findall(r"f32\[([\d,]+),640\]", text)
        tokens = max(math.prod(map(int, shape.split(","))) for shape in shapes)
        assert tokens == 4 * 24 // chunks


class Own(nnx.Module):
    """A model with a layer of one's own."""

    def __init__(self, make):
        rngs = nnx.Rngs(0)
        self.embed = nnx.Embed(4, 3, rngs=rngs)
        self.own = make(self, rngs)


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda model, rngs: nnx.Dropout(0.1, rngs=rngs), "own/rngs/count is RngCount"),
        (lambda model, rngs: nnx.BatchNorm(3, rngs=rngs), "own/mean is BatchStat"),
        (lambda model, rngs: jnp.ones(3), "own is .*Array.* of float32"),
        (lambda model, rngs: model.embed.embedding, "own is Param .* embed/embedding"),
        (lambda model, rngs: nnx.Param(jnp.ones(3, "bfloat16")), "own is .* bfloat16"),
    ],
)
def test_what_a_step_would_not_train_right_is_refused(make, message):
    with pytest.raises(ValueError, match=f"create_model: {message}.*expected"):
        layers.check_parameters(Own(make))
    model = Own(lambda model, rngs: nnx.Linear(3, 3, rngs=rngs))
    assert layers.check_parameters(model) is model
