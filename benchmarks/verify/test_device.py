"""The devices, and what the first of them computes beside float32 on the CPU."""

import contextlib
import dataclasses
import importlib.metadata
import os
import platform
from functools import partial

import common
import jax
import jax.numpy as jnp
import notebook_module
import numpy as np
import orbax.checkpoint as ocp
import pytest

import trainkit
import trainkit.layers
from trainkit import workers

PACKAGES = "jax jaxlib jax-cuda12-plugin jax-cuda13-plugin libtpu flax optax"
PACKAGES = [*PACKAGES.split(), "orbax-checkpoint", "numpy", "ray"]
SMALL = {"vocab_size": 1_000, "n_layer": 2, "n_head": 2, "n_embd": 128}
PLAIN = {"compute_dtype": "float32", "attention": "xla", "loss_chunks": 1}
# How far gradients may be from float32's, as the length of the difference in lengths of
# the exact ones. Sums in another order, and bfloat16's eight bits; several times what a CPU
# shows for both shapes.
FAR = {"float32": 1e-4, "bfloat16": 0.05}
FAR_LOSS = {"float32": 1e-5, "bfloat16": 1e-2}  # nats per token


@pytest.fixture
def small(base):
    """The configuration in a small shape, one window at once."""
    tokens = 512 if base.platform == "tpu" else 128  # its kernel takes 512 at once
    one = {"device_batch_size": 1, "batch_size": 1, "block_size": tokens}
    return dataclasses.replace(base, **one, **SMALL)


@pytest.fixture
def on_device(pytestconfig, device):
    """A function that calls a jitted one with arrays on the device.

    In a rehearsal, it compiles the function for the device, and skips what follows.
    """

    def call(jitted, *arguments, **static):
        if not pytestconfig.option.rehearse:
            return jitted(*jax.device_put(arguments, device), **static)
        there = jax.sharding.SingleDeviceSharding(device)
        shapes = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=there), arguments
        )
        jitted.lower(*shapes, **static).compile()
        pytest.skip(f"compiled for {device.device_kind}, and not run")

    return call


def test_devices(record, report, base, device):
    """Devices, and the versions of the packages."""
    report["versions"] = {"python": platform.python_version()}
    for package in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            report["versions"][package] = importlib.metadata.version(package)
    report["device"] = f"{jax.local_device_count()} x {device.device_kind}"
    if device.platform == "cpu":
        report["device"] = f"{os.cpu_count()}-core {platform.machine()} CPU"
    record("devices", report["device"])
    _, memory = common.memory_of(device)
    if memory:
        record("memory of a device", common.gib(memory), value=memory)
    workers.check_generation(base, device)
    if not notebook_module.HAS_RAY:
        trainkit.NEEDED.pop("ray")
    trainkit.check_versions()
    record("versions", "they are", "those that the tests ran with, or newer")


@pytest.mark.parametrize("dtype", FAR)
@pytest.mark.parametrize("shape", ["a small shape", "the configuration's shape"])
def test_gradients(record, tutorial, base, small, on_device, shape, dtype):
    """The loss and its gradients beside float32 on the CPU."""
    config = small
    if shape != "a small shape":
        if base.platform == "cpu":
            pytest.skip(f"{shape}: it takes an accelerator")
        config = dataclasses.replace(base, device_batch_size=1, batch_size=1)
    # cuDNN's attention computes in bfloat16 only.
    kernel = {"attention": "xla"} if dtype == "float32" else {}
    ours = dataclasses.replace(config, compute_dtype=dtype, **kernel)
    windows = common.random_windows(config)
    loss_and_gradients = jax.jit(
        jax.value_and_grad(partial(tutorial.loss_fn, key=None)),
        static_argnames="config",
    )
    with jax.default_device(jax.devices("cpu")[0]):
        plain = dataclasses.replace(config, **PLAIN)
        params = jax.jit(tutorial.create_state, static_argnums=0)(plain).params
        exact = loss_and_gradients(params, windows, config=plain)
    with jax.default_matmul_precision("highest" if dtype == "float32" else "default"):
        found = on_device(loss_and_gradients, params, windows, config=ours)
    loss, far = float(exact[0]), FAR_LOSS[dtype]
    expected = f"{loss:.6f}, to within {far:g}"
    close = abs(found[0] - loss) <= far
    record(f"the loss in {dtype}, {shape}", f"{found[0]:.6f}", expected, bool(close))
    pairs = [*zip(jax.tree.leaves(found[1]), jax.tree.leaves(exact[1]))]
    # A key's bias moves all scores of a query alike, so its exact gradient is zero.
    least = 1e-3 * max(np.linalg.norm(gradient) for _, gradient in pairs)
    worst = max(distance(*pair, least) for pair in pairs)
    expected = f"each to within {FAR[dtype]:g} of its length"
    what = f"the gradients in {dtype}, {shape}"
    record(what, f"{worst:.1e} at most", expected, worst <= FAR[dtype])


def distance(found, exact, least: float = 1e-30) -> float:
    """The length of the difference, in lengths of the exact one, or in `least`."""
    found, exact = np.asarray(found, np.float64), np.asarray(exact, np.float64)
    return float(np.linalg.norm(found - exact) / max(np.linalg.norm(exact), least))


def test_attention_kernel(record, small, on_device):
    """The attention kernel of this platform beside the plain one."""
    kernel = small.attention
    if kernel == "xla":
        pytest.skip("only the plain one runs here")
    shape = (4, 2, small.block_size, 12, 64)
    *inputs, weights = jax.random.normal(jax.random.key(0), shape, jnp.bfloat16)

    def gradients(attention):
        def weighted(*inputs):
            y = trainkit.layers.attend(attention, *inputs)
            return jnp.sum(y.astype(jnp.float32) * weights), y

        return jax.jit(jax.grad(weighted, (0, 1, 2), has_aux=True))

    found = jax.tree.leaves(on_device(gradients(kernel), *inputs))
    with jax.default_matmul_precision("highest"):
        exact = gradients("xla")(*(x.astype(jnp.float32) for x in inputs))
    far = [distance(*pair) for pair in zip(found, jax.tree.leaves(exact))]
    text = ", ".join(f"{n} {x:.1e}" for n, x in zip("q k v result".split(), far))
    expected = "result and gradients to within 0.02"
    record(f"attention: {kernel}", text, expected, max(far) <= 0.02)


def test_micro_batches(record, tutorial, small, on_device):
    """A step of four micro-batches beside one of the whole batch."""
    found, windows = [], np.tile(common.random_windows(small), (4, 1))
    windows[1:, ::2] = 7  # they differ, so that their order and their mean count
    for at_once in (1, 4):
        whole = {"batch_size": 4, "device_batch_size": at_once}
        config = dataclasses.replace(small, **PLAIN | whole)
        with jax.default_matmul_precision("highest"):
            state = tutorial.create_state(config)
            _, metrics = on_device(tutorial.train_step, state, windows, config=config)
        found.append([float(metrics[name]) for name in ("loss", "grad_norm")])
    text, expected = ("{:.6f} and {:.6f}".format(*pair) for pair in found)
    what = "loss and gradients' norm of four micro-batches, float32"
    close = np.allclose(*found, rtol=1e-5)
    record(what, text, f"{expected}, to within 1e-5", close)


def test_saving_and_restoring(record, tutorial, base, small, tmp_path, on_device):
    """Ten steps, and ten from a checkpoint, twice."""
    config = small if base.platform == "cpu" else base
    windows, checkpointer = common.random_windows(config), ocp.PyTreeCheckpointer()

    def train(state):
        losses = []
        for _ in range(10):
            state, metrics = on_device(
                tutorial.train_step, state, windows, config=config
            )
            losses.append(float(metrics["loss"]))
        return state, losses

    middle, _ = train(tutorial.create_state(config))
    checkpointer.save(tmp_path / "middle", middle)
    how = ocp.checkpoint_utils.construct_restore_args(middle)
    end, losses = jax.device_get(train(middle))
    restored = checkpointer.restore(tmp_path / "middle", item=middle, restore_args=how)
    again, repeated = jax.device_get(train(restored))
    equal = map(np.array_equal, jax.tree.leaves(end), jax.tree.leaves(again))
    same = losses == repeated and all(equal)
    found = "they are" if same else f"losses {losses} and {repeated}"
    record("ten steps from a checkpoint", found, "the same to the bit", same)
