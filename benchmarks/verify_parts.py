"""The parts of verify.py: each is a function that finds out a few things and records them.

A part gets `options`, a dict with what main() of verify.py and the first part have found out,
and `add`, which records one thing: `what`, what was `expected`, what was `found`, and the
`result`: pass, fail, measured, or skipped; `value` is the number for other programs.
"""

import contextlib
import dataclasses
import importlib.metadata
import json
import math
import os
import platform
import shutil
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import train_step
import variants as other_code
import yaml
from common import (
    ROOT,
    compile_step,
    for_one_device,
    load_notebook,
    load_tools,
    parse_changes,
    peak_memory,
    random_windows,
    start_ray,
)
from notebook_module import HAS_RAY, initial_state

import trainkit
import trainkit.config
import trainkit.devices
import trainkit.layers
import trainkit.states

tutorial = load_notebook()
workers, run_log = load_tools("workers"), load_tools("run_log")
create_state = jax.jit(tutorial.create_state, static_argnums=0)

PACKAGES = "jax jaxlib jax-cuda12-plugin jax-cuda13-plugin libtpu flax optax"
PACKAGES = [*PACKAGES.split(), "orbax-checkpoint", "numpy", "ray"]
CONFIGS = {
    "cpu": "smoke.yaml",
    "gpu": "gpt2-124m.yaml",
    "tpu": "gpt2-124m-tpu-v6e.yaml",
}
SMALL = {"vocab_size": 1_000, "n_layer": 2, "n_head": 2, "n_embd": 128}
# How far gradients may be from float32's, as the length of the difference in lengths of
# the exact ones. Sums in another order, and bfloat16's eight bits; several times what a CPU
# shows for both shapes.
FAR = {"float32": 1e-4, "bfloat16": 0.05}
FAR_LOSS = {"float32": 1e-5, "bfloat16": 1e-2}  # nats per token
STEPS, KILLED = 60, 58  # of the program through Ray
BARE = 10  # steps of the bare program, each time that the loop pauses
PAUSES = (22, 40, KILLED)  # a stretch without a save, and one with that of step 40


def start(environment: dict[str, str]) -> None:
    """Set the environment before JAX asks for a device; it was imported without."""
    os.environ.update(environment)
    workers.load_cuda_libraries()  # as a worker does
    for key, value in environment.items():
        if key.startswith("JAX_"):
            jax.config.update(key.lower(), yaml.safe_load(value))


def measured(add: Callable, what: str, found: str, value: float | None = None) -> None:
    """Record what has no expectation."""
    more = {} if value is None else {"value": value}
    add(what=what, expected="", found=found, result="measured", **more)


def check(add: Callable, what: str, expected: str, found: str, passed: bool) -> None:
    """Record what has one."""
    result = "pass" if passed else "fail"
    add(what=what, expected=expected, found=found, result=result)


def skip(add: Callable, what: str, reason: str) -> None:
    add(what=what, expected="", found=reason, result="skipped")


def gib(n: float) -> str:
    return f"{n / 2**30:.2f} GiB" if n >= 2**29 else f"{n / 2**20:.0f} MiB"


def machine(options: dict, add: Callable) -> None:
    """What is here, how fast it is at best, and the plan for the other parts."""
    devices = jax.devices()
    first = devices[0]
    kind, changes = first.platform, parse_changes(options["changes"])
    changes = devices_own(first) | changes
    config = base_config(kind, changes)
    name, here = first.device_kind, f"{len(devices)} x {first.device_kind}"
    if kind == "cpu":
        name = f"{platform.machine()} CPU"
        here = f"{os.cpu_count()}-core {name}"
    versions = {"python": platform.python_version()}
    for package in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    if not HAS_RAY:
        trainkit.OLDEST.pop("ray")
    found, passed = "they are", True
    try:
        trainkit.check_versions()
    except ImportError as error:
        found, passed = str(error), False
    check(add, "versions", "those that the tests ran with, or newer", found, passed)
    if driver := ask_nvidia("driver_version"):
        measured(add, "NVIDIA's driver", driver)
    measured(add, "devices", f"{len(devices)} x {name}")
    measured(add, "memory of a device", gib(memory_of(first)), memory_of(first))
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    measured(add, "the machine", f"{os.cpu_count()} cores, {gib(memory)}")

    n = 1_024 if kind == "cpu" else 16_384

    def product(dtype: str) -> tuple[float, str]:
        flops = train_step.matmul_flops(n, dtype)
        return flops, f"{flops / 1e12:,.2f} TFLOP/s, {n:,} x {n:,}"

    what = "a product of {} matrices".format
    flops, found = product("bfloat16")
    peak, origin = data_sheet_peak(name), "the data sheet's peak"
    if peak:
        expected = f"at least 60 % of the data sheet's {peak / 1e12:,.0f} TFLOP/s"
        check(add, what("bfloat16"), expected, found, flops >= 0.6 * peak)
    else:
        measured(add, what("bfloat16"), found, flops)
        peak, found = product(config.compute_dtype)
        origin = f"the speed of such a product in {config.compute_dtype}"
        measured(add, what(config.compute_dtype), found, peak)
    size = 2**26 if kind == "cpu" else 2**30  # bytes
    array = jnp.zeros(size // 4, jnp.float32)
    speed = 2 * size / train_step.seconds_of(jax.jit(lambda x: x + 1), array)
    measured(add, "a copy, read and written", f"{speed / 1e9:,.0f} GB/s", speed)

    settings = workers.environment(config)
    shutil.rmtree(f"{options['folder']}/jax-cache", ignore_errors=True)
    changed = f", with {' '.join(options['changes'])}" if options["changes"] else ""
    report = {"device": here, "versions": versions}
    report["configuration"] = CONFIGS[kind] + changed
    plan = {"platform": kind, "count": len(devices), "changes": changes}
    plan |= {"peak": peak, "peak_is": origin, "report": report}
    plan["variants"] = plan_variants(config, options)
    settings.pop("LD_LIBRARY_PATH", None)  # which Ray would expand on a node
    settings.pop("JAX_COMPILATION_CACHE_DIR")  # verify's own; records name no folders
    plan["environment"] = settings
    add(plan=plan)


def data_sheet_peak(name: str) -> float | None:
    """Dense bfloat16 FLOP/s of a device, if the table has it."""
    peaks = run_log.PEAK_FLOPS
    return next((peaks[key] for key in peaks if name.startswith(key)), None)


def devices_own(device: jax.Device) -> dict:
    """What a GPU older than Ampere needs, as `workers.check_generation` says."""
    capability = float(getattr(device, "compute_capability", "") or 8)
    if device.platform == "gpu" and capability < 8:
        return {"compute_dtype": "float32", "attention": "xla", "device_batch_size": 4}
    return {}


def base_config(kind: str, changes: dict):
    """The platform's configuration, with `changes`, for one device."""
    config = trainkit.config.load_config(ROOT / "configs" / CONFIGS[kind])
    return for_one_device(config, changes)


def ask_nvidia(what: str) -> str:
    """What nvidia-smi says of the first GPU; empty if there is none."""
    try:
        command = ["nvidia-smi", f"--query-gpu={what}", "--format=csv,noheader"]
        return subprocess.check_output(command, text=True, timeout=30).splitlines()[0]
    except (OSError, subprocess.SubprocessError, IndexError):
        return ""


def memory_of(device: jax.Device) -> int:
    """Bytes that programs may take on a device; on CPU, the machine's."""
    stats = device.memory_stats() or {}
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return stats.get("bytes_limit", machine)


def numbers(options: dict, add: Callable) -> None:
    """Loss, gradients, attention kernels, and twenty steps twice."""
    kind, changes = options["platform"], options["changes"]
    if kind != "cpu":
        start({"JAX_PLATFORMS": f"{workers.PLATFORMS[kind]},cpu"})
    real = base_config(kind, changes | {"device_batch_size": 1})
    tokens = 512 if kind == "tpu" else 128  # the TPU's kernel takes 512 at once
    small = dataclasses.replace(real, block_size=tokens, **SMALL)
    shapes = {"a small shape": small}
    if kind != "cpu":
        shapes["the configuration's shape"] = real
    for name, config in shapes.items():
        reference = dataclasses.replace(
            config, compute_dtype="float32", attention="xla", loss_chunks=1
        )
        windows = random_windows(config)
        cpu = jax.devices("cpu")[0]
        with jax.default_device(cpu):
            params = create_state(reference).params
            exact = loss_and_gradients(params, windows, reference)
        for dtype in ("float32", "bfloat16"):
            # cuDNN's attention computes in bfloat16 only.
            kernel = {"attention": "xla"} if dtype == "float32" else {}
            ours = dataclasses.replace(config, compute_dtype=dtype, **kernel)
            precision = "highest" if dtype == "float32" else "default"
            on_device = jax.device_put(params, jax.devices()[0])
            with jax.default_matmul_precision(precision):
                found = loss_and_gradients(on_device, windows, ours)
            compare_gradients(add, f"{dtype}, {name}", dtype, found, exact)
    compare_attention(kind, small, add)
    repeat(base_config(kind, changes) if kind != "cpu" else small, add)


def loss_and_gradients(params, windows: np.ndarray, config) -> tuple[float, dict]:
    """The loss of some windows, and its gradients by the name of their parameter."""

    value_and_grad = jax.value_and_grad(tutorial.eval_step)  # without dropout
    loss, gradients = value_and_grad(params, windows, config)
    leaves = jax.tree_util.tree_leaves_with_path(gradients)
    return float(loss), {
        jax.tree_util.keystr(path[:-1], simple=True, separator="."): np.asarray(
            leaf, np.float64
        )
        for path, leaf in leaves
    }


def compare_gradients(add, name: str, dtype: str, found: tuple, exact: tuple) -> None:
    """Record how far a loss and its gradients are from the exact ones."""
    far = abs(found[0] - exact[0])
    check(
        add,
        f"the loss in {name}",
        f"{exact[0]:.6f}, to within {FAR_LOSS[dtype]:g}",
        f"{found[0]:.6f}",
        far <= FAR_LOSS[dtype],
    )
    least = 1e-3 * max(np.linalg.norm(gradient) for gradient in exact[1].values())
    distances = {k: relative(found[1][k], exact[1][k], least) for k in exact[1]}
    worst = max(distances, key=distances.get)
    check(
        add,
        f"the gradients in {name}",
        f"to within {FAR[dtype]:g} of their length, each parameter's",
        f"{distances[worst]:.1e} at most, {worst}",
        distances[worst] <= FAR[dtype],
    )


def relative(found: np.ndarray, exact: np.ndarray, least: float = 1e-30) -> float:
    """The length of the difference, in lengths of the exact one, or in `least`.

    A key's bias moves all scores of a query alike, so its exact gradient is zero.
    """
    return float(np.linalg.norm(found - exact) / max(np.linalg.norm(exact), least))


def compare_attention(kind: str, config, add: Callable) -> None:
    """Each attention kernel of this platform beside the plain one, in float32."""
    kernels = {"gpu": ["cudnn"], "tpu": ["splash"]}.get(kind, [])
    if not kernels or config.attention == "xla":
        skip(add, "attention kernels", "only the plain one runs here")
        return
    shape = (4, 2, config.block_size, 12, 64)
    *inputs, weights = jax.random.normal(jax.random.key(0), shape, jnp.bfloat16)

    def results(attention, *inputs):
        def weighted(*inputs):
            y = trainkit.layers.attend(attention, *inputs)
            return jnp.sum(y.astype(jnp.float32) * weights), y

        grads, y = jax.jit(jax.grad(weighted, (0, 1, 2), has_aux=True))(*inputs)
        return [np.asarray(x, np.float64) for x in (y, *grads)]

    with jax.default_matmul_precision("highest"):
        exact = results("xla", *(x.astype(jnp.float32) for x in inputs))
    for kernel in kernels:
        far = [relative(*pair) for pair in zip(results(kernel, *inputs), exact)]
        text = ", ".join(
            f"{name} {n:.1e}" for name, n in zip(("result", "q", "k", "v"), far)
        )
        expected = "result and gradients to within 0.02"
        check(add, f"attention: {kernel}", expected, text, max(far) <= 0.02)


def repeat(config, add: Callable) -> None:
    """Twenty steps from the same seed, twice."""
    windows = jax.device_put(random_windows(config))
    runs = []
    for _ in range(2):
        state, losses = create_state(config), []
        for _ in range(20):
            state, metrics = tutorial.train_step(state, windows, config)
            losses.append(metrics["loss"])
        runs.append(jax.device_get((losses, jax.tree.leaves(state))))
    (first, ours), (second, theirs) = runs
    equal = all(np.array_equal(a, b) for a, b in zip(ours, theirs)) and first == second
    differing = next((i for i in range(20) if first[i] != second[i]), 20)
    found = "the same" if equal else f"they differ; losses from step {differing + 1} on"
    check(
        add, "20 steps with the same seed, twice", "the same, bit for bit", found, equal
    )
    check(
        add,
        "20 steps on the same windows",
        f"the loss begins near ln {config.vocab_size:,} = {math.log(config.vocab_size):.2f}, "
        "and falls",
        f"{first[0]:.3f}, and then {first[-1]:.3f}",
        abs(first[0] - math.log(config.vocab_size)) < 0.5 and first[-1] < first[0],
    )


def timed_steps(step: Callable, most: float) -> tuple[list, float]:
    """Seconds of up to 40 steps after the first two, and what the first took longer.

    Args:
        most: seconds to take, if that leaves three steps or more.
    """
    times = [time.perf_counter()]
    while len(times) < 6 or (times[-1] - times[0] < most and len(times) < 43):
        step()
        times.append(time.perf_counter())
    spent = np.diff(times)
    return list(spent[2:]), float(spent[0] - np.median(spent[2:]))


def speed_of(config, spent: list, peak: float) -> tuple[float, float]:
    """Tokens/s by the median step, and MFU."""
    tokens_per_s = config.batch_size * config.block_size / float(np.median(spent))
    n_params = trainkit.states.count_parameters(tutorial.create_model, config)
    return tokens_per_s, tokens_per_s * run_log.flops_per_token(config, n_params) / peak


def step(options: dict, add: Callable) -> None:
    """How fast the configuration's step is."""
    config = base_config(options["platform"], options["changes"])
    peak, origin = options["peak"], options["peak_is"]
    run, compiled = train_step.our_step(tutorial, config), []

    def listen(event: str, *_, **__) -> None:
        compiled.extend([event] * ("backend_compile" in event))

    jax.monitoring.register_event_duration_secs_listener(listen)
    spent, compiling = timed_steps(run, options["seconds"] / 3)
    tokens_per_s, mfu = speed_of(config, spent, peak)
    windows = f"{config.batch_size} windows of {config.block_size:,} tokens"
    measured(add, "tokens/s", f"{tokens_per_s:,.0f}, {windows} a step", tokens_per_s)
    measured(add, "MFU", f"{mfu:.1%} of {origin}, {peak / 1e12:,.2f} TFLOP/s", mfu)
    low, middle, high = (1e3 * np.quantile(spent, (0.1, 0.5, 0.9))).tolist()
    text = f"{middle:.1f} ms; 8 of 10 within {low:.1f} and {high:.1f} ms"
    measured(add, f"a step, the median of {len(spent)}", text, middle / 1e3)
    measured(add, "time to compile", f"{compiling:.1f} s", compiling)
    n = len(compiled)
    check(add, "programs compiled for all steps", "1", str(n), n == 1)


def memory(options: dict, add: Callable) -> None:
    """What the step takes as compiled, and as run."""
    config = base_config(options["platform"], options["changes"])
    mesh = trainkit.devices.make_mesh(config, jax.devices()[:1])
    jax.set_mesh(mesh)
    before = used(mesh.devices.flat[0])
    compiled = compile_step(tutorial, config, mesh)[0]
    analysis = compiled.memory_analysis()
    state, temporary = analysis.argument_size_in_bytes, analysis.temp_size_in_bytes
    total, limit = state + temporary, memory_of(mesh.devices.flat[0])
    text = f"{gib(state)} of state, {gib(temporary)} temporary: {gib(total)}"
    expected = f"less than the device's {gib(limit)}"
    check(add, "memory as compiled", expected, text, total < limit)
    state, windows = initial_state(tutorial, config, mesh), random_windows(config)
    windows = jax.device_put(windows, trainkit.devices.batch_sharding(mesh))
    for _ in range(3):
        state, metrics = compiled(state, windows)
    jax.block_until_ready((state, metrics))
    peak = used(mesh.devices.flat[0]) - before
    if options["platform"] == "cpu":
        text = f"{gib(peak)} that the process grew by, its compiler with it"
        measured(add, "memory as run", text, peak)
        return
    expected = f"within a quarter of {gib(total)}"
    passed = 0.75 * total <= peak <= 1.25 * total
    check(add, "memory as run", expected, gib(peak), passed)


def used(device: jax.Device) -> int:
    """The most bytes in use so far on a device; on CPU, the process's."""
    if device.platform == "cpu":
        return peak_memory()
    return device.memory_stats()["peak_bytes_in_use"]


def plan_variants(config, options: dict) -> list[dict]:
    """The step in variants, one change at a time, and what each would change.

    A variant that `says` nothing can't be set: it is there to compare with.
    """
    windows, chunks = config.device_batch_size, config.loss_chunks
    changes = [
        {"device_batch_size": 2 * windows},
        {"device_batch_size": windows // 2},
        {"loss_chunks": 2 * chunks},
        {"loss_chunks": chunks // 2},
        {"attention": "xla"},
    ]
    plan = [{"name": "the configuration as it is", "says": "nothing"}]
    for change in changes:
        ((key, value),) = change.items()
        if value and getattr(config, key) != value:
            line = f"{key}: {value}"
            plan.append({"name": line, "changes": change, "says": f"`{line}`"})
    if config.platform == "gpu":
        flags = workers.environment(config)["XLA_FLAGS"]
        triton = flags.replace("triton_gemm=false", "triton_gemm=true")
        for name, change in {
            "products by Triton": {"XLA_FLAGS": triton},
            "optimization level O0": {"JAX_OPTIMIZATION_LEVEL": "O0"},
        }.items():
            says = "`environment` in trainkit/workers.py"
            plan.append({"name": name, "environment": change, "says": says})
    if options["original"]:
        plan.append({"name": "the original tutorial", "code": "original", "says": ""})
    return [{"changes": {}, "environment": {}, "code": None} | each for each in plan]


def variant(options: dict, add: Callable) -> None:
    """The speed of one variant."""
    chosen, kind = options["variant"], options["platform"]
    config = base_config(kind, options["changes"] | chosen["changes"])
    if chosen["code"] == "original":
        run = train_step.original_step(tutorial, config, options["original"])
    else:
        change = chosen["code"] and getattr(other_code, chosen["code"])
        run = train_step.our_step(tutorial, config, change)
    spent, _ = timed_steps(run, min(15.0, options["seconds"] / 3))
    tokens_per_s, mfu = speed_of(config, spent, options["peak"])
    more = f"MFU {mfu:.1%}, {gib(used(jax.devices()[0]))}"
    add(tokens_per_s=tokens_per_s, more=more)


def profile(options: dict, add: Callable) -> None:
    """Where three steps spend their time."""
    config = base_config(options["platform"], options["changes"])
    run, folder = (
        train_step.our_step(tutorial, config),
        Path(options["folder"]) / "trace",
    )
    shutil.rmtree(folder, ignore_errors=True)
    run(), run()
    settings = jax.profiler.ProfileOptions()
    settings.python_tracer_level = 0
    jax.profiler.start_trace(str(folder), profiler_options=settings)
    for _ in range(3):
        run()
    jax.profiler.stop_trace()
    (file,) = folder.rglob("*.xplane.pb")
    spent = kernels(jax.profiler.ProfileData.from_file(str(file)).planes)
    total = sum(spent.values())
    found = f"{len(spent)} kernels, {total / 3e6:.2f} ms a step in all"
    check(add, "kernels in the trace", "some", found, total > 0)
    for name, ns in spent.most_common(10):
        measured(add, f"{name:.80}", f"{ns / total:.1%}", ns / total)


def kernels(planes) -> Counter:
    """Nanoseconds of each kernel on the first device, by its name.

    A GPU's kernels are on its streams, a TPU's on the line "XLA Ops"; on a CPU they are
    among all that its threads do, and say which operation of the program they are.
    """
    spent, planes = Counter(), list(planes)
    for plane in planes:
        if plane.name.startswith(("/device:GPU:0", "/device:TPU:0")):
            for line in plane.lines:
                if line.name.startswith(("Stream", "XLA Ops")):
                    for event in line.events:
                        spent[event.name] += event.duration_ns
    if spent:
        return spent
    for plane in planes:
        for line in plane.lines if plane.name == "/host:CPU" else []:
            for event in line.events:
                outer = event.name.startswith(("while", "call", "conditional"))
                if not outer and "hlo_op" in dict(event.stats):
                    spent[event.name] += event.duration_ns
    return spent


def program(options: dict, add: Callable) -> None:
    """A run of `JaxTrainer` in which a worker is killed, and how fast its loop is."""
    if not HAS_RAY:
        skip(add, "a run of 60 steps through Ray", "Ray is missing")
        return
    import ray

    folder = Path(options["folder"]) / "program"
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "data").mkdir(parents=True)
    start({"JAX_PLATFORMS": "cpu"})  # as the notebook's own process
    os.environ["RAY_DATA_LOG_LEVEL"] = "WARNING"
    os.environ["RAY_TRAIN_ENABLE_PRINT_PATCH"] = "0"
    os.environ["RAY_TRAIN_HEALTH_CHECK_INTERVAL_S"] = "0.5"
    config = program_config(options, folder)
    write_tokens(config)
    start_ray("local", include_dashboard=False)
    try:
        loop = watched_loop(folder)
        began = time.perf_counter()
        tutorial.make_trainer(config, loop).fit()
        judge_program(options, config, folder, time.perf_counter() - began, add)
    finally:
        ray.shutdown()
        shutil.rmtree(folder / "runs", ignore_errors=True)


def program_config(options: dict, folder: Path):
    """60 steps on all devices: a worker each, or one for a TPU host; two on CPUs."""
    kind, n = options["platform"], options["count"]
    one = base_config(kind, options["changes"])
    shape = {
        "cpu": {"num_workers": 2, "cpus_per_worker": 0.5},
        "gpu": {"num_workers": n},
        "tpu": {"num_workers": 1, "devices_per_worker": n, "accelerator_type": None},
    }[kind]
    devices = 2 if kind == "cpu" else n
    windows = max(2, one.batch_size // devices) if kind == "cpu" else one.batch_size
    return dataclasses.replace(
        one,
        **shape,
        batch_size=windows * devices,
        device_batch_size=windows,
        warmup_steps=10,
        decay_steps=STEPS,
        max_steps=STEPS,
        eval_interval=20,
        eval_steps=1,
        log_interval=10,
        dataset="builtin",
        run_name="verify",
        data_dir=str(folder / "data"),
        storage_path=str(folder / "runs"),
    )


def write_tokens(config) -> None:
    """Token files of the bytes of Python's help pages: no vocabulary has to be fetched."""
    from pydoc_data.topics import topics

    text = np.frombuffer("\0".join(topics.values()).encode(), np.uint8)
    least = config.batch_size * (config.block_size + 1) + 1
    text = np.tile(text, -(-2 * least // len(text))).astype(config.token_dtype)
    for split, tokens in (("train", text[least:]), ("val", text[:least])):
        tokens.tofile(Path(config.data_dir) / f"{split}.bin")


def watched_loop(folder: Path) -> Callable:
    """The notebook's loop; it pauses for the bare step, and its last worker dies once.

    The notebook's functions are replaced here, and travel to the workers as they are. Each
    worker leaves in `folder` what it is, and each attempt its losses and times.
    """
    train_loop, bare_step = tutorial.train_loop_per_worker, tutorial.train_step
    bare_steps, pauses, killed = BARE, PAUSES, KILLED
    seen = {"step": 0, "first": 0, "losses": {}, "bare": [], "whole": [], "start": None}

    def keep() -> None:
        losses = {
            n: [float(x).hex() for x in pair] for n, pair in seen["losses"].items()
        }
        text = json.dumps(seen | {"losses": losses, "start": None})
        new = folder / "new"
        new.write_text(text)
        new.rename(folder / f"from-{seen['first']}.json")

    def pause(state, windows, config) -> None:
        jax.block_until_ready(state)
        if seen["start"]:
            seen["whole"].append(time.perf_counter() - seen["start"])
        copy = jax.block_until_ready(jax.tree.map(jnp.copy, state))
        before = time.perf_counter()
        for _ in range(bare_steps):
            copy, _ = bare_step(copy, windows, config)
        jax.block_until_ready(copy)
        seen["bare"].append((time.perf_counter() - before) / bare_steps)
        seen["start"] = time.perf_counter()

    def watched_step(state, windows, config):
        if isinstance(state.step, jax.core.Tracer):  # the launch looks at the program
            return bare_step(state, windows, config)
        if not seen["step"]:
            seen["first"] = seen["step"] = int(state.step)
        seen["step"] += 1
        first_attempt = seen["first"] == 0
        if first_attempt and seen["step"] in pauses:
            pause(state, windows, config)
        if first_attempt and seen["step"] == killed:
            if jax.process_index() == 0:
                keep()
            if jax.process_index() == jax.process_count() - 1:
                saved = config.run_path / "step_00000040"  # in the background
                end = time.monotonic() + 60
                paths = folder / "from-0.json", saved
                while not all(p.exists() for p in paths) and time.monotonic() < end:
                    time.sleep(0.05)
                os.kill(os.getpid(), signal.SIGKILL)
        state, metrics = bare_step(state, windows, config)
        seen["losses"][seen["step"]] = metrics["loss"], metrics["grad_norm"]
        return state, metrics

    def loop(settings: dict) -> None:
        train_loop(settings)
        if jax.process_index() == 0:
            keep()
        gpus = os.environ.get("CUDA_VISIBLE_DEVICES")
        mine = [str(device) for device in jax.local_devices()]
        about = {"gpus": gpus, "devices": mine, "kind": jax.local_devices()[0].platform}
        about |= {"workers": jax.process_count(), "all": jax.device_count()}
        (folder / f"worker-{jax.process_index()}.json").write_text(json.dumps(about))

    tutorial.train_step = watched_step
    return loop


def judge_program(options, config, folder: Path, seconds: float, add) -> None:
    """Record what a run has left behind."""
    known = [json.loads(path.read_text()) for path in sorted(folder.glob("worker-*"))]
    n, kind = config.num_workers, options["platform"]
    expected = f"{n} x {config.devices_per_worker} devices of the platform {kind}"
    mine = [worker["devices"] for worker in known]
    found = "; ".join(", ".join(names) for names in mine)
    joined = all(w["workers"] == n and w["kind"] == kind for w in known)
    passed = joined and len(known) == n and len({*map(tuple, mine)}) == n
    check(add, "the workers form one JAX program", expected, found, passed)
    if kind == "gpu" and n > 1:
        gpus = [worker["gpus"] for worker in known]
        passed = len({*gpus}) == n
        check(add, "no two workers share a GPU", "they don't", f"GPUs {gpus}", passed)
    else:
        reason = f"it takes two GPUs, and there are {n if kind == 'gpu' else 0}"
        skip(add, "no two workers share a GPU", reason)

    path = config.run_path / "metrics.jsonl"
    log = [json.loads(line) for line in path.read_text().splitlines()]
    steps = [line["step"] for line in log]
    expected = list(range(10, STEPS + 1, 10))
    found = f"{steps}, in {seconds:.0f} s with both starts"
    check(
        add, f"{STEPS} steps, each logged once", str(expected), found, steps == expected
    )
    first, last = log[0]["loss"], log[-1]["loss"]
    check(add, "the loss falls", f"below {first:.3f}", f"{last:.3f}", last < first)

    before, after = (
        json.loads((folder / f"from-{k}.json").read_text()) for k in (0, 40)
    )
    twice = [n for n in before["losses"] if n in after["losses"]]
    same = [n for n in twice if before["losses"][n] == after["losses"][n]]
    expected = f"steps 41 to {KILLED - 1} again, loss and gradients' norm bit for bit"
    found = f"{len(same)} of {len(twice)} steps the same"
    passed = len(twice) == KILLED - 41 and same == twice
    check(add, "a worker is killed, and the run continues", expected, found, passed)

    bare = float(np.mean(before["bare"]))
    whole = before["whole"][0] / (PAUSES[1] - PAUSES[0])
    text = f"{bare / whole:.2f} of the bare step's speed: {1e3 * whole:.1f} ms a step, "
    text += f"the bare step {1e3 * bare:.1f} ms"
    if kind == "cpu":  # Ray Data's tasks take of the same cores
        measured(add, "the loop between two saves", text, bare / whole)
    else:
        passed = bare / whole >= 0.9
        check(add, "the loop between two saves", "at least 0.90", text, passed)
    saving = before["whole"][1] - whole * (PAUSES[2] - PAUSES[1])
    text = (
        f"{saving:.2f} s for an evaluation, a report to Ray, and a save beside training"
    )
    measured(add, "what a checkpoint costs the loop", text, saving)
