"""Rehearse a run on the cluster that is there, in some minutes, and print what fell short.

    python benchmarks/rehearse.py CONFIG [--storage FOLDER] [--notice]

With the workers of the configuration's `scaling`, and its model: compares gradients and
attention with float32 on the CPU, measures the train step on one device and on all, writes and
reads a checkpoint, and trains 40 steps of random tokens, in which a worker is killed, or, with
`--notice`, a worker's node is drained, but not the head, and the cluster must have room
elsewhere. `--storage` is the folder that all nodes share, in which it leaves a folder
`rehearsal-*`.
"""

import argparse
import contextlib
import dataclasses
import os
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from statistics import median

import common

import trainkit

trainkit.set_up_driver()

import jax
import numpy as np
import ray
import ray.train
from ray.train import ScalingConfig, collective

from trainkit import checkpoint_reader, workers
from trainkit.config import TrainingConfig
from trainkit.config_files import load_config

STEPS, SAVE_AT, KILL_AT = 40, 16, 21
NOTICE_S = 30  # from a notice until its node ends
PAUSE_S = 5  # in each step after a notice, so that the run doesn't end before the node


def compare() -> str:
    """What tests/test_device.py finds on the devices of a worker: "passed", or what failed."""
    command = [sys.executable, "-m", "pytest", "-q", "tests/test_device.py"]
    variables = os.environ | {"JAX_PLATFORMS": os.environ.get("REHEARSED", "")}
    done = subprocess.run(command, env=variables, capture_output=True, text=True)
    lines = (done.stdout + done.stderr).strip().splitlines()
    return "passed" if done.returncode == 0 else "\n".join(lines[-20:])


def time_steps(tutorial, config: TrainingConfig, devices: list) -> tuple[float, dict]:
    """Seconds of a step of random tokens, the median of ten, and the state after them."""
    mesh = tutorial.create_mesh(config, devices)
    shape = (config.batch_size, config.block_size + 1)
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, config.vocab_size, shape, config.token_dtype)
    rows = tutorial.NamedSharding(mesh, tutorial.P(("data", "fsdp")))
    windows = jax.make_array_from_callback(shape, rows, lambda index: tokens[index])
    with jax.set_mesh(mesh):
        state = tutorial.first_state(config, tutorial.abstract_state(config, mesh))
        times = []
        for _ in range(12):
            start = time.perf_counter()
            state, metrics = tutorial.train_step(state, windows, config)
            jax.block_until_ready(metrics)
            times.append(time.perf_counter() - start)
    return median(times[2:]), state


def measure(settings: dict, tutorial) -> dict:
    """On all workers: the step on one device and on all, and a checkpoint out and in."""
    tutorial.use_assigned_gpus()
    config = workers.start(settings)
    found = {"devices": jax.device_count(), "kind": jax.devices()[0].device_kind}
    each = config.device_batch_size
    shards = jax.device_count() // config.tensor_parallel
    seconds, state = time_steps(
        tutorial, dataclasses.replace(config, batch_size=shards * each), jax.devices()
    )
    found["all"] = shards * each * config.block_size / seconds
    arrays = tutorial.named(state)
    size = sum(x.nbytes for x in arrays.values())
    start = time.perf_counter()
    tutorial.save(config.run_path, arrays, 0, {}, settings).result()
    found["written"] = size / (time.perf_counter() - start)
    path = tutorial.newest(config.run_path)
    like = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), arrays
    )
    mesh = state.step.sharding.mesh
    del state, arrays
    start = time.perf_counter()
    with checkpoint_reader.by_one_replica(mesh):
        jax.block_until_ready(tutorial.restore(path, like))
    found["read"] = size / (time.perf_counter() - start)
    if ray.train.get_context().get_world_rank() == 0:  # the others wait
        alone = dataclasses.replace(config, batch_size=each, fsdp=1, tensor_parallel=1)
        try:
            seconds, _ = time_steps(tutorial, alone, jax.local_devices()[:1])
            found["one"] = each * config.block_size / seconds
        except jax.errors.JaxRuntimeError as error:  # it doesn't fit
            found["one"] = str(error).splitlines()[0][:80]
    collective.barrier()
    return found


def drain() -> None:
    """Give notice that this worker's node will end."""
    context = ray.get_runtime_context()
    command = ["ray", "drain-node", "--address", context.gcs_address]
    command += ["--node-id", context.get_node_id(), "--reason-message", "rehearsal"]
    command += ["--reason", "DRAIN_NODE_REASON_PREEMPTION"]
    command += ["--deadline-remaining-seconds", str(NOTICE_S)]
    subprocess.run(command, check=True)


def is_on_head() -> bool:
    node = ray.get_runtime_context().get_node_id()
    (found,) = [x["Resources"] for x in ray.nodes() if x["NodeID"] == node]
    return "node:__internal_head__" in found


def train(settings: dict, tutorial, notice: bool) -> None:
    """The notebook's loop; the last worker is killed once, or a node is drained."""
    place, context = Path(settings["notes"]), ray.train.get_context()
    hit = place / "hit"  # holds when
    is_first_attempt = not hit.exists()
    is_last = context.get_world_rank() == context.get_world_size() - 1
    may_hit = not is_on_head() if notice else is_last  # without its head, no cluster
    add = tutorial.run_log.RunLog.add

    def add_and_note(log, step, metrics, saving):
        line = add(log, step, metrics, saving)
        if context.get_world_rank() == 0:
            with (place / "lines").open("a") as file:
                print(step, float(metrics["loss"]), time.time(), os.getpid(), file=file)
        if step == KILL_AT and may_hit and is_first_attempt:
            ray.train.get_all_reported_checkpoints()  # waits until Ray has the one before
            # Of several workers, one.
            with contextlib.suppress(FileExistsError), hit.open("x") as file:
                print(time.time(), file=file, flush=True)
                drain() if notice else os.kill(os.getpid(), 9)
        if notice and step >= KILL_AT and is_first_attempt:
            time.sleep(PAUSE_S)
        return line

    tutorial.run_log.RunLog.add = add_and_note
    tutorial.train_loop_per_worker(settings)


def what_happened(place: Path) -> dict:
    """Of the run with a kill: seconds to the next new step, and losses of both attempts."""
    if not (place / "hit").exists():
        sys.exit("--notice: all workers were on the head, whose node can't be drained")
    rows = [line.split() for line in (place / "lines").read_text().splitlines()]
    hit = float((place / "hit").read_text())
    attempts: dict[str, dict[int, tuple[float, float]]] = {}
    for step, loss, at, process in rows:
        attempts.setdefault(process, {})[int(step)] = float(loss), float(at)
    if len(attempts) < 2:
        sys.exit(f"No restart was seen in {STEPS} steps: Ray let the node go on")
    before, after, *_ = attempts.values()
    first, second = ({s: x for s, (x, _) in a.items()} for a in (before, after))
    both, begun = sorted(first.keys() & second.keys()), min(after)
    return {
        "seconds": after[begun][1] - hit,
        "from": begun - 1,
        "last": max(second),
        "pairs": [(step, first[step], second[step]) for step in both],
    }


def rehearse(config: TrainingConfig, tutorial, notice: bool) -> list[list[str]]:
    scaling = ScalingConfig(**config.scaling)
    chips = {"TPU": scaling.num_tpus_per_worker} if scaling.use_tpu else {}
    where = ray.remote(num_gpus=scaling.num_gpus_per_worker, resources=chips)(compare)
    kind = "" if scaling.use_gpu or scaling.use_tpu else "cpu"
    variables = {"env_vars": {"REHEARSED": kind}}
    compared = ray.get(where.options(runtime_env=variables).remote())

    notes = Path(config.data_dir).parent
    rng = np.random.default_rng(0)
    Path(config.data_dir).mkdir(parents=True)
    shards = config.batch_size * config.block_size
    for split, count in (("train", 4 * shards + 1), ("val", 2 * shards + 1)):
        tokens = rng.integers(0, config.vocab_size, count).astype(config.token_dtype)
        tokens.tofile(f"{config.data_dir}/{split}.bin")

    def fit(config: TrainingConfig, loop, **more) -> ray.train.Result:
        trainer = tutorial.make_trainer(config, loop)
        trainer.train_loop_config |= more
        return tutorial.fit(trainer)

    speed = dataclasses.replace(config, run_name="speed")
    found = fit(speed, partial(measure, tutorial=tutorial)).return_value
    loop = partial(train, tutorial=tutorial, notice=notice)
    fit(dataclasses.replace(config, run_name="run"), loop, notes=str(notes))
    happened = what_happened(notes)

    one, count = found["one"], found["devices"]
    share = found["all"] / (one * count) if isinstance(one, float) else None
    rows = [["gradients and attention beside float32", compared]]
    rows.append([f"tokens/s on {count} x {found['kind']}", f"{found['all']:,.0f}"])
    rows.append(["on one", f"{one:,.0f}" if share else one])
    rows.append(["scaling efficiency", f"{share:.0%}" if share else "-"])
    for what in ("written", "read"):
        rows.append(
            [f"checkpoint {what}, with its start", f"{found[what] / 2**30:.3f} GiB/s"]
        )
    what, after = ("node's end", NOTICE_S) if notice else ("kill", 0)
    seconds = happened["seconds"] - after
    rows.append([f"from the {what} to the next step", f"{seconds:.0f} s"])
    rows.append(["continued from step", str(happened["from"])])
    far = [abs(a - b) for _, a, b in happened["pairs"]]
    shown = f"{max(far):.2g} in {len(far)} steps" if far else "no step ran twice"
    rows.append(["largest difference of a loss that was computed twice", shown])
    short = []
    if compared != "passed":
        short.append("kernels")
    if share and share < 0.8:
        short.append("scaling")
    if happened["last"] != STEPS or (far and max(far) > 1e-2):
        short.append("the run")
    return [*rows, ["fell short", ", ".join(short) or "nothing"]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("config")
    parser.add_argument("--storage", default="storage", type=os.path.abspath)
    parser.add_argument("--notice", action="store_true")
    options = parser.parse_args()
    left_out = [".git", ".venv", "build", "images", "storage"]
    ray.init(runtime_env={"working_dir": str(common.ROOT), "excludes": left_out})
    tutorial = common.load_notebook()
    place = f"{options.storage}/rehearsal-{time.strftime('%Y%m%d-%H%M%S')}"
    changes = {"data_dir": f"{place}/data", "storage_path": f"{place}/runs"}
    changes |= {"max_steps": STEPS, "eval_interval": SAVE_AT, "save_interval": None}
    changes |= {"keep_every": 0, "branch_from": None}
    changes |= {"log_interval": 1, "notice_interval": 1, "run_name": "run"}
    config = load_config(options.config, options.storage, **changes)
    config = dataclasses.replace(config, eval_windows=config.batch_size)
    rows = rehearse(config, tutorial, options.notice)
    ray.shutdown()  # which shows bars until then
    common.print_table(
        ["what", options.config], rows, ["jax", "ray", "orbax-checkpoint"]
    )
    sys.exit(rows[-1][1] != "nothing")


if __name__ == "__main__":
    main()
