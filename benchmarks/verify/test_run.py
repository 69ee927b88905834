"""A run of `JaxTrainer` on all devices, one of whose workers is killed."""

import dataclasses
import json
import os
import shutil
import signal
import statistics
from functools import partial
from pathlib import Path

import common
import jax
import notebook_module
import numpy as np
import pytest

STEPS, KILLED, SAVED, LOGGED = 60, 55, 40, 5
ALONE = (30, 35)  # lines of the log of steps between an evaluation and the next
RECIPE = {"warmup_steps": 10, "decay_steps": STEPS, "max_steps": STEPS}
RECIPE |= {"log_interval": LOGGED, "eval_interval": 20, "eval_steps": 1}
RECIPE |= {"dataset": "builtin", "run_name": "verify", "accelerator_type": None}

pytestmark = pytest.mark.skipif(not notebook_module.HAS_RAY, reason="Ray is missing")


@pytest.fixture(scope="module")
def run(tutorial, base, pytestconfig):
    """A run that has ended: its configuration, its workers, and its log.

    The log comes twice: whole, and as it was when a worker was killed.
    """
    import ray

    if pytestconfig.option.rehearse:
        pytest.skip("nothing runs in a rehearsal")
    folder = pytestconfig.option.into / "run"
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "data").mkdir(parents=True)
    os.environ["RAY_DATA_LOG_LEVEL"] = "WARNING"
    os.environ["RAY_TRAIN_ENABLE_PRINT_PATCH"] = "0"
    os.environ["RAY_TRAIN_HEALTH_CHECK_INTERVAL_S"] = "0.5"
    jax.config.update("jax_platforms", "cpu")  # as the notebook's own process
    common.start_ray("local", include_dashboard=False)
    count = int(ray.cluster_resources().get(base.platform.upper(), 0))
    config = run_config(base, count, folder)
    write_tokens(config)
    tutorial.make_trainer(config, watched_loop(tutorial, folder)).fit()
    workers = [json.loads(path.read_text()) for path in sorted(folder.glob("worker-*"))]
    paths = (config.run_path / "metrics.jsonl", folder / "before.jsonl")
    yield config, workers, *([*map(json.loads, p.open())] for p in paths)
    ray.shutdown()
    shutil.rmtree(folder)


def run_config(one, count: int, folder: Path):
    """60 steps on all devices: a worker each, or one for a TPU host; two on CPUs."""
    shape = {
        "cpu": {"num_workers": 2, "cpus_per_worker": 0.5},
        "gpu": {"num_workers": count},
        "tpu": {"num_workers": 1, "devices_per_worker": count},
    }[one.platform]
    shape["batch_size"] = one.batch_size * max(count, shape["num_workers"])
    places = {"data_dir": str(folder / "data"), "storage_path": str(folder / "runs")}
    return dataclasses.replace(one, **shape, **places, **RECIPE)


def write_tokens(config) -> None:
    """Token files of the bytes of Python's help pages: no vocabulary has to be fetched."""
    from pydoc_data.topics import topics

    text = np.frombuffer("\0".join(topics.values()).encode(), np.uint8)
    least = config.batch_size * (config.block_size + 1) + 1
    text = np.tile(text, -(-2 * least // len(text))).astype(config.token_dtype)
    for split, tokens in (("train", text[least:]), ("val", text[:least])):
        tokens.tofile(Path(config.data_dir) / f"{split}.bin")


def watched_loop(tutorial, folder: Path):
    """The notebook's loop, in which the first worker dies once; each says what it has."""
    train_loop, before = tutorial.train_loop_per_worker, folder / "before.jsonl"

    def die_once(run_path: Path, line: dict) -> None:
        saved = (run_path / f"step_{SAVED:08}").exists()
        if line["step"] >= KILLED and saved and not before.exists():
            shutil.copy(run_path / "metrics.jsonl", before)
            os.kill(os.getpid(), signal.SIGKILL)

    def loop(settings: dict) -> None:
        run_path = Path(settings["storage_path"]) / settings["run_name"]
        train_loop(settings, partial(die_once, run_path))
        about = {
            "platform": jax.default_backend(),
            "workers": jax.process_count(),
            "devices": [str(device) for device in jax.local_devices()],
            "gpus": os.environ.get("CUDA_VISIBLE_DEVICES"),
        }
        (folder / f"worker-{jax.process_index()}.json").write_text(json.dumps(about))

    return loop


def test_workers(record, run):
    """The workers form one JAX program."""
    config, workers, *_ = run
    count, platform = config.num_workers, config.platform
    names = [worker["devices"] for worker in workers]
    joined = len({*map(tuple, names)}) == len(workers) == count
    for worker in workers:
        joined &= (worker["platform"], worker["workers"]) == (platform, count)
    expected = f"{count} x {config.devices_per_worker} {platform}"
    record("the workers form one JAX program", str(names), expected, joined)
    gpus = [worker["gpus"] for worker in workers]
    if platform == "gpu" and count > 1:
        alone = len({*gpus}) == count
        record("no two workers share a GPU", f"GPUs {gpus}", "they don't", alone)


def test_continued(record, run):
    """The log of a run in which a worker is killed."""
    _, _, whole, before = run
    steps, expected = [x["step"] for x in whole], [*range(LOGGED, STEPS + 1, LOGGED)]
    record("each step is logged once", str(steps), str(expected), steps == expected)
    first, last = whole[0]["loss"], whole[-1]["loss"]
    record("the loss falls", f"{last:.3f}", f"below {first:.3f}", last < first)
    keys = ("step", "loss", "grad_norm")
    again, once = (
        [[x[k] for k in keys] for x in log if SAVED < x["step"] <= KILLED]
        for log in (whole, before)
    )
    expected = f"loss and gradients' norm to the bit: {once}"
    what = "a worker is killed, and the run continues"
    record(what, str(again), expected, len(again) == 3 and again == once)


def test_loop(record, run, report):
    """The loop between two evaluations, beside the step alone."""
    config, _, _, log = run
    step = {row["what"]: row.get("value") for row in report["parts"].get("step", [])}
    if not step.get("tokens/s"):
        pytest.skip("the step alone wasn't measured")
    speeds = [line["tokens_per_s"] for line in log if line["step"] in ALONE]
    devices = config.num_workers * config.devices_per_worker
    ratio = statistics.median(speeds) / step["tokens/s"] / devices
    text = f"{ratio:.2f} of the speed of {devices} devices, each with its step alone"
    # On CPUs, all share the same cores.
    expected = "" if config.platform == "cpu" else "at least 0.80"
    passed = not expected or ratio >= 0.8
    record("the loop between two evaluations", text, expected, passed, ratio)
