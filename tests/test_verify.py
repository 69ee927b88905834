"""The command that checks a machine: on two cores, as far as a GPU's compiler, its report."""

import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from conftest import ROOT
from samples import python

sys.path.append(str(ROOT / "benchmarks/verify"))
import report as reports

VERIFY = ROOT / "benchmarks/verify"
TINY = ("n_layer=1", "n_embd=32", "n_head=2", "block_size=32", "tokenizer=gpt2")
TINY = [argument for change in TINY for argument in ("--change", change)]


def run(folder: Path, *command) -> tuple[subprocess.CompletedProcess, dict]:
    """What a command has done, and its report in `folder`."""
    path = f"{VERIFY}:{folder.parent}"  # of the plugins that tests add
    environment = os.environ | {"VERIFY_INTO": str(folder), "PYTHONPATH": path}
    environment["TIKTOKEN_CACHE_DIR"] = f"{folder}/empty"  # nor is there a network
    options = {"capture_output": True, "text": True, "timeout": 1200, "cwd": ROOT}
    done = subprocess.run([*map(str, command)], env=environment, **options)
    assert (folder / "report.json").exists(), done.stdout + done.stderr
    return done, json.loads((folder / "report.json").read_text())


def run_pytest(folder: Path, *arguments):
    """The exit code of a pytest run, and what each of its tests has found."""
    command = sys.executable, "-m", "pytest", "--into", folder, "-o", "addopts="
    done, report = run(folder, *command, *arguments)
    return done.returncode, report["checks"]


@pytest.mark.slow
def test_the_whole_command_on_two_cores(tmp_path):
    done, report = run(tmp_path, "bash", ROOT / "ci/verify.sh", *TINY)
    assert done.returncode == 0, done.stdout[-5000:]
    assert report["device"].startswith(f"{os.cpu_count()}-core ")
    rows = sum(report["checks"].values(), [])
    assert {row["what"] for row in rows if row["result"] == "pass"} == {
        *("the loss in float32", "the gradients in float32"),
        *("the loss in bfloat16", "the gradients in bfloat16"),
        *("workers", "the loss falls", "a worker is killed, and the run continues"),
    }
    values = {row["what"]: row.get("value") for row in rows}
    for what in ("tokens/s", "memory as compiled", "the loop between two evaluations"):
        assert values[what] > 0
    text = (tmp_path / "report.md").read_text()
    assert text.splitlines()[0] in done.stdout
    assert done.stdout.strip().endswith(f"attach {tmp_path}/report.zip to an issue.")
    with zipfile.ZipFile(tmp_path / "report.zip") as packed:
        assert packed.read("report.md").decode() == text
        assert json.loads(packed.read("report.json")) == report


@pytest.mark.extra
@pytest.mark.usefixtures("compiler_for_gpus")
@pytest.mark.parametrize("gpu", ["a10g", "h100"])
def test_rehearsed_for_a_gpu_as_far_as_compiling(tmp_path, gpu):
    files = VERIFY / "test_device.py", VERIFY / "test_run.py"
    code, checks = run_pytest(tmp_path / "into", *files, "--rehearse", gpu)
    assert code == 0, checks
    compiled = [name for name, rows in checks.items() if "compiled for" in str(rows)]
    assert len(compiled) == 4 == len(checks) - 1, checks  # all but the run through Ray


BROKEN = """
import os, pytest

def test_checks(record, pytestconfig):
    "One thing"
    pytestconfig.option.report["device"] = "a GPU in " + os.getcwd()
    record("one", "1", "1")
    record("two", "3", "2", passed=False)
    record("three", "3", "3")

def test_error():
    "Another"
    raise ValueError("as it must")

def test_with_a_crash():
    "A kernel that crashes"
    os.abort()
"""
WITHOUT_RAY = """
import importlib.util
find, missing = importlib.util.find_spec, ("ray", "pandas")
importlib.util.find_spec = lambda name, *a: None if name in missing else find(name, *a)
"""


@pytest.mark.slow
def test_what_breaks_is_a_failed_check_and_what_lacks_ray_is_left_out(tmp_path):
    (tmp_path / "without_ray.py").write_text(WITHOUT_RAY)
    shutil.copy(VERIFY / "test_device.py", tmp_path)
    shutil.copy(VERIFY / "test_run.py", tmp_path)
    (tmp_path / "test_with_errors.py").write_text(BROKEN)
    options = "-p", "without_ray", "-p", "conftest", "-k", "float32 or run or errors"
    code, checks = run_pytest(tmp_path / "into", tmp_path, *options, *TINY)
    assert code == -6
    assert {
        test: [(row["result"], row["found"]) for row in rows]
        for test, rows in checks.items()
        if "float32" not in test
    } == {
        "test_checks": [("pass", "1"), ("fail", "3"), ("pass", "3")],
        "test_error": [("fail", "ValueError: as it must")],
        "test_run": [("skipped", "Ray is missing")],
        "test_with_a_crash": [("fail", "it crashed, or took longer than ten minutes")],
    }
    text = (tmp_path / "into/report.md").read_text()
    assert str(ROOT) not in text and "a GPU in REPOSITORY" in text
    assert ": 4 of 7 passed, 1 skipped" in text.splitlines()[0]


def test_the_report_as_a_row():
    about = {"device": "a GPU", "date": "2026-11-24", "configuration": "x.yaml"}
    about |= {"versions": {"jax": "1", "numpy": "2"}, "checks": {}}
    assert "| jax 1 | - | - | 0 of 0" in reports.summary(about)
    about["checks"]["test_step"] = [
        {"what": what, "expected": "", "found": "a|b", "result": result, "value": value}
        for what, result, value in [("tokens/s", "measured", 1e6), ("MFU", "fail", 0.4)]
    ]
    expected = "| a GPU | x.yaml | 2026-11-24 | jax 1 | 1,000,000 | 40% | 0 of 1 passed"
    assert reports.summary(about) == f"{expected}, 0 skipped |"
    assert "| tokens/s |  | a\\|b | measured |" in reports.as_markdown(about)


def test_the_page_shows_the_reports():
    page = (ROOT / "benchmarks/README.md").read_text().splitlines()
    for path in (ROOT / "benchmarks/reports").glob("*.json"):
        report = path.read_text()
        assert reports.summary(json.loads(report)) in page
        assert "/home/" not in report and "/root/" not in report
        assert str(ROOT) not in report and os.uname().nodename not in report


FIND = """
import os, subprocess, sys
from pathlib import Path
from types import SimpleNamespace
sys.path[:0] = ["benchmarks/verify", "ci"]
import conftest, jax

def asked(*_, **__):
    assert "JAX_PLATFORMS" not in os.environ, "limited already"
    return "gpu"

subprocess.check_output = asked
into = Path(sys.argv[1])
options = SimpleNamespace(into=into, change=["n_layer=1"], rehearse=None)
conftest.pytest_configure(SimpleNamespace(option=options))
print(options.base.platform, options.base.n_layer, jax.config.jax_platforms)
"""


def test_gpus_are_found_though_the_driver_is_limited_to_cpus(tmp_path):
    said = python(FIND, tmp_path, JAX_PLATFORMS=None)
    assert said.splitlines()[-1] == "gpu 1 cuda,cpu"
