"""The package and the scripts beside the notebook, and where they can't be installed."""

import os
import re
import shutil
import subprocess
import sys

import pytest
from conftest import ROOT
from samples import python


def test_what_reads_text_needs_no_jax():
    """Ray Data's tasks import it, and should start quickly."""
    names = "tokenization, config, documents, corpus, token_files"
    printed = python(f"import sys; from trainkit import {names}; print(*sys.modules)")
    loaded = {name.split(".")[0] for name in printed.split()}
    assert not loaded & {"jax", "flax", "orbax", "transformers", "torch"}


@pytest.fixture
def run_in_copy(tmp_path):
    """A function that runs a line of bash in a copy. Stubs stand for Python and uv; what is
    asked of them is in asked.txt.
    """
    shutil.copytree(ROOT / "ci", tmp_path / "ci")
    stubs = {
        "python": f"""version="${{VERSION:-3.12.1}}"
            [ "$1" = -c ] && exec {sys.executable} -c "import sys
sys.version_info = tuple(map(int, '$version'.split('.')))
$2"
            mkdir -p .venv/bin && echo 'PATH="{tmp_path}:$PATH"' >.venv/bin/activate
            echo "$@" >>asked.txt; [[ "$*" != *whl/cpu* ]]""",
        "uv": 'echo "$@" >>asked.txt; ! grep -s fails needed.txt',
        "pytest": "",
    }
    for name, text in stubs.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)

    def run(line: str) -> subprocess.CompletedProcess:
        environment = os.environ | {"PYTHON": str(tmp_path / "python")}
        options = {"cwd": tmp_path, "env": environment, "text": True}
        return subprocess.run(["bash", "-euc", line], capture_output=True, **options)

    return run


def test_requirements_that_changed_are_installed_anew(run_in_copy, tmp_path):
    """And those whose installation failed, or that another Python needs."""
    said, line = [], "source ci/environment.sh needed.txt; command -v pytest"
    for text in ("a==1", "a==1", "fails", "fails", "a==2"):
        (tmp_path / "needed.txt").write_text(text)
        done = run_in_copy(line)
        assert (done.returncode != 0) == (text == "fails"), done.stderr
        said.append("Installing needed.txt" in done.stdout)
        assert text == "fails" or f"{tmp_path}/pytest\n" in done.stdout
    assert said == [True, False, True, True, True]
    (tmp_path / ".venv/made-for").write_text("another folder or Python")
    said = run_in_copy(line).stdout
    assert "Replacing .venv" in said and "Installing needed" in said


@pytest.mark.parametrize(
    "version, fits",
    [("3.10.9", False), ("3.11.0", True), ("3.14.1", True), ("3.15.0", False)],
)
def test_which_pythons_will_do(run_in_copy, tmp_path, version, fits):
    """Each release of those that are named. Otherwise, another one is looked for."""
    (tmp_path / ".venv/bin").mkdir(parents=True)
    (tmp_path / ".venv/bin/activate").touch()  # nothing is to be installed
    line = f"export VERSION={version}; source ci/environment.sh; echo $python"
    assert (f"{tmp_path}/python\n" in run_in_copy(line).stdout) == fits


def test_what_is_asked_of_package_indexes(run_in_copy, tmp_path):
    """The one that pip is set to. PyTorch for CPUs has its own, which isn't reached here."""
    (tmp_path / "needed.txt").write_text("a==1\ntorch==2")
    for folder in (".", ".venv"):  # it is installed; they are resolved together
        (tmp_path / folder).mkdir(exist_ok=True)
        (tmp_path / folder / "other.txt").write_text("b==1")
    line = "unset UV_DEFAULT_INDEX; export PIP_INDEX_URL=http://mirror\n"
    run_in_copy(f"{line} source ci/environment.sh needed.txt other.txt")
    asked = (tmp_path / "asked.txt").read_text()
    torch = re.findall(r"-m pip .*install .*torch==2", asked)
    assert ["download.pytorch.org/whl/cpu" in each for each in torch] == [True, False]
    (uv,) = re.findall("pip install .*needed.*", asked)
    assert "--default-index http://mirror -r needed.txt -r other.txt" in uv


def test_a_cluster_that_is_here_is_not_joined(run_in_copy, tmp_path):
    """And what Python compiles is kept, whatever an image has set."""
    (tmp_path / "needed.txt").touch()
    theirs = "export RAY_ADDRESS=auto PYTHONDONTWRITEBYTECODE=1"
    said = run_in_copy(f"{theirs}; source ci/environment.sh needed.txt; env")
    lines = said.stdout.splitlines()
    assert "RAY_ADDRESS=local" in lines
    assert not any(line.startswith("PYTHONDONTWRITEBYTECODE=") for line in lines)


@pytest.mark.parametrize("name", ["my folder", "R&D", "`a"])
def test_folders_that_a_shell_takes_apart_are_refused(tmp_path, name):
    """Before an install: Ray would wait forever for workers with a Python in there."""
    shutil.copytree(ROOT / "ci", tmp_path / name / "ci")
    command = ["bash", tmp_path / name / "ci/smoke.sh"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1 and "Move this folder" in done.stderr
