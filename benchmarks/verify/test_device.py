"""The first device: how fast its train step is, and what it computes beside float32."""

import dataclasses
import importlib.metadata
import os
import platform
import time
from functools import partial

import common
import jax
import jax.numpy as jnp
import notebook_module
import numpy as np
import pytest

from trainkit import layers, sharding

PACKAGES = "jax jaxlib jax-cuda12-plugin jax-cuda13-plugin libtpu flax optax numpy ray"
PACKAGES = [*PACKAGES.split(), "orbax-checkpoint"]
STEPS, WARM = 20, 2  # of which the first are not counted
PLAIN = {"compute_dtype": "float32", "attention": "xla", "loss_chunks": 1}
# How far a loss may be from float32's, in nats per token; and gradients, as the length of the
# difference in lengths of the exact ones. Sums in another order, and bfloat16's eight bits;
# several times what a CPU shows for a small shape and for 124M.
FAR = {"float32": (1e-5, 1e-4), "bfloat16": (1e-2, 0.05)}


@pytest.fixture(scope="session")
def device(pytestconfig):
    """The first device; in a rehearsal, one that exists by its description only."""
    options = pytestconfig.option
    found = [*importlib.metadata.distributions()][::-1]  # the first of a name counts
    versions = {each.name: each.version for each in found if each.name in PACKAGES}
    options.report["versions"] = {"python": platform.python_version(), **versions}
    if options.rehearse:
        from gpu_compile import virtual_gpus

        (device,) = virtual_gpus(options.rehearse, 1)
    else:
        device = jax.devices()[0]
    options.report["device"] = f"{jax.local_device_count()} x {device.device_kind}"
    if device.platform == "cpu":
        options.report["device"] = f"{os.cpu_count()}-core {platform.machine()} CPU"
    return device


@pytest.fixture
def on_device(pytestconfig, device):
    """A function that calls one with arrays on the device; in a rehearsal, it compiles it."""
    there = jax.sharding.SingleDeviceSharding(device)

    def shape_of(x) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=there)

    def call(function, *arrays):
        compiled = jax.jit(function).lower(*jax.tree.map(shape_of, arrays)).compile()
        if pytestconfig.option.rehearse:
            pytest.skip(f"compiled for {device.device_kind}, and not run")
        return compiled(*jax.device_put(arrays, device))

    return call


def test_step(record, tutorial, base, device, pytestconfig):
    """The train step of the configuration; before others take memory."""
    mesh = sharding.make_mesh(base, [device])
    before, limit = common.memory_of(device)
    compiled, trace_s, compile_s = common.compile_step(tutorial, base, mesh)
    memory = compiled.memory_analysis()
    total = memory.argument_size_in_bytes + memory.temp_size_in_bytes
    found = f"{common.gib(total)}, of which {common.gib(memory.temp_size_in_bytes)} temporary"
    expected = f"less than the device's {common.gib(limit)}" if limit else ""
    record("memory as compiled", found, expected, total < (limit or np.inf), total)
    cached = ", perhaps from a cache" if pytestconfig.option.cache else ""
    found = f"{trace_s + compile_s:.1f} s{cached}"
    record("time to trace and compile", found, value=compile_s)
    if pytestconfig.option.rehearse:
        pytest.skip(f"compiled for {device.device_kind}, and not run")
    windows = common.random_windows(base)
    windows = jax.device_put(windows, sharding.batch_sharding(mesh))
    state = notebook_module.initial_state(tutorial, base, mesh)
    times = [time.perf_counter()]
    for _ in range(WARM + STEPS):
        state, metrics = compiled(state, windows)
        jax.block_until_ready((state, metrics))
        times.append(time.perf_counter())
    middle = float(np.median(np.diff(times)[WARM:]))
    speed = base.batch_size * base.block_size / middle
    text = f"{base.batch_size} windows of {base.block_size:,} tokens a step"
    record("tokens/s", f"{speed:,.0f}, {text}", value=speed)
    if peak := common.peak_flops(device.device_kind):
        mfu = speed * common.flops_per_token(tutorial, base) / peak
        text = f"{mfu:.1%} of the data sheet's {peak / 1e12:,.0f} TFLOP/s"
        record("MFU", text, value=mfu)
    record(f"a step, the median of {STEPS}", f"{1e3 * middle:.1f} ms", value=middle)
    used = common.memory_of(device)[0] - before
    # On a CPU, this is the whole process's, its compiler with it.
    expected = f"within a quarter of {common.gib(total)}" if limit else ""
    close = not limit or abs(used - total) <= total / 4
    record("memory as run", common.gib(used), expected, close, used)


@partial(jax.jit, static_argnames=("tutorial", "config"))
def loss_and_gradients(params, windows, tutorial, config):
    function = jax.value_and_grad(tutorial.loss_fn)
    return sharding.mean(function, params, windows, config)


@pytest.mark.parametrize("dtype", FAR)
def test_gradients(record, tutorial, base, on_device, dtype):
    """The loss and its gradients, in two micro-batches, beside float32 on the CPU."""
    ours = {"compute_dtype": dtype, "device_batch_size": 1, "batch_size": 2}
    if dtype == "float32":
        ours["attention"] = "xla"  # cuDNN's computes in bfloat16 only
    ours = dataclasses.replace(base, **ours)
    plain = dataclasses.replace(ours, device_batch_size=2, **PLAIN)
    windows = common.random_windows(ours)
    windows[1, ::2] = 7  # the two differ, so that their mean counts
    with jax.default_device(jax.devices("cpu")[0]):
        params = jax.jit(tutorial.create_state, static_argnums=0)(plain).params
    with jax.default_matmul_precision("highest" if dtype == "float32" else "default"):
        function = partial(loss_and_gradients, tutorial=tutorial, config=ours)
        loss, gradients = on_device(function, params, windows)
    with jax.default_device(jax.devices("cpu")[0]):
        exact_loss, exact = loss_and_gradients(params, windows, tutorial, plain)
    far, (limit, each) = abs(float(loss) - float(exact_loss)), FAR[dtype]
    record(f"the loss in {dtype}", f"{far:.1e} off", f"{limit:g} at most", far <= limit)
    pairs = [*zip(jax.tree.leaves(gradients), jax.tree.leaves(exact))]
    # A key's bias moves all scores of a query alike, so its exact gradient is zero.
    least = 1e-3 * max(np.linalg.norm(gradient) for _, gradient in pairs)
    far, expected = max(distance(*pair, least) for pair in pairs), f"{each:g} at most"
    record(f"the gradients in {dtype}", f"{far:.1e} off", expected, far <= each)


def distance(found, exact, least: float = 1e-30) -> float:
    """The length of the difference, in lengths of the exact one, or in `least`."""
    found, exact = np.asarray(found, np.float64), np.asarray(exact, np.float64)
    return float(np.linalg.norm(found - exact) / max(np.linalg.norm(exact), least))


def test_attention_kernel(record, base, on_device):
    """The attention kernel of this platform beside the plain one."""
    if base.attention == "xla":
        pytest.skip("only the plain one runs here")
    shape = (4, 2, base.block_size, 12, 64)
    *inputs, weights = jax.random.normal(jax.random.key(0), shape, jnp.bfloat16)

    def run(attention, *inputs):
        y, pull = jax.vjp(partial(layers.attend, attention), *inputs)
        return y, *pull(weights.astype(y.dtype))

    found = on_device(partial(run, base.attention), *inputs)
    with jax.default_matmul_precision("highest"):
        exact = run("xla", *(x.astype(jnp.float32) for x in inputs))
    far = max(map(distance, found, exact))
    record(f"{base.attention} attention", f"{far:.1e} off", "0.02 at most", far <= 0.02)
