"""The command that checks a machine: on two cores, as far as a GPU's compiler, its report."""

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from conftest import ROOT
from test_gpu_compile import needs_compiler

sys.path.append(str(ROOT / "benchmarks/verify"))
import report as reports

TINY = ("n_layer=1", "n_embd=32", "n_head=2", "block_size=32")
TINY = [argument for change in TINY for argument in ("--change", change)]


def run_pytest(folder: Path, *arguments, path: Path = ROOT / "benchmarks/verify"):
    """Run some checks; the exit code, and the rows of the report by test."""
    command = [sys.executable, "-m", "pytest", "--into", folder, "-o", "addopts="]
    result = subprocess.run(
        [*map(str, [*command, *arguments])],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(path)},
        capture_output=True,
        text=True,
        timeout=1200,
    )
    assert (folder / "report.json").exists(), result.stdout + result.stderr
    rows = {}
    for found in json.loads((folder / "report.json").read_text())["parts"].values():
        for row in found:
            rows.setdefault(row["test"], []).append(row)
    return result.returncode, rows


@pytest.mark.slow
def test_the_whole_command_on_two_cores(tmp_path):
    environment = os.environ | {"VERIFY_INTO": str(tmp_path)}
    environment.pop("PYTHONPATH")
    command = ["bash", str(ROOT / "ci/verify.sh"), *TINY]
    result = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=1200
    )
    assert result.returncode == 0, result.stdout[-5000:]
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["device"].startswith(f"{os.cpu_count()}-core ")
    rows = [row for part in report["parts"].values() for row in part]
    assert {row["what"] for row in rows if row["result"] == "pass"} == {
        "versions",
        "the loss in float32, a small shape",
        "the gradients in float32, a small shape",
        "the loss in bfloat16, a small shape",
        "the gradients in bfloat16, a small shape",
        "loss and gradients' norm of four micro-batches, float32",
        "ten steps from a checkpoint",
        "the workers form one JAX program",
        "each step is logged once",
        "the loss falls",
        "a worker is killed, and the run continues",
    }
    values = {row["what"]: row["value"] for row in rows if "value" in row}
    for what in ("tokens/s", "memory as compiled", "the loop between two evaluations"):
        assert values[what] > 0
    text = (tmp_path / "report.md").read_text()
    assert text.splitlines()[0] in result.stdout
    assert result.stdout.strip().endswith(f"attach {tmp_path}/report.zip to an issue.")
    with zipfile.ZipFile(tmp_path / "report.zip") as packed:
        assert packed.read("report.md").decode() == text
        assert json.loads(packed.read("report.json")) == report


@pytest.mark.extra
@needs_compiler
@pytest.mark.parametrize("gpu", ["a10g", "h100"])
def test_rehearsed_for_a_gpu_as_far_as_compiling(tmp_path, gpu):
    files = (f"benchmarks/verify/test_{part}.py" for part in ("device", "step", "run"))
    code, rows = run_pytest(tmp_path, *files, "--rehearse", gpu)
    assert code == 0, rows
    compiled = [name for name, found in rows.items() if "compiled for" in str(found)]
    assert len(compiled) == 8, rows  # all but the versions, and what runs through Ray


BROKEN = """
import os, pytest

def test_one(record, report):
    "One thing"
    report["device"] = "a GPU in " + os.getcwd()
    record("one", "1", "1")
    record("two", "3", "2", passed=False)

def test_error():
    "Another"
    raise ValueError("as it must")

def test_left_out():
    "What is left out"
    pytest.skip("no GPU")

def test_crash(record):
    "A kernel that crashes"
    os.abort()
"""


@pytest.mark.slow
def test_what_breaks_is_a_failed_check(tmp_path):
    (tmp_path / "test_broken.py").write_text(BROKEN)
    file = tmp_path / "test_broken.py"
    code, rows = run_pytest(tmp_path / "into", file, "-p", "conftest", *TINY)
    assert code == -6
    assert {
        test: [(row["result"], row["found"]) for row in each]
        for test, each in rows.items()
    } == {
        "test_one": [("pass", "1"), ("fail", "3")],
        "test_error": [("fail", "ValueError: as it must")],
        "test_left_out": [("skipped", "no GPU")],
        "test_crash": [("fail", "it crashed, or took longer than ten minutes")],
    }
    text = (tmp_path / "into/report.md").read_text()
    assert str(ROOT) not in text and "a GPU in REPOSITORY" in text
    assert "1 of 4 passed, 1 skipped" in text.splitlines()[0]


WITHOUT_RAY = """
import importlib.util
find, missing = importlib.util.find_spec, ("ray", "pandas")
importlib.util.find_spec = lambda name, *a: None if name in missing else find(name, *a)
"""


@pytest.mark.slow
def test_without_ray_what_needs_it_is_left_out(tmp_path):
    (tmp_path / "without_ray.py").write_text(WITHOUT_RAY)
    files = (f"benchmarks/verify/test_{part}.py" for part in ("device", "run"))
    options = ("-p", "without_ray", "-k", "test_run or micro or devices", *TINY)
    code, rows = run_pytest(tmp_path / "into", *files, *options, path=tmp_path)
    assert code == 0, rows
    results = {test: {row["result"] for row in each} for test, each in rows.items()}
    assert "pass" in results["test_micro_batches"] & results["test_devices"]
    assert rows["test_continued"][0]["found"] == "Ray is missing"


def test_a_row_of_the_table():
    rows = [
        {"what": what, "expected": "", "found": "a|b", "result": result, "value": value}
        for what, result, value in [("tokens/s", "measured", 1e6), ("MFU", "fail", 0.4)]
    ]
    about = {"device": "a GPU", "date": "2026-11-24", "configuration": "x.yaml"}
    report = about | {"versions": {"jax": "1", "numpy": "2"}, "parts": {"step": rows}}
    expected = (
        "| a GPU | x.yaml | 2026-11-24 | jax 1 | 1,000,000 | 40% | 0 of 1 passed, "
    )
    assert reports.row(report) == expected + "0 skipped |"
    assert "| tokens/s |  | a\\|b | measured |" in reports.as_markdown(report)
    report["parts"] = {}
    assert "| jax 1 | - | - | 0 of 0" in reports.row(report)


def test_the_page_shows_the_reports():
    """Exactly: the table between its header and the next empty line."""
    text = (ROOT / "benchmarks/README.md").read_text()
    assert (
        f"\n\n{reports.table()}\n\n" in text and len(reports.table().splitlines()) > 2
    )
    for path in reports.REPORTS.glob("*.json"):
        report = path.read_text()
        assert "/home/" not in report and "/root/" not in report
        assert str(ROOT) not in report and os.uname().nodename not in report
