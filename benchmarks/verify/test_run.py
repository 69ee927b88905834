"""A run of `JaxTrainer` on all devices, one of whose workers is killed."""

import dataclasses
import json
import os
import shutil
import signal
import statistics
from pathlib import Path

import common
import jax
import notebook_module
import numpy as np
import pytest

STEPS, SAVED, KILLED, LOGGED = 40, 20, 35, 5
ALONE = (10, 15)  # lines of the log of steps before which nothing is compiled or saved
RECIPE = {"warmup_steps": 10, "decay_steps": STEPS, "max_steps": STEPS}
RECIPE |= {"log_interval": LOGGED, "eval_interval": SAVED, "eval_steps": 1}
RECIPE |= {"dataset": "builtin", "tokenizer": "builtin"}  # which need no network
RECIPE |= {"run_name": "verify", "accelerator_type": None}


def make_config(one, count: int, folder: Path):
    """A run on all devices: a worker each, or one for a TPU host; two on CPUs."""
    shape = {
        "cpu": {"num_workers": 2, "cpus_per_worker": 0.5},
        "gpu": {"num_workers": count},
        "tpu": {"num_workers": 1, "devices_per_worker": count},
    }[one.platform]
    shape["batch_size"] = one.batch_size * max(count, shape["num_workers"])
    places = {"data_dir": str(folder / "data"), "storage_path": str(folder / "runs")}
    config = dataclasses.replace(one, **shape, **places, **RECIPE)
    tokens = np.arange(2 * config.batch_size * (config.block_size + 1)) % 251
    (folder / "data").mkdir(parents=True)
    for split in ("train", "val"):  # something to learn, which nothing has to tokenize
        tokens.astype(config.token_dtype).tofile(folder / f"data/{split}.bin")
    return config


@pytest.mark.skipif(not notebook_module.HAS_RAY, reason="Ray is missing")
def test_run(record, tutorial, base, pytestconfig):
    """A run on all devices, one of whose workers is killed."""
    import ray

    options, platform = pytestconfig.option, base.platform
    if options.rehearse:
        pytest.skip("nothing runs in a rehearsal")
    shutil.rmtree(folder := options.into / "run", ignore_errors=True)
    jax.config.update("jax_platforms", "cpu")  # as the notebook's own process
    common.start_ray("local", include_dashboard=False)
    available = int(ray.cluster_resources().get(platform.upper(), 0))
    config = make_config(base, available, folder)
    saved, killed = config.run_path / f"step_{SAVED:08}", folder / "killed"

    def note(line: dict) -> None:
        """Note each line of the log; the first worker dies once, so some come twice."""
        with (folder / "lines").open("a") as file:
            print(json.dumps(line), file=file)
        if line["step"] >= KILLED and saved.exists() and not killed.exists():
            killed.touch()
            os.kill(os.getpid(), signal.SIGKILL)

    train_loop = tutorial.train_loop_per_worker

    def loop(settings: dict) -> None:
        """The notebook's; afterwards, each worker notes the devices that it has had."""
        train_loop(settings, send=note)
        me = jax.process_index()
        mine = os.environ.get("CUDA_VISIBLE_DEVICES", f"those of process {me}")
        had = f"{jax.default_backend()}, {jax.local_device_count()}: {mine}"
        (folder / f"worker-{me}").write_text(had)

    tutorial.make_trainer(config, loop).fit()
    ray.shutdown()
    lines = [json.loads(line) for line in (folder / "lines").read_text().splitlines()]
    had = {path.read_text() for path in folder.glob("worker-*")}
    shutil.rmtree(folder)

    kind = f"{platform}, {config.devices_per_worker}: "
    own = len(had) == config.num_workers and all(x.startswith(kind) for x in had)
    expected = f"{config.num_workers} workers, each with devices of its own"
    record("workers", "; ".join(sorted(had)), expected, own)
    first, last = lines[0]["loss"], lines[-1]["loss"]
    record("the loss falls", f"{last:.3f}", f"below {first:.3f}", last < first)
    late = [[x[key] for key in ("step", "loss", "grad_norm")] for x in lines]
    late = [numbers for numbers in late if SAVED < numbers[0] <= KILLED]
    once, again = late[: len(late) // 2], late[len(late) // 2 :]
    expected = f"loss and gradients' norm to the bit: {once}"
    same = len(again) == 3 and again == once
    record("a worker is killed, and the run continues", str(again), expected, same)

    rows = options.report["checks"].get("test_step", [])
    if alone := {row["what"]: row.get("value") for row in rows}.get("tokens/s"):
        speeds = [line["tokens_per_s"] for line in lines if line["step"] in ALONE]
        devices = config.num_workers * config.devices_per_worker
        ratio = statistics.median(speeds) / alone / devices
        text = (
            f"{ratio:.2f} of the speed of {devices} devices, each with its step alone"
        )
        # On CPUs, all share the same cores.
        expected = "" if platform == "cpu" else "at least 0.80"
        passed = not expected or ratio >= 0.8
        record("the loop between two evaluations", text, expected, passed, ratio)
