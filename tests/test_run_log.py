"""The run's log: its lines, TensorBoard, MFU, and a profile."""

import gzip
import json
import math
import re
import struct
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import jax
import pytest
from samples import windows_for
from tensorboardX.proto import event_pb2

import trainkit.config
import trainkit.run_log
import trainkit.states

ROOT = Path(__file__).resolve().parent.parent


class State(NamedTuple):
    step: jax.Array


def state_at(step: int) -> State:
    return State(jax.numpy.int32(step))


def test_log_line_has_speed_and_mfu(tutorial, small, monkeypatch):
    """On a device whose peak is known, by nanoGPT's formula."""
    gpt2 = trainkit.config.TrainingConfig()
    flops = trainkit.run_log.flops_per_token(
        gpt2, trainkit.states.count_parameters(tutorial.create_model, gpt2)
    )
    assert flops == pytest.approx(855.2e6, rel=1e-3)
    monkeypatch.setitem(trainkit.run_log.PEAK_FLOPS, jax.devices()[0].device_kind, 1e12)
    config = small()
    config.run_path.mkdir(parents=True)
    n_params = trainkit.states.count_parameters(tutorial.create_model, config)
    log = trainkit.run_log.RunLog(config, state_at(0), n_params)
    for step in (1, 2):
        log.add(step, {"loss": jax.numpy.float32(3), "grad_norm": jax.numpy.float32(1)})
    log.write()
    (line,) = map(
        json.loads, (config.run_path / "metrics.jsonl").read_text().splitlines()
    )
    assert (line["step"], line["tokens"], line["loss"]) == (2, 2 * 4 * 16, 3.0)
    flops = line["tokens_per_s"] * trainkit.run_log.flops_per_token(config, n_params)
    assert line["mfu"] == pytest.approx(flops / 1e12, rel=0.01)


def test_log_forgets_what_comes_after_the_checkpoint(small):
    config = small()
    config.run_path.mkdir(parents=True)
    path = config.run_path / "metrics.jsonl"
    path.write_text(
        "".join(f'{{"step": {n}}}\n' for n in range(1, 6)) + '{"step": 6, "lo'
    )
    trainkit.run_log.RunLog(config, state_at(3), n_params=1)
    assert path.read_text() == "".join(f'{{"step": {n}}}\n' for n in range(1, 4))


def events_of(folder) -> list:
    """TensorBoard's events, from files of length, checksum, event, checksum."""
    data, events = b"".join(f.read_bytes() for f in sorted(folder.iterdir())), []
    while data:
        (length,) = struct.unpack("<Q", data[:8])
        events.append(event_pb2.Event.FromString(data[12 : 12 + length]))
        data = data[16 + length :]
    return events


def test_log_is_there_for_tensorboard_too(small):
    config = small()
    config.run_path.mkdir(parents=True)
    log = trainkit.run_log.RunLog(config, state_at(0), n_params=1)
    log.add(1, {"loss": jax.numpy.float32(3), "grad_norm": jax.numpy.float32(1)})
    log.write()
    time.sleep(3)  # a thread writes the events
    values = {
        value.tag: value.simple_value
        for event in events_of(config.run_path / "tensorboard")
        for value in event.summary.value
        if event.step == 1
    }
    assert values["loss"] == 3 and values["grad_norm"] == 1
    assert values.keys() >= {"tokens", "tokens_per_s"}


def test_profile_of_chosen_steps(tutorial, small):
    config = small(profile_steps=[2, 4])
    config.run_path.mkdir(parents=True)
    state = tutorial.create_state(config)
    log = trainkit.run_log.RunLog(config, state, n_params=1)
    for step, windows in enumerate(windows_for(config, 5), 1):
        state, metrics = tutorial.train_step(state, windows, config)
        log.add(step, metrics)
    log.add(4, metrics)  # as in a run that restarted at step 3
    (trace,) = Path(config.run_path).rglob("perfetto_trace.json.gz")
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    calls = [e for e in events if e.get("name") == "PjitFunction(train_step)"]
    assert len(calls) in (
        2,
        4,
    )  # of 5 steps, the third and fourth; JAX shows a call twice


OPEN_BAR = """
import atexit
from ray.experimental import tqdm_ray

def say():  # after what is registered later
    (group,) = tqdm_ray.instance().bar_groups.values()
    (bar,) = group.bars_by_uuid.values()
    print("closed" if bar.bar.disable else "open")

atexit.register(say)
import trainkit.run_log
bar = tqdm_ray.tqdm(desc="of a worker that is killed", total=10)
bar.update(3)
"""


def test_a_bar_that_is_open_at_the_end_does_no_harm():
    """Python 3.13 would end with a segmentation fault."""
    result = subprocess.run(
        [sys.executable, "-c", OPEN_BAR], cwd=ROOT, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout == "closed\n"


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_validation_loss_that_is_no_number_stops_the_run(small, value):
    """Or its checkpoint would be saved, and be the best: NaN sorts before any number."""
    config = small()
    config.run_path.mkdir(parents=True)
    good = {"loss": 1.0, "grad_norm": 1.0}
    assert not trainkit.run_log.has_diverged(
        config, {4: good | {"val_loss": 1.0}, 5: good}
    )
    bad = good | {"val_loss": value}
    assert trainkit.run_log.has_diverged(config, {6: good, 7: bad})
    note = (config.run_path / "diverged.txt").read_text()
    assert "step 7" in note and "val_loss" in note


@pytest.mark.parametrize(
    "n, text",
    [(0, "0 B"), (1000, "0.977 KiB"), (2**20, "1 MiB"), (1010 * 2**30, "0.986 TiB")],
)
def test_sizes_are_never_written_with_an_exponent(n, text):
    assert trainkit.run_log.format_bytes(n) == text


def test_lines_go_to_weights_and_biases(tutorial, small, tmp_path, monkeypatch):
    """As the guide shows it, offline: the numbers are in the file that `wandb` writes."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    config = small(max_steps=3, log_interval=1)
    config.run_path.mkdir(parents=True)
    text = (ROOT / "docs/guide.md").read_text()
    (code,) = re.findall(r"```python\n(import wandb\n.*?)```", text, re.DOTALL)
    names = {"config": config}
    exec(code, names)
    state = tutorial.create_state(config)
    log = trainkit.run_log.RunLog(config, state, 1, names["send"])
    for step, windows in enumerate(windows_for(config, 3), 1):
        state, metrics = tutorial.train_step(state, windows, config)
        log.add(step, metrics)
        line = log.write()
    names["wandb"].finish()
    (file,) = tmp_path.rglob("run-*.wandb")
    assert repr(line["loss"])[:7].encode() in file.read_bytes()
    assert config.run_name in file.name
