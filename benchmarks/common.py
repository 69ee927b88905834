"""What the benchmarks share: the notebook, Ray, own processes, peaks.

Import it before `trainkit`, which it finds for scripts that are run from anywhere.
"""

import dataclasses
import datetime
import importlib.metadata
import itertools
import multiprocessing
import os
import platform
import resource
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "ci")]  # of trainkit, notebook_module

import numpy as np
import yaml
from notebook_module import load_notebook as load_notebook

CORES = os.cpu_count()
# Dense bfloat16 FLOP/s a device, from the vendors' data sheets. A name's first match counts.
PEAK_FLOPS = {
    "NVIDIA A10G": 70e12,
    "NVIDIA A100": 312e12,
    "NVIDIA L40S": 362e12,
    "NVIDIA L40": 181e12,
    "NVIDIA L4": 121e12,
    "NVIDIA H100 PCIe": 756e12,
    "NVIDIA H100 NVL": 835e12,
    "NVIDIA H100": 989e12,
    "NVIDIA H200 NVL": 835e12,
    "NVIDIA H200": 989e12,
    "NVIDIA GH200": 989e12,
    "NVIDIA B200": 2_250e12,
    "TPU v4": 275e12,
    "TPU v5 lite": 197e12,
    "TPU v5": 459e12,
    "TPU v6 lite": 918e12,
}


def start_ray(*address: str, **options) -> None:
    """Start Ray as the notebook does, with `trainkit` on every worker."""
    import ray

    runtime_env = {"py_modules": [str(ROOT / "trainkit")]}
    ray.init(*address, runtime_env=runtime_env, log_to_driver=False, **options)


def parse_changes(arguments: list[str]) -> dict:
    """What `key=value` arguments change in a configuration; values are YAML."""
    changes = dict(argument.split("=", 1) for argument in arguments)
    return {key: yaml.safe_load(value) for key, value in changes.items()}


def for_one_device(config, changes: dict):
    """`config` with `changes`, cut to what one device does at once.

    Args:
        changes: of the configuration's keys; `micro_batches` is the parts of a batch that is
            so many times as large.
    """
    changes = dict(changes)
    parts = changes.pop("micro_batches", 1)
    windows = changes.pop(
        "device_batch_size", config.device_windows // config.micro_batches
    )
    one = {"num_workers": 1, "devices_per_worker": 1, "topology": None}
    one |= {"device_batch_size": windows, "batch_size": windows * parts}
    return dataclasses.replace(config, **one | changes)


def random_windows(config) -> np.ndarray:
    """A batch of random tokens, uint16 [B, T + 1]."""
    shape = (config.batch_size, config.block_size + 1)
    return np.random.default_rng(0).integers(0, config.vocab_size, shape, np.uint16)


def lower_step(tutorial, config, mesh, state):
    """The train step, for a state of these shapes, as JAX hands it to the compiler."""
    import jax

    import trainkit.sharding

    windows = jax.ShapeDtypeStruct(
        (config.batch_size, config.block_size + 1),
        np.uint16,
        sharding=trainkit.sharding.batch_sharding(mesh),
    )
    with jax.set_mesh(mesh):
        return tutorial.train_step.lower(state, windows, config)


def compile_step(tutorial, config, mesh):
    """The compiled train step, and the seconds that tracing and compiling took."""
    import trainkit.sharding

    state = trainkit.sharding.abstract_state(tutorial.create_state, config, mesh)
    start = time.perf_counter()
    lowered = lower_step(tutorial, config, mesh, state)
    middle = time.perf_counter()
    return lowered.compile(), middle - start, time.perf_counter() - middle


def peak_flops(kind: str) -> float | None:
    """Dense bfloat16 FLOP/s of a device by its name, if the table has it."""
    return next((PEAK_FLOPS[k] for k in PEAK_FLOPS if kind.startswith(k)), None)


def flops_per_token(tutorial, config) -> float:
    """6 N + 12 L D T, with N the parameters less the position embedding.

    MFU, model FLOPs utilization, is tokens/s times this, divided by the peak. From nanoGPT's
    estimate_mfu: https://github.com/karpathy/nanoGPT/blob/master/model.py.
    """
    from trainkit import sharding

    n_params = sharding.count_parameters(tutorial.create_model, config)
    weights = n_params - config.block_size * config.n_embd
    return 6 * weights + 12 * config.n_layer * config.n_embd * config.block_size


def interleave(function: Callable, rows: list[tuple], rounds: int) -> list[list]:
    """The results of `function(*row)` for each row, measured round after round.

    Each call has a process of its own. Whatever else a shared machine does meets all rows
    alike.
    """
    results = [[] for _ in rows]
    spawn = multiprocessing.get_context("spawn")
    for _, (row, kept) in itertools.product(range(rounds), zip(rows, results)):
        with ProcessPoolExecutor(1, mp_context=spawn) as pool:
            kept.append(pool.submit(function, *row).result())
        print(*row, kept[-1], file=sys.stderr)
    return results


def describe_program(tutorial, config, compiled, trace_s: float, compile_s: float):
    """What each compiler says: the memory of a device in GiB, and the seconds it took."""
    from trainkit import sharding

    memory = compiled.memory_analysis()
    state, temporary = memory.argument_size_in_bytes, memory.temp_size_in_bytes
    sizes = {"state": state, "temporary": temporary, "total": state + temporary}
    return {
        "parameters": sharding.count_parameters(tutorial.create_model, config),
        "windows_at_once": config.device_windows // config.micro_batches,
        **{f"{name}_gib": round(size / 2**30, 2) for name, size in sizes.items()},
        "trace_s": round(trace_s, 1),
        "compile_s": round(compile_s, 1),
    }


def print_table(columns: list[str], rows: list[list], packages: list[str]) -> None:
    """A Markdown table, after the machine and the versions that it comes from."""
    versions = ", ".join(
        f"{name} {importlib.metadata.version(name)}" for name in packages
    )
    machine = f"{CORES}-core {platform.machine()}, Python {platform.python_version()}"
    print(f"\n{machine}, {versions}, {datetime.date.today()}:\n")
    for row in [columns, ["---"] * len(columns), *rows]:
        print(f"| {' | '.join(map(str, row))} |".replace(" --- ", "---"))


def gib(n: float) -> str:
    """Bytes for people."""
    return f"{n / 2**30:.2f} GiB" if n >= 2**29 else f"{n / 2**20:.0f} MiB"


def memory_of(device) -> tuple[int, int | None]:
    """The most bytes that programs have taken on a device so far, and how many they may.

    On a CPU, what this process has taken, and None.
    """
    import jax

    try:
        if stats := device.memory_stats():
            return stats["peak_bytes_in_use"], stats["bytes_limit"]
    except jax.errors.JaxRuntimeError:  # it exists by its description only
        pass
    unit = 1 if sys.platform == "darwin" else 1_024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit, None
