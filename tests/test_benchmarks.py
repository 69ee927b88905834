"""What a benchmark makes of the times that it measures."""

import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from conftest import ROOT

sys.path.append(str(ROOT / "benchmarks"))

import common
import train_step


def test_speed_is_that_of_the_median_step(tutorial, monkeypatch):
    """Without the first two; per device, the share of its peak."""
    clock = iter([0, 60, 70, 72, 73, 99, 101])  # of six steps
    timer = SimpleNamespace(perf_counter=lambda: next(clock))
    configs = []

    def make_step(config):
        configs.append(config)
        return lambda: None

    monkeypatch.setattr(train_step, "time", timer)
    monkeypatch.setattr(train_step, "our_step", make_step)
    monkeypatch.setattr(common, "load_notebook", lambda: tutorial)
    monkeypatch.setattr(train_step.jax, "device_count", lambda: 4)
    monkeypatch.setattr(train_step.run_log, "peak_flops", lambda kind: 1e12)
    speed, mfu, devices = train_step.measure(None, 6, make_step)
    (config,) = configs
    assert config.batch_size == 4 * config.device_batch_size
    assert speed == config.batch_size * config.block_size / 2
    assert mfu == pytest.approx(speed * 6 * 124e6 / 4e12, rel=0.05)
    assert devices.startswith("4 x ")


def test_a_table_has_the_medians_and_compares_them_with_ours(monkeypatch, capsys):
    ours = [(300.0, 0.4, "cpu"), (900.0, 0.1, "cpu"), (300.0, 0.4, "cpu")]
    rows = [ours, *[[(150.0, 0.0, "cpu")] * 3] * 2]
    monkeypatch.setattr(common, "interleave", lambda *_: rows)
    monkeypatch.setattr(sys, "argv", ["train_step.py"])
    monkeypatch.setattr(os, "environ", os.environ | {})
    train_step.main()
    table = capsys.readouterr().out
    assert "| ours | cpu | 300 | 1.00 | 40.0% |" in table
    assert table.count(", eager | cpu | 150 | 0.50 | - |") == 1


def rehearse(storage: Path, *options: str, config="configs/smoke.yaml", **variables):
    """The rows of the table. Two cores don't train twice as fast as one device on both."""
    script = [sys.executable, "benchmarks/rehearse.py", str(config)]
    command = [*script, "--storage", str(storage), *options]
    environment = os.environ | variables
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True
    )
    rows = dict(re.findall(r"^\| (.*?) \| (.*?) \|$", done.stdout, re.M))
    assert rows["gradients and attention beside float32"] == "passed", done.stderr
    assert rows["fell short"] in ("nothing", "scaling")
    assert done.returncode == (rows["fell short"] != "nothing")
    return rows


@pytest.mark.extra
def test_a_rehearsal(tmp_path):
    rows = rehearse(tmp_path)
    assert rows["continued from step"] == "16"
    assert (
        rows["largest difference of a loss that was computed twice"] == "0 in 5 steps"
    )


@pytest.mark.extra
def test_a_rehearsal_of_a_notice(tmp_path, head):
    """On a node that leaves, with room on another one."""
    for _ in range(2):
        head.add_node(num_cpus=3)
    head.wait_for_nodes()
    smoke, config = (ROOT / "configs/smoke.yaml").read_text(), tmp_path / "two.yaml"
    config.write_text(smoke.replace("CPU: 0.5", "CPU: 2"))
    variables = {"RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "1"}
    variables["RAY_ADDRESS"] = head.address
    rows = rehearse(tmp_path, "--notice", config=config, **variables)
    assert 21 < int(rows["continued from step"]) < 40
