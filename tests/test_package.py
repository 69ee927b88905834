"""The package and the scripts beside the notebook, and where they can't be installed."""

import ast
import graphlib
import shutil
import subprocess

import pytest
from conftest import ROOT
from samples import python


def test_what_reads_text_needs_no_jax():
    """Ray Data's tasks import it, and should start quickly."""
    names = "tokenizers, config, corpus, token_files"
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
    assert order.index("paths") < order.index("config") < order.index("load_config")


@pytest.mark.parametrize("name", ["my folder", "R&D", "o'b", "{a}", "a;b", "$a", "`a"])
def test_folders_that_a_shell_takes_apart_are_refused(tmp_path, name):
    """Before an install: Ray would wait forever for workers with a Python in there."""
    shutil.copytree(ROOT / "ci", tmp_path / name / "ci")
    command = ["bash", tmp_path / name / "ci/smoke.sh"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1 and "Move this folder" in done.stderr
