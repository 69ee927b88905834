"""Attention kernels on a mesh, scanned blocks, the loss in parts, and a model's parameters."""

import math
import re
from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import llamas
import numpy as np
import pytest
import torch
from flax import nnx
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import AbstractMesh, AxisType, PartitionSpec as P
from samples import windows_for

from trainkit import ops


def test_splash_attention_equals_the_plain_one():
    """The TPU kernel, interpreted: the same results and gradients, over two of its blocks, of
    two heads that share keys and values.
    """
    shape = (1, 1024, 2, 64)  # B, T, H, D/H
    q, k, v, weight = jax.random.normal(jax.random.key(0), (4, *shape))
    k, v = k[:, :, :1], v[:, :, :1]

    def run(kernel):
        y, pull = jax.vjp(kernel, q, k, v)
        return y, *pull(weight)

    plain = run(partial(jax.nn.dot_product_attention, is_causal=True))
    with pltpu.force_tpu_interpret_mode():
        fast = jax.jit(run, static_argnums=0)(ops._splash_attention)
    for expected, found in zip(plain, fast):
        np.testing.assert_allclose(found, expected, atol=1e-4)


def test_a_kernel_gets_its_devices_windows_and_heads():
    """Of its replica, of which each has its own over data."""
    shapes = []

    def note(q, k, v):
        shapes.append(q.shape)
        return q

    over_data = {"in_specs": P("data"), "out_specs": P("data"), "axis_names": {"data"}}

    def run(q):
        return ops._on_each_device(note, None, "tensor")(q, q, q)

    of_each_replica = jax.shard_map(run, **over_data)
    mesh = AbstractMesh((2, 2, 2), ("data", "fsdp", "tensor"), (AxisType.Auto,) * 3)
    with jax.sharding.use_abstract_mesh(mesh):
        y = jax.eval_shape(of_each_replica, np.zeros((8, 16, 6, 3)))
    assert shapes == [(2, 16, 3, 3)] and y.shape == (8, 16, 6, 3)


def test_a_scanned_block_keeps_its_input_and_its_parameters(tutorial, small):
    """For the backward pass, which computes the rest again."""
    blocks = tutorial.create_model(small(n_layer=5)).h
    x = jax.random.normal(jax.random.key(0), (2, 16, 32))
    _, pull = jax.vjp(lambda x: ops.run_blocks(blocks, x, scan=True), x)
    kept = sum(np.size(array) for array in jax.tree.leaves(pull))
    expected = 5 * x.size + sum(array.size for array in jax.tree.leaves(blocks))
    assert kept == pytest.approx(expected, rel=0.05)


class Dropped(nnx.Module):
    """A block that adds a binary digit at each of two places, zero where it is dropped."""

    def __init__(self, config):
        self.config = config

    def __call__(self, x, keys):
        for place in 0, 1:
            x = 2 * x + ops.dropout(jnp.ones_like(x), keys, place, self.config)
        return x


def test_dropout_is_of_row_layer_place_and_step(tutorial, small):
    """The share of zeros, and the scale of the rest; the same if layers are scanned."""
    config = small(dropout=0.25, batch_size=8)
    zeros = jnp.zeros((8, 40, 50))
    blocks = [Dropped(config) for _ in range(2)]
    masks = []
    for step in 3, 4:
        keys = ops.row_keys(config, step)
        y = ops.run_blocks(blocks, zeros, keys)
        np.testing.assert_array_equal(ops.run_blocks(blocks, zeros, keys, True), y)
        digits = np.array(y * 0.75)
        np.testing.assert_allclose(digits, digits.round(), atol=1e-3)
        masks += [digits.round().astype(int) >> place & 1 for place in range(4)]
        masks.append(ops.dropout(zeros + 1, keys, 0, config) > 0)
    rows = np.array(masks, bool).reshape(10 * 8, -1)  # of each mask and window
    np.testing.assert_allclose(1 - rows.mean(axis=1), 0.25, atol=0.05)
    agree = (rows[:, None] == rows).mean(axis=-1)[~np.eye(len(rows), dtype=bool)]
    np.testing.assert_allclose(agree, 0.75**2 + 0.25**2, atol=0.06)


@pytest.mark.parametrize("kind", ["gpt2", "llama, one group"])
def test_what_a_model_drops(tutorial, llama, small, monkeypatch, kind):
    """Of its embeddings, and of what attention and MLP add, each by itself."""
    module = llama if kind in llamas.SHAPES else tutorial
    config, seen = small(**llamas.SHAPES.get(kind, {}), dropout=0.5), []
    keys = ops.row_keys(config, 0)
    model = module.create_model(config)
    for part in (module.Attention, module.MLP):
        monkeypatch.setattr(part, "__call__", lambda self, x: jnp.ones_like(x))
    block = module.Block(config, rngs=nnx.Rngs(0))
    y = block(jnp.zeros((4, 16, config.n_embd)), keys)
    assert {*np.unique(y)} == {0, 2, 4}  # both, one, or none of the two is dropped
    monkeypatch.setattr(ops, "run_blocks", lambda _, x, *more: seen.append(x) or x)
    model.features(jnp.zeros((4, 16), int), keys)
    assert float((seen[0] == 0).mean()) == pytest.approx(0.5, abs=0.05)


def test_a_step_has_masks_of_its_own_and_takes_its_state(tutorial, small):
    config, losses = small(dropout=0.5), set()
    (windows,) = windows_for(config, 1)
    for step in (0, 1):
        state = tutorial.create_state(config)._replace(step=jnp.int32(step))
        losses.add(float(tutorial.train_step(state, windows, config)[1]["loss"]))
        arrays = [x for x in jax.tree.leaves(state) if x.ndim]
        assert all(x.is_deleted() for x in arrays)  # for the next one
    assert len(losses) == 2


def test_without_dropout_nothing_is_drawn(tutorial, small):
    config = small()
    state = jax.eval_shape(lambda: tutorial.create_state(config))
    windows = np.zeros((4, 17), np.uint16)
    assert "random" not in tutorial.train_step.lower(state, windows, config).as_text()
    assert ops.row_keys(config, 0) is None


@pytest.mark.parametrize("half", ["", "features", "table features"])  # an untied head
def test_loss_and_gradients_are_pytorchs(tutorial, half):
    """Of nine rows, two of which pad the vocabulary; with a weight of -2."""
    rng = np.random.default_rng(3)
    given = [rng.normal(size=(9, 4)), rng.normal(size=(2, 6, 4))]
    targets = rng.integers(0, 7, (2, 6))
    table, features = theirs = [torch.tensor(x, requires_grad=True) for x in given]
    logits = features @ table[:7].T
    entropy = torch.nn.functional.cross_entropy(logits.mT, torch.tensor(targets))
    (-2 * entropy).backward()

    def loss(table, features):
        config = SimpleNamespace(vocab_size=7, loss_chunks=3)
        return -2 * ops.cross_entropy(table, features, targets, config)

    near = 0.02 if half else 1e-5
    names = ("table", "features")
    dtypes = ["bfloat16" if name in half else "float32" for name in names]
    ours = map(jnp.asarray, given, dtypes)
    found, gradients = jax.value_and_grad(loss, argnums=(0, 1))(*ours)
    assert [x.dtype for x in (found, *gradients)] == ["float32", *dtypes]
    assert float(found) == pytest.approx(-2 * entropy.item(), rel=near)
    for mine, other in zip(gradients, theirs):
        wanted = other.grad.numpy()
        assert jnp.abs(mine - wanted).max() < near * np.abs(wanted).max()


def test_the_loss_scatters_nothing_and_has_one_parts_logits(tutorial):
    """Comparing with the target instead of scattering is much faster on accelerators."""
    config = tutorial.TrainingConfig(vocab_size=521, loss_chunks=2)
    gradients = jax.jit(jax.grad(ops.cross_entropy, (0, 1)), static_argnums=3)
    given = jnp.ones((640, 64)), jnp.ones((4, 24, 64)), jnp.zeros((4, 24), int)
    lowered = gradients.lower(*given, config)
    assert "scatter" not in lowered.as_text()  # XLA for CPUs expands each
    text = lowered.compile().as_text()
    shapes = re.findall(r"f32\[([\d,]+),640\]", text)
    tokens = max(math.prod(map(int, shape.split(","))) for shape in shapes)
    assert tokens == 4 * 24 / 2
