"""Gradients and attention on whatever devices JAX finds, beside float32 on the CPU.

On a machine with GPUs or TPUs: JAX_PLATFORMS= python -m pytest tests/test_device.py
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

KERNEL = {"cpu": "xla", "gpu": "cudnn", "tpu": "splash"}[jax.default_backend()]
WIDTHS = {"n_layer": 1, "n_head": 4, "n_embd": 256, "block_size": 512}
CPU = Mesh(np.reshape(jax.devices("cpu")[0], (1, 1, 1)), ("data", "fsdp", "tensor"))
# How far a loss may be from float32's, in nats per token; and gradients, as the length of the
# difference in lengths of the exact ones. Several times what a CPU shows.
FAR = {"float32": (1e-5, 1e-4), "bfloat16": (1e-2, 0.05)}


def put(x, mesh: Mesh, *axes: str):
    """A pytree on the devices of `mesh`, whole or divided along its first axis."""
    return jax.device_put(x, NamedSharding(mesh, PartitionSpec(*axes)))


def distance(found, exact, least: float = 1e-30) -> float:
    """The length of the difference, in lengths of the exact one, or in `least`."""
    found, exact = (np.asarray(x, np.float64) for x in (found, exact))
    return np.linalg.norm(found - exact) / max(np.linalg.norm(exact), least)


@pytest.mark.parametrize("dtype", FAR)
def test_gradients(tutorial, small, dtype):
    """The mean of two micro-batches on each device, with this platform's kernel."""
    kernel = KERNEL if dtype == "bfloat16" else "xla"  # cuDNN's knows no float32
    kinds = {"compute_dtype": dtype, "attention": kernel, "loss_chunks": 2}
    batch_size = 2 * jax.device_count()
    ours = small(**WIDTHS, **kinds, batch_size=batch_size, device_batch_size=1)
    plain = small(**WIDTHS, batch_size=batch_size)
    windows = np.random.default_rng(0).integers(0, 521, (batch_size, 513), np.uint16)
    windows[1::2, ::2] = 7  # micro-batches differ, so that their mean counts
    gradient = jax.value_and_grad(tutorial.loss_fn)
    mean = jax.jit(
        partial(tutorial.accumulation.mean_over_batch, gradient), static_argnums=2
    )

    @jax.default_matmul_precision("highest" if dtype == "float32" else "default")
    def run(config, mesh: Mesh):
        with jax.default_device(jax.devices("cpu")[0]):
            model = tutorial.create_model(config)
        with jax.set_mesh(mesh):
            return mean(put(model, mesh), put(windows, mesh, "data"), config)

    exact_loss, exact = run(plain, CPU)
    loss, gradients = run(ours, tutorial.create_mesh(ours))
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

    inputs = np.random.default_rng(0).normal(size=(2, 2, 512, 256)).astype(np.float32)
    with jax.set_mesh(CPU):
        exact = run(*put(inputs, CPU), compute_dtype="float32", attention="xla")
    half = inputs.astype(jnp.bfloat16)
    with jax.set_mesh(tutorial.create_mesh(small())):
        found = run(*half, compute_dtype="bfloat16", attention=KERNEL)
    assert max(map(distance, found, exact)) <= 0.03
