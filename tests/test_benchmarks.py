"""What a benchmark makes of the times that it measures."""

import os
import re
import subprocess
import sys
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


@pytest.mark.extra
def test_a_rehearsal(tmp_path):
    """On two workers. Two cores don't train twice as fast as one device, which uses both."""
    script = [sys.executable, "benchmarks/rehearse.py", "configs/smoke.yaml"]
    command = [*script, "--storage", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    rows = dict(re.findall(r"^\| (.*?) \| (.*?) \|$", done.stdout, re.M))
    assert rows["gradients and attention beside float32"] == "passed", done.stderr
    assert rows["continued from step"] == "16"
    assert (
        rows["largest difference of a loss that was computed twice"] == "0 in 5 steps"
    )
    assert rows["fell short"] in ("nothing", "scaling") and 0 <= done.returncode < 2
    assert done.returncode == (rows["fell short"] != "nothing")
