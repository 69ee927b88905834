"""The package and the scripts beside the notebook, and where they can't be installed."""

import ast
import graphlib
import os
import shutil
import subprocess
import sys

import pytest
from conftest import ROOT
from samples import python


def test_what_reads_text_needs_no_jax():
    """Ray Data's tasks import it, and should start quickly."""
    names = "tokenizers, config, documents, corpus, token_files"
    printed = python(f"import sys; from trainkit import {names}; print(*sys.modules)")
    loaded = {name.split(".")[0] for name in printed.split()}
    assert not loaded & {"jax", "flax", "orbax", "transformers", "torch"}


def test_imports_form_no_circle():
    """Also those within functions. Each module can be read after those that it names."""
    imports = {}
    for path in (ROOT / "trainkit").glob("*.py"):
        found = imports[path.stem] = set()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module == "trainkit":
                found |= {name.name for name in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                package, _, module = node.module.partition(".")
                found |= {module} if package == "trainkit" else set()
    order = [*graphlib.TopologicalSorter(imports).static_order()]
    assert order.index("paths") < order.index("config") < order.index("config_files")


def test_requirements_that_changed_are_installed_anew(tmp_path):
    """And those whose installation failed. Stubs stand for Python and uv."""
    shutil.copytree(ROOT / "ci", tmp_path / "ci")
    stub = tmp_path / "python"
    stub.write_text(
        f"""#!/bin/bash
        [ "$1" = -c ] && exec {sys.executable} "$@"
        mkdir -p .venv/bin && echo 'PATH="$PWD:$PATH"' >.venv/bin/activate
        """
    )
    (tmp_path / "uv").write_text("#!/bin/bash\n! grep fails needed.txt")
    for name in ("python", "uv"):
        (tmp_path / name).chmod(0o755)
    needed, said = tmp_path / "needed.txt", []
    for text in ("a==1", "a==1", "fails", "fails", "a==2"):
        needed.write_text(text)
        command = ["bash", "-euc", "source ci/environment.sh needed.txt"]
        options = {"cwd": tmp_path, "env": os.environ | {"PYTHON": str(stub)}}
        done = subprocess.run(command, capture_output=True, text=True, **options)
        assert (done.returncode != 0) == (text == "fails"), done.stderr
        said.append("Installing needed.txt" in done.stdout)
    assert said == [True, False, True, True, True]
    (tmp_path / ".venv/made-for").write_text("another folder or Python")
    done = subprocess.run(command, capture_output=True, text=True, **options)
    assert "Replacing .venv" in done.stdout and "Installing needed" in done.stdout


@pytest.mark.parametrize("name", ["my folder", "R&D", "o'b", "{a}", "a;b", "$a", "`a"])
def test_folders_that_a_shell_takes_apart_are_refused(tmp_path, name):
    """Before an install: Ray would wait forever for workers with a Python in there."""
    shutil.copytree(ROOT / "ci", tmp_path / name / "ci")
    command = ["bash", tmp_path / name / "ci/smoke.sh"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1 and "Move this folder" in done.stderr
