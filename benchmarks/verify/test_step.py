"""How fast the configuration's train step is on one device, and what memory it takes."""

import time

import common
import jax
import notebook_module
import numpy as np
import pytest

import trainkit.sharding

STEPS, WARM = 40, 2  # of which the first are not counted
SECONDS = 60  # after which no other step is measured


def test_step(record, tutorial, base, device, pytestconfig):
    """The train step of the configuration."""
    jax.set_mesh(mesh := trainkit.sharding.make_mesh(base, [device]))
    before, limit = common.memory_of(device)
    compiled, trace_s, compile_s = common.compile_step(tutorial, base, mesh)
    memory = compiled.memory_analysis()
    total = memory.argument_size_in_bytes + memory.temp_size_in_bytes
    found = f"{common.gib(total)}, of which {common.gib(memory.temp_size_in_bytes)} temporary"
    expected = f"less than the device's {common.gib(limit)}" if limit else ""
    record("memory as compiled", found, expected, total < (limit or np.inf), total)
    record("time to trace and compile", f"{trace_s + compile_s:.1f} s", value=compile_s)
    if pytestconfig.option.rehearse:
        pytest.skip(f"compiled for {device.device_kind}, and not run")

    state = notebook_module.initial_state(tutorial, base, mesh)
    sharding = trainkit.sharding.batch_sharding(mesh)
    windows = jax.device_put(common.random_windows(base), sharding)
    times, least = [time.perf_counter()], WARM + 3
    while len(times) <= WARM + STEPS:
        state, metrics = compiled(state, windows)
        jax.block_until_ready((state, metrics))
        times.append(time.perf_counter())
        if len(times) > least and times[-1] - times[0] > SECONDS:
            break
    spent = np.diff(times)[WARM:]
    low, middle, high = (1e3 * np.quantile(spent, (0.1, 0.5, 0.9))).tolist()
    speed = 1e3 * base.batch_size * base.block_size / middle
    text = f"{base.batch_size} windows of {base.block_size:,} tokens a step"
    record("tokens/s", f"{speed:,.0f}, {text}", value=speed)
    if peak := common.peak_flops(device.device_kind):
        mfu = speed * common.flops_per_token(tutorial, base) / peak
        text = f"{mfu:.1%} of the data sheet's {peak / 1e12:,.0f} TFLOP/s"
        record("MFU", text, value=mfu)
    text = f"{middle:.1f} ms; 8 of 10 within {low:.1f} and {high:.1f} ms"
    record(f"a step, the median of {len(spent)}", text, value=middle / 1e3)
    used = common.memory_of(device)[0] - before
    # On a CPU, this is the whole process's, its compiler with it.
    expected = f"within a quarter of {common.gib(total)}" if limit else ""
    close = not limit or abs(used - total) <= total / 4
    record("memory as run", common.gib(used), expected, close, used)
