"""The package beside the notebook: its form, and where it can't be installed."""

import ast
import re
import shutil
import subprocess

import pytest
from conftest import ROOT
from notebook_module import code_cells
from samples import imports_of, python

import trainkit

PACKAGE = ROOT / "trainkit"
TREES = {path.stem: ast.parse(path.read_text()) for path in PACKAGE.glob("[!_]*.py")}
LISTED = re.findall(r"^(\w+) {2,}\S", trainkit.__doc__, re.MULTILINE)


@pytest.mark.parametrize("name", TREES)
def test_module_is_listed_explained_and_below_what_it_imports(name):
    """And never imports the notebook."""
    tree = TREES[name]
    first = [node for node in tree.body if isinstance(node, ast.ImportFrom)]
    imported = imports_of(ast.Module(first))  # when it is imported itself
    ours = {i.split(".")[1] for i in imported if i.startswith("trainkit.")}
    assert ours <= {*LISTED[: LISTED.index(name)]}
    packages = {i.split(".")[0] for i in imports_of(tree)}
    assert not packages & {"notebook_module", "nbformat", "tutorial", "__main__"}
    kinds = ast.FunctionDef | ast.ClassDef
    public = [n for n in tree.body if isinstance(n, kinds) and n.name[0] != "_"]
    assert all(ast.get_docstring(node) for node in (tree, *public))


def test_what_reads_text_needs_no_jax():
    """Ray Data's tasks import it, and should start quickly."""
    names = "tokenizers, config, corpus, token_files"
    printed = python(f"import sys; from trainkit import {names}; print(*sys.modules)")
    loaded = {name.split(".")[0] for name in printed.split()}
    assert not loaded & {"jax", "flax", "orbax", "transformers", "torch"}


def test_nothing_unpickles_or_opens_a_port():
    """Token files, weights, and checkpoints have formats that cannot hold code."""
    sources = [path.read_text() for path in PACKAGE.glob("*.py")]
    text = "".join([*sources, *(cell.source for cell in code_cells())])
    words = ("pickle", "eval(", "exec(", "torch.load", "np.load(", "trust_remote")
    assert [word for word in (*words, "dashboard_host") if word in text] == []


def run(script: str, folder) -> subprocess.CompletedProcess:
    """Of ci/, in a copy of it."""
    shutil.copytree(ROOT / "ci", folder / "ci", dirs_exist_ok=True)
    command = ["bash", "-c", script]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True)


@pytest.mark.parametrize("name", ["my folder", "R&D", "o'b", "{a}", "a;b", "$a", "`a"])
def test_folders_that_a_shell_takes_apart_are_refused(tmp_path, name):
    """Before an install: Ray would wait forever for workers with a Python in there."""
    done = run("bash ci/smoke.sh", tmp_path / name)
    assert done.returncode == 1 and "Move this folder" in done.stderr
    assert not (tmp_path / name / ".venv").exists()


def test_an_environment_of_another_folder_is_made_anew(tmp_path):
    """Its scripts name that folder."""
    (tmp_path / ".venv").mkdir()
    (tmp_path / ".venv/made-for").write_text("/elsewhere 3 13\n")
    done = run("source ci/environment.sh", tmp_path)
    assert "Replacing .venv, which was made for /elsewhere 3 13" in done.stdout
    assert not (tmp_path / ".venv/made-for").exists()
