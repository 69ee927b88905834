"""Gradients and attention on whatever devices JAX finds, beside float32 on the CPU.

On a machine with GPUs or TPUs: JAX_PLATFORMS= python -m pytest -m device
"""

import contextlib
import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

pytestmark = pytest.mark.device
KERNEL = {"cpu": "xla", "gpu": "cudnn", "tpu": "splash"}[jax.default_backend()]
WIDTHS = {"n_layer": 1, "n_head": 4, "n_embd": 256, "block_size": 512}
# How far a loss may be from float32's, in nats per token; and gradients, as the length of the
# difference in lengths of the exact ones. Sums in another order, and bfloat16's eight bits;
# several times what a CPU shows.
FAR = {"float32": (1e-5, 1e-4), "bfloat16": (1e-2, 0.05)}


def distance(found, exact, least: float = 1e-30) -> float:
    """The length of the difference, in lengths of the exact one, or in `least`."""
    found, exact = (np.asarray(x, np.float64) for x in (found, exact))
    return np.linalg.norm(found - exact) / max(np.linalg.norm(exact), least)


@contextlib.contextmanager
def on_cpu():
    """Let one device of the CPU be all that there is."""
    device = jax.devices("cpu")[0]
    mesh = Mesh(np.reshape(device, (1, 1, 1)), ("data", "fsdp", "tensor"))
    with jax.default_device(device), jax.set_mesh(mesh):
        yield


@pytest.mark.parametrize("dtype", FAR)
def test_gradients(tutorial, small, dtype):
    """The mean of two micro-batches on each device, with this platform's kernel."""
    devices = jax.device_count()
    sizes = {"batch_size": 2 * devices, "device_batch_size": 1, "loss_chunks": 2}
    kernel = KERNEL if dtype == "bfloat16" else "xla"  # cuDNN's knows no float32
    ours = small(compute_dtype=dtype, attention=kernel, **WIDTHS, **sizes)
    plain = dataclasses.replace(
        ours, compute_dtype="float32", attention="xla", loss_chunks=1
    )
    shape = (ours.batch_size, ours.block_size + 1)
    windows = np.random.default_rng(0).integers(0, ours.vocab_size, shape, np.uint16)
    windows[1::2, ::2] = 7  # micro-batches differ, so that their mean counts
    create = jax.jit(tutorial.create_model, static_argnums=0)
    gradient = jax.value_and_grad(tutorial.loss_fn)
    with on_cpu():
        model = create(ours)
        exact_loss, exact = jax.jit(gradient, static_argnums=2)(
            create(plain), windows, plain
        )
    mesh = tutorial.create_mesh(ours)
    model = jax.device_put(model, NamedSharding(mesh, PartitionSpec()))
    windows = jax.device_put(windows, NamedSharding(mesh, PartitionSpec("data")))
    mean = partial(tutorial.mean_over_batch, gradient)
    precision = "highest" if dtype == "float32" else "default"
    with jax.set_mesh(mesh), jax.default_matmul_precision(precision):
        loss, gradients = jax.jit(mean, static_argnums=2)(model, windows, ours)
    assert abs(float(loss) - float(exact_loss)) <= FAR[dtype][0]
    pairs = [*zip(jax.tree.leaves(gradients), jax.tree.leaves(exact), strict=True)]
    # A key's bias moves all scores of a query alike, so its exact gradient is zero.
    least = 1e-3 * max(np.linalg.norm(gradient) for _, gradient in pairs)
    assert max(distance(*pair, least) for pair in pairs) <= FAR[dtype][1]


def test_attention(tutorial, small):
    """The kernel of this platform, forward and backward, in bfloat16."""

    @partial(jax.jit, static_argnames=("compute_dtype", "attention"))
    def run(x: jax.Array, weights: jax.Array, **kinds: str) -> list[jax.Array]:
        attention = tutorial.Attention(small(**WIDTHS, **kinds), rngs=nnx.Rngs(0))
        y, pull = jax.vjp(attention, x)
        return [y, *pull(weights.astype(y.dtype))]

    shape = (2, 2, WIDTHS["block_size"], WIDTHS["n_embd"])
    with on_cpu():
        inputs = jax.random.normal(jax.random.key(0), shape)
        exact = run(*inputs, compute_dtype="float32", attention="xla")
    inputs = jax.device_put(inputs.astype(jnp.bfloat16), jax.devices()[0])
    found = run(*inputs, compute_dtype="bfloat16", attention=KERNEL)
    assert max(map(distance, found, exact)) <= 0.03
