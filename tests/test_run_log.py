"""The run's log: its lines, TensorBoard, MFU, and a profile."""

import gzip
import json
import math
import re
import struct
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import jax
import numpy as np
import pytest
from accidents import wait_for
from samples import windows_for
from tensorboardX.proto import event_pb2

import trainkit.checkpoints
import trainkit.run_log
from trainkit.config import TrainingConfig

ROOT = Path(__file__).resolve().parent.parent


class State(NamedTuple):
    step: jax.Array


def state_at(step: int) -> State:
    return State(jax.numpy.int32(step))


GPT2_PARAMETERS = 124_439_808  # as published


def on_devices(monkeypatch, kind: str, count: int) -> None:
    """Let the run log see so many devices of that kind."""
    monkeypatch.setattr(jax, "devices", lambda: [SimpleNamespace(device_kind=kind)])
    monkeypatch.setattr(jax, "device_count", lambda: count)


def test_mfu_of_a_published_speed(monkeypatch):
    """llm.c reports 468,000 tokens/s for GPT-2 124M on one H100, 40.5 % of its peak."""
    gpt2 = TrainingConfig()
    # 6 x (124,439,808 - 1,024 x 768) + 12 x 12 x 768 x 1,024
    assert trainkit.run_log.flops_per_token(gpt2, GPT2_PARAMETERS) == 855_166_464
    on_devices(monkeypatch, "NVIDIA H100 80GB HBM3", 1)
    peak = trainkit.run_log.peak_tokens_per_s(gpt2, GPT2_PARAMETERS)
    assert 468_000 / peak == pytest.approx(0.405, abs=0.001)
    on_devices(monkeypatch, "NVIDIA H100 80GB HBM3", 16)
    assert trainkit.run_log.peak_tokens_per_s(gpt2, GPT2_PARAMETERS) == 16 * peak
    on_devices(monkeypatch, "cpu", 16)
    assert trainkit.run_log.peak_tokens_per_s(gpt2, GPT2_PARAMETERS) is None


# The devices' own names, as JAX gives them, and their makers' dense bfloat16 TFLOP/s.
PUBLISHED = {
    "NVIDIA A100-SXM4-80GB": 312,
    "NVIDIA H100 PCIe": 756,
    "NVIDIA H100 NVL": 835,
    "NVIDIA H100 80GB HBM3": 989,
    "NVIDIA H200": 989,
    "NVIDIA H200 NVL": 835,
    "NVIDIA GH200 480GB": 989,
    "NVIDIA B200": 2_250,
    "TPU v4": 275,
    "TPU v5 lite": 197,
    "TPU v5": 459,
    "TPU v6 lite": 918,
}


@pytest.mark.parametrize("kind", PUBLISHED)
def test_peaks_are_the_published_ones(monkeypatch, kind):
    on_devices(monkeypatch, kind, 1)
    gpt2 = TrainingConfig()
    peak = trainkit.run_log.peak_tokens_per_s(gpt2, GPT2_PARAMETERS)
    assert peak * 855_166_464 == pytest.approx(PUBLISHED[kind] * 1e12)


def test_lines_have_the_last_step_the_tokens_the_speed_and_the_mfu(
    small, monkeypatch, capsys
):
    """Of lines that are three steps and then two apart, after a restart at step 7."""
    monkeypatch.setitem(trainkit.run_log.PEAK_FLOPS, jax.devices()[0].device_kind, 1e9)
    now = [100.0]
    monkeypatch.setattr(trainkit.run_log.time, "perf_counter", lambda: now[0])
    config, sent = small(max_steps=12), []
    config.run_path.mkdir(parents=True)
    log = trainkit.run_log.RunLog(config, state_at(7), 25_512, sent.append)
    assert log.bar._x == 7
    for step, loss in ((8, 5.0), (9, 4.0), (10, 3.0)):
        log.add(step, {"loss": np.float32(loss), "grad_norm": np.float32(1)})
    now[0] += 0.5
    log.write()
    for step in (11, 12):
        log.add(step, {"loss": np.float32(step), "grad_norm": np.float32(2)})
    assert log.bar._x == 12
    now[0] += 0.25
    log.write()
    lines = (config.run_path / "metrics.jsonl").read_text().splitlines()
    first, last = map(json.loads, lines)
    assert sent == [first, last]
    # A step has 4 windows of 16 tokens; a token takes 6 x (25,512 - 16 x 32)
    # + 12 x 2 x 32 x 16 = 162,288 FLOPs.
    assert first["mfu"] == pytest.approx(384 * 162_288 / 1e9)
    assert last["mfu"] == pytest.approx(512 * 162_288 / 1e9)
    kept = ("step", "tokens", "loss", "grad_norm", "tokens_per_s")
    assert [first[key] for key in kept] == [10, 640, 3.0, 1.0, 384]
    assert [last[key] for key in kept] == [12, 768, 12.0, 2.0, 512]
    said = capsys.readouterr().out
    assert (
        "25,512 parameters | 64 tokens a step | on each of 1 devices: 4 windows as 1"
        in said
    )
    assert (
        "step 10 | tokens 640 | grad_norm 1 | loss 3 | tokens_per_s 384 | mfu 0.06232"
        in said
    )


def test_loop_stays_two_steps_ahead_of_the_device(small, monkeypatch):
    config, waited = small(), []
    config.run_path.mkdir(parents=True)
    log = trainkit.run_log.RunLog(config, state_at(0), n_params=1)
    monkeypatch.setattr(jax, "block_until_ready", waited.append)
    for step in range(1, 6):
        log.add(step, {"loss": step})
    assert waited == [None, None, {"loss": 1}, {"loss": 2}, {"loss": 3}]


def test_other_workers_write_nothing(small, monkeypatch, capsys):
    config, sent = small(), []
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    log = trainkit.run_log.RunLog(config, state_at(0), 1, sent.append)
    log.add(1, {"loss": np.float32(2)})
    line = log.write()
    assert (line["step"], line["loss"]) == (1, 2.0)
    assert not config.run_path.exists() and not sent and not capsys.readouterr().out


def test_log_forgets_what_comes_after_the_checkpoint(small):
    config = small()
    config.run_path.mkdir(parents=True)
    path = config.run_path / "metrics.jsonl"
    path.write_text(
        "".join(f'{{"step": {n}}}\n' for n in range(1, 6)) + '{"step": 6, "lo'
    )
    trainkit.run_log.RunLog(config, state_at(3), n_params=1)
    assert path.read_text() == "".join(f'{{"step": {n}}}\n' for n in range(1, 4))
    trainkit.run_log.RunLog(config, state_at(0), n_params=1)
    assert path.read_text() == ""


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
    folder = config.run_path / "tensorboard"
    (file,) = map(Path, folder.iterdir())
    size = file.stat().st_size
    wait_for(lambda: file.stat().st_size > size, 20, what="what a thread writes")
    log.file.board.close()
    values = {
        value.tag: value.simple_value
        for event in events_of(folder)
        for value in event.summary.value
        if event.step == 1
    }
    assert values["loss"] == 3 and values["grad_norm"] == 1
    assert values.keys() >= {"tokens", "tokens_per_s"}


def test_tensorboard_forgets_what_comes_after_the_checkpoint(small):
    """It drops the events from the step on that a file's first event names."""
    config = small()
    config.run_path.mkdir(parents=True)
    log = trainkit.run_log.RunLog(config, state_at(5), n_params=1)
    log.file.board.close()
    starts = [
        event.step
        for event in events_of(config.run_path / "tensorboard")
        if event.HasField("session_log")
    ]
    assert starts == [6]


class Bucket(dict):
    """An object in a store, as far as a LogFile uses one."""

    def write_text(self, text):
        self["text"] = text

    def with_suffix(self, suffix):
        return Bucket()

    def replace(self, path):
        path.update(self)


def test_object_is_written_at_evaluations_and_every_few_seconds(small, monkeypatch):
    """With all lines, and once more at the end."""
    now, path = [50.0], Bucket()
    monkeypatch.setattr(trainkit.run_log.time, "monotonic", lambda: now[0])
    bucket = SimpleNamespace(remote=True, run_path=small().run_path)
    file = trainkit.run_log.LogFile(bucket, 0)
    file.path = path

    def append(line) -> list[int]:
        file.append(line)
        if file.writing:
            file.writing.result()
        text = path.get("text", "")
        return [json.loads(line)["step"] for line in text.splitlines()]

    assert append({"step": 1}) == []
    assert append({"step": 2, "val_loss": 1.0}) == [1, 2]
    now[0] += 9.5
    assert append({"step": 3}) == [1, 2]
    now[0] += 0.5  # ten seconds after the last time
    assert append({"step": 4}) == [1, 2, 3, 4]
    now[0] += 9.5
    assert append({"step": 5}) == [1, 2, 3, 4]
    file.close()
    assert [json.loads(x)["step"] for x in path["text"].splitlines()] == [1, 2, 3, 4, 5]


def test_an_object_that_cannot_be_written_is_written_later(small, monkeypatch, capsys):
    monkeypatch.setattr(trainkit.checkpoints, "PAUSES", ())
    bucket = SimpleNamespace(remote=True, run_path=small().run_path)
    file = trainkit.run_log.LogFile(bucket, 0)
    file.path = SimpleNamespace(write_text=lambda text: 1 / 0)
    file.append({"step": 1, "val_loss": 1.0})
    file.writing.result()
    assert "but later with more lines: division by zero" in capsys.readouterr().out
    file.path = Bucket()
    file.append({"step": 2, "val_loss": 1.0})
    file.writing.result()
    assert file.path["text"].count("step") == 2


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
    with pytest.raises(FloatingPointError, match="Diverged at step 7.*To try again"):
        trainkit.run_log.refuse_diverged(config)


def test_the_first_bad_number_ends_a_run(small):
    """Of whichever name; the note has the step, the numbers, and where to go on from."""
    config, good = small(), {"loss": 1.0, "grad_norm": 1.0}
    config.run_path.mkdir(parents=True)
    diverged, note = trainkit.run_log.has_diverged, config.run_path / "diverged.txt"
    assert not diverged(config, {5: good, 6: good})
    trainkit.run_log.refuse_diverged(config)
    for bad in ({"loss": math.inf}, {"grad_norm": math.nan}):
        assert diverged(config, {1: good, 2: good | bad, 3: good})
        text = note.read_text()
        assert "step 2" in text and "checkpoint: none yet." in text
    (config.run_path / "step_00000004").mkdir()
    assert diverged(config, {5: good | bad})
    assert "Last good checkpoint: step_00000004." in note.read_text()


def test_peaks_are_whole_tera_flops():
    """As data sheets say them: dense, in bfloat16."""
    peaks = {k: v / 1e12 for k, v in trainkit.run_log.PEAK_FLOPS.items()}
    assert all(peak == round(peak) for peak in peaks.values()), peaks
    assert (peaks["NVIDIA H100"], peaks["TPU v6 lite"]) == (989, 918)


def test_first_line_says_how_a_batch_is_divided(small, monkeypatch):
    """Small windows on eight devices: the numbers are worked out by hand."""
    config = TrainingConfig(
        num_workers=8, batch_size=480, device_batch_size=32, block_size=16
    )
    monkeypatch.setattr(jax, "device_count", lambda: 8)
    state = {"a": jax.numpy.zeros((3, 512)), "b": jax.numpy.zeros(256, np.uint8)}
    found = trainkit.run_log.describe_start(config, state)
    # 3 x 512 x 4 + 256 = 6,400 bytes; 60 x 17 x 2 = 2,040 bytes
    assert found == (
        "7,680 tokens a step | on each of 8 devices: 60 windows as 2 x 30, "
        "state 6.25 KiB, batch 1.99 KiB"
    )


@pytest.mark.parametrize(
    "n, text",
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "0.977 KiB"),
        (2**20, "1 MiB"),
        (999.5 * 2**30, "0.976 TiB"),
        (1010 * 2**30, "0.986 TiB"),
        (2**50, "1.02e+03 TiB"),  # there is no larger unit
    ],
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
