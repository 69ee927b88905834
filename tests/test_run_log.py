"""The run's log: its lines, where they go, and what ends a run."""

import json
import math
import os
import re
import signal
import threading
from dataclasses import asdict
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest
import ray.train
from accidents import as_worker, in_the_background, last_step, log_of, wait_for
from samples import python, run_from_guide

from trainkit import run_log


def at_step(step: int) -> dict:
    """A state that has no more than that."""
    return {"step": jnp.array(step)}


def settings_of(config, **more) -> dict:
    return {"config": asdict(config), **more}


def test_lines_after_a_restart(small, monkeypatch, capfd):
    """Every fifth step and at a save: the last step's numbers, tokens, and the speed.

    Later lines than the checkpoint's go, and what was cut off. What `send` does with a line
    changes nothing, and its error doesn't end the run.
    """
    now, told, sent, waited, shown = [100.0], [], [], [], []
    bar = SimpleNamespace(update=lambda n=1: shown.append(n), close=list)
    monkeypatch.setattr(run_log.tqdm_ray, "tqdm", lambda desc, total: bar)
    monkeypatch.setattr(run_log.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(jax, "block_until_ready", waited.append)

    def send(line: dict) -> None:
        sent.append(dict(line))
        line.clear()
        raise ConnectionError("gone")

    config = small(max_steps=12, log_interval=5)
    old = [json.dumps({"step": step}) for step in (5, 7, 10)] + ["\0\0", '{"step": 1']
    config.run_path.mkdir(parents=True)
    (config.run_path / "metrics.jsonl").write_text("\n".join(old))

    def loop() -> None:
        val = {"windows": 1_234, "bytes_per_token": 4.0}
        with run_log.RunLog(settings_of(config, val=val), at_step(7), send) as log:
            for step in range(8, 13):
                now[0] += 0.25  # for 4 windows of 16 tokens
                evaluated = {"val_loss": 4.0} if step == 12 else {}
                told.append(log.add(step, {"loss": 2.0 * step} | evaluated, step == 12))

    as_worker(loop)
    # Without a speed: of no step but the first two, and of one before an evaluation.
    first = {"step": 10, "tokens": 640, "loss": 20, "mean_loss": 18}
    last = {"step": 12, "tokens": 768, "loss": 24, "val_loss": 4, "mean_loss": 23}
    last["val_bits_per_byte"] = 1 / math.log(2)  # of a nat a byte
    assert sent == [first, last]
    assert log_of(config) == [{"step": 5}, {"step": 7}, first, last]
    assert told == [None, None, first, None, last]
    assert shown == [7, 1, 1, 1, 1, 1]  # the bar, of 12 steps
    # At most two steps ahead; and at a line, for what it shows
    assert waited == [None, None, {"loss": 16}, 20, None, None, 24]
    said = capfd.readouterr().out
    for line in (
        "run continues at step 7, with the same recipe and tokens; code isn't compared"
        " | devices 1 | mesh 1 x 1 x 1 | batch 4 | per device 4 | micro-batches 1 x 4 | state",
        "| val 8 of 1,234",
        "step 12 | tokens 768 | loss 24 | val_loss 4 | mean_loss 23 | val_bits_per_byte 1.443",
        "send failed at step 12; the run continues: ConnectionError('gone')",
    ):
        assert line in said


def test_a_line_is_appended(small):
    """A day of lines isn't written anew at each step; at a start, all are, or none."""
    config = small(log_interval=1)
    config.run_path.mkdir(parents=True)
    (config.run_path / "metrics.jsonl").touch()
    files = [os.stat(config.run_path / "metrics.jsonl").st_ino]

    def loop() -> None:
        with run_log.RunLog(settings_of(config), at_step(0)) as log:
            for step in (1, 2):
                log.add(step, {"loss": 1.0}, False)
                files.append(os.stat(config.run_path / "metrics.jsonl").st_ino)
        for bad in (math.inf, math.nan):
            with run_log.RunLog(settings_of(config), at_step(2)) as log:
                assert log.add(3, {"loss": 1.0, "grad_norm": bad}, True) is None
            assert log.diverged
            note = config.run_path / "diverged.txt"
            assert f"diverged at step 3: grad_norm {bad} | loss 1" in note.read_text()
            note.unlink()

    as_worker(loop)
    assert [line["step"] for line in log_of(config)] == [1, 2]
    files.append(os.stat(config.run_path / "metrics.jsonl").st_ino)
    assert files[0] != files[1] == files[2] == files[3]


def test_each_worker_leaves_a_run_that_has_diverged(small, monkeypatch):
    """Also those that write no lines, or they would wait for the first one."""
    other = SimpleNamespace(get_world_rank=lambda: 1)
    monkeypatch.setattr(ray.train, "get_context", lambda: other)
    with run_log.RunLog(settings_of(small()), at_step(0)) as log:
        log.add(1, {"loss": math.nan}, True)
    assert log.diverged


def test_a_log_that_cannot_be_read_is_not_begun_anew(small):
    """Storage may fail for a moment, as a run starts again."""
    config = small()
    config.run_path.mkdir(parents=True)
    path = config.run_path / "metrics.jsonl"
    os.symlink(path, path)  # an OSError

    def loop() -> None:
        with pytest.raises(OSError, match="symbolic links"):
            run_log.RunLog(settings_of(config), at_step(0)).__enter__()

    as_worker(loop)
    assert os.path.islink(path)


def test_a_bucket_has_all_lines_at_the_end(small, monkeypatch):
    """An object can't grow: it is written anew at a save, and when the loop ends."""
    monkeypatch.setattr(run_log.paths, "is_object_store", lambda place: True)
    config = small(log_interval=1)
    config.run_path.mkdir(parents=True)

    def loop() -> None:
        with run_log.RunLog(settings_of(config), at_step(0)) as log:
            for step in (1, 2, 3):
                log.add(step, {"loss": 1.0}, step == 2)
                written = [line["step"] for line in log_of(config)]
                assert written == ([1, 2] if step > 1 else [])

    as_worker(loop)
    assert [line["step"] for line in log_of(config)] == [1, 2, 3]


def test_a_tracker_that_hangs_holds_nothing_up(small, monkeypatch, capfd):
    """Neither the steps nor, for long, the end of the run."""
    monkeypatch.setattr(run_log, "_PATIENCE", 1)
    config = small(log_interval=1)
    config.run_path.mkdir(parents=True)
    held, sent = threading.Event(), []

    def send(line: dict) -> None:
        sent.append(line["step"])
        held.wait()

    def loop() -> None:
        with run_log.RunLog(settings_of(config), at_step(0), send) as log:
            for step in (1, 2):
                log.add(step, {"loss": 1.0}, False)

    as_worker(loop)
    assert sent == [1] and [line["step"] for line in log_of(config)] == [1, 2]
    assert "send took over 1 s" in capfd.readouterr().out
    held.set()


def test_what_a_device_does_and_holds(tutorial, small, monkeypatch, capfd):
    """MFU, where the peak is known, and the memory that the state takes on each device."""
    for kind, flops in run_log._PEAK_FLOPS.items():  # whatever else begins as it does
        for more in ("", "-SXM4-80GB", " 80GB HBM3"):
            assert run_log.peak_flops(kind + more) == flops
    assert run_log.peak_flops("NVIDIA L40S") == 362e12  # which is no L4
    assert run_log.peak_flops("GH200") is None  # nor is this an H200
    config = small(fsdp=2, log_interval=1)
    mesh = jax.sharding.AbstractMesh((1, 2, 1), ("data", "fsdp", "tensor"))
    arrays = tutorial.named(tutorial.abstract_state(config, mesh)) | at_step(0)
    monkeypatch.setattr(run_log, "_PEAK_FLOPS", {jax.devices()[0].device_kind: 1e9})
    monkeypatch.setattr(jax, "device_count", lambda: 2)
    now = iter([100.0, 100.5])
    monkeypatch.setattr(run_log.time, "perf_counter", now.__next__)
    config.run_path.mkdir(parents=True)

    def loop() -> dict:
        with run_log.RunLog(settings_of(config), arrays) as log:
            log.add(1, {"loss": 1.0}, False)
            return log.add(2, {"loss": 1.0}, False)

    # 2 layers, 32 wide: 12 D^2 in matrices, 13 D in biases and norms each; 640 rows of tokens,
    # which are the output layer. Positions are only looked up, and so are tokens if there is
    # another output layer.
    weights = 2 * (12 * 32**2 + 13 * 32) + 2 * 32 + 640 * 32
    untied = arrays | {"model.head.kernel": jax.ShapeDtypeStruct((32, 640), "float32")}
    two = [run_log.flops_per_token(config, x) for x in (arrays, untied)]
    assert two[0] == two[1]
    flops = 6 * weights + 12 * 2 * 32 * 16
    speed = 4 * 16 / 0.5
    line = as_worker(loop)
    assert line["mfu"] == pytest.approx(speed * flops / 2e9)
    said = capfd.readouterr().out
    assert "largest that isn't sharded model.h.0.mlp.c_fc.bias (128,)" in said
    (found,) = re.findall(r"state ([\d.]+) MiB each", said)
    assert float(found) == pytest.approx(3 * 4 * (weights / 2 + 512) / 2**20, rel=0.2)


def test_the_speed_is_that_of_training_steps(small, monkeypatch):
    """Neither of what is compiled at a start, nor of evaluations, nor of waits for a save. A
    step takes 1 s, the first one 50, an evaluation 20, the first one 40 more, and a save 30.
    Nobody waits for more than the log has always waited for.
    """
    config, waits = small(log_interval=4, max_steps=100), []
    config.run_path.mkdir(parents=True)
    clock, device = [0.0], [0.0]  # what the host, and the device, have come to
    done_at = {}

    def wait(values) -> None:
        for value in jax.tree.leaves(values):
            clock[0] = max(clock[0], done_at.get(value, 0))
            waits.append(value)

    def compute(value: float, seconds: float) -> float:
        device[0] = done_at[value] = max(device[0], clock[0]) + seconds
        return value

    monkeypatch.setattr(run_log.time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(jax, "block_until_ready", wait)
    monkeypatch.setattr(jax, "device_get", lambda x: wait(x) or x)
    monkeypatch.setattr(run_log, "_is_done", lambda x: done_at[x["loss"]] <= clock[0])

    def loop() -> list[dict]:
        lines = []
        with run_log.RunLog(settings_of(config), at_step(0)) as log:
            for step in range(1, 33):
                clock[0] += 50 if step == 1 else 0  # it is compiled
                metrics = {"loss": compute(float(step), 1)}
                if due := step % 16 == 0:
                    clock[0] += 40 if step == 16 else 0  # the evaluation is compiled
                    metrics["val_loss"] = compute(step + 0.5, 20)
                lines.append(log.add(step, metrics, saving=due))
                clock[0] += 30 if due else 0
        return [line for line in lines if line]

    lines = as_worker(loop)
    assert [line["step"] for line in lines] == [*range(4, 33, 4)]
    assert {line["tokens_per_s"] for line in lines} == {64}
    assert clock[0] == 32 + 50 + 2 * (20 + 30) + 40 - 3  # steps, while it is compiled


HANG = """
import ctypes, sys, time
import jax
sys.path.append("tests")
from accidents import as_worker
from trainkit.config import TrainingConfig
from trainkit.run_log import RunLog

def wait_in_c(seconds):
    ctypes.PyDLL(None).sleep(seconds)  # which keeps the interpreter's lock

config = TrainingConfig(storage_path=sys.argv[1], run_name="run", stall_timeout_s=4.0)
config.run_path.mkdir(parents=True)

def loop():
    with RunLog({"config": vars(config)}, {"step": jax.numpy.array(0)}) as log:
        for step in range(1, 8):
            time.sleep(0.8)
            log.add(step, {"loss": 1.0}, False)
    time.sleep(4.5)
    print("outside, nothing is watched", flush=True)
    with RunLog({"config": vars(config)}, {"step": jax.numpy.array(4)}) as log:
        wait_in_c(60)

as_worker(loop)
"""


def test_watchdog_ends_a_process_that_hangs_in_c(tmp_path):
    words = r"(?s)outside, nothing is watched.*Timeout.*in wait_in_c"
    with pytest.raises(AssertionError, match=words):
        python(HANG, tmp_path)


@pytest.mark.extra
def test_a_tracker_gets_the_lines(tutorial, cluster, small, write_bins, tmp_path):
    """By the guide's function, though a worker is killed between, and up to the last step."""
    config = write_bins(small(n_layer=1, max_steps=30, run_name="tracked"))

    def make_trainer(config, loop):
        trainer = tutorial.make_trainer(config, loop)
        places = {"WANDB_MODE": "offline", "WANDB_DIR": str(tmp_path)}
        trainer.run_config.worker_runtime_env["env_vars"] |= places
        return trainer

    track = run_from_guide(" wandb", vars(tutorial) | {})["track"]
    with in_the_background(make_trainer(config, track).fit) as finish:
        wait_for(lambda: last_step(config) >= 13, pause=0.005, what="step 13")
        pid = (config.run_path / "locked-by.txt").read_text().split()[1]
        os.kill(int(pid), signal.SIGKILL)
        finish()
    assert [line["step"] for line in log_of(config)] == list(range(1, 31))
    written = b"".join(path.read_bytes() for path in tmp_path.rglob("run-*.wandb"))
    found = {
        int(digits) for digits in re.findall(rb"\x04step\x82\x01\x02(\d\d)", written)
    }
    assert found >= set(range(21, 31)), found
    assert b"warmup_steps" in written  # the configuration
