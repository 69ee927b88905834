"""The package beside the notebook: its form, its imports, and what it refuses."""

import ast
import re
import shutil
import subprocess
import sys

import pytest
from conftest import ROOT
from notebook_module import code_cells
from samples import imports_of, python

import trainkit

PACKAGE = ROOT / "trainkit"
MODULES = sorted(PACKAGE.glob("[!_]*.py"))
TREES = {path.stem: ast.parse(path.read_text()) for path in MODULES}
LISTED = re.findall(r"^(\w+) {2,}\S", trainkit.__doc__, re.MULTILINE)
HEAVY = {"jax", "flax", "orbax", "transformers", "torch"}


def test_list_names_every_module_once():
    assert sorted(LISTED) == sorted(TREES)


@pytest.mark.parametrize("name", TREES)
def test_imports_point_upwards(name):
    """A module imports those above it in the list, and never the notebook."""
    imported = imports_of(TREES[name])
    ours = {i.split(".")[1] for i in imported if i.startswith("trainkit.")}
    assert ours <= {*LISTED[: LISTED.index(name)]}
    packages = {i.split(".")[0] for i in imported}
    assert not packages & {"notebook_module", "nbformat", "tutorial", "__main__"}


@pytest.mark.parametrize("name", TREES)
def test_module_is_explained(name):
    tree, kinds = TREES[name], ast.FunctionDef | ast.ClassDef
    wholes = [n for n in ast.walk(tree) if isinstance(n, ast.Module | ast.ClassDef)]
    parts = [n for whole in wholes for n in whole.body if isinstance(n, kinds)]
    public = [n for n in parts if n.name[0] != "_"]
    assert [n.name for n in (tree, *public) if not ast.get_docstring(n)] == []


def test_what_reads_text_needs_no_jax():
    """Ray Data's tasks import it, and should start quickly."""
    names = "tokenizers, config, corpus, token_files"
    printed = python(f"import sys; from trainkit import {names}; print(*sys.modules)")
    loaded = {name.split(".")[0] for name in printed.split()}
    assert "trainkit" in loaded and not loaded & HEAVY


def test_nothing_unpickles_or_opens_a_port():
    """Token files, weights, and checkpoints have formats that cannot hold code."""
    sources = [path.read_text() for path in PACKAGE.glob("*.py")]
    text = "".join([*sources, *(cell.source for cell in code_cells())])
    words = ("pickle", "eval(", "exec(", "torch.load", "np.load(", "trust_remote")
    assert [word for word in (*words, "dashboard_host") if word in text] == []


def run(*command, cwd=ROOT) -> subprocess.CompletedProcess:
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True)


NAMES = ["my folder", "R&D", "(1)", "o'b", "{a}", "a;b", "$a", "a*b", "`a", "<a>"]


@pytest.mark.parametrize("name", NAMES)
def test_paths_that_a_shell_takes_apart_are_refused(tmp_path, name):
    """Of Python, for which Ray would wait forever, and of the clone, before an install."""
    clone = tmp_path / name
    shutil.copytree(ROOT / "ci", clone / "ci")
    python = clone / "python"
    python.symlink_to(sys.executable)
    done = run(python, "-c", "import trainkit.config")
    assert f"a shell reads, found {python}. Move" in done.stderr
    for script in ("smoke", "test"):
        done = run("bash", clone / f"ci/{script}.sh")
        assert done.returncode == 1 and "Move this folder" in done.stderr
    assert not (clone / ".venv").exists()


def test_an_environment_of_another_folder_is_made_anew(tmp_path):
    """Its scripts name that folder."""
    shutil.copytree(ROOT / "ci", tmp_path / "ci")
    (tmp_path / ".venv").mkdir()
    (tmp_path / ".venv/made-for").write_text("/elsewhere 3 13\n")
    done = run("bash", "-c", "source ci/environment.sh", cwd=tmp_path)
    assert "Replacing .venv, which was made for /elsewhere 3 13" in done.stdout
    assert not (tmp_path / ".venv/made-for").exists()


def test_a_python_that_has_nothing_is_told_what_to_install():
    done = run(sys.executable, "-S", "-c", "import trainkit; trainkit.check_versions()")
    assert "packaging is missing. Install what was tested" in done.stderr


VERSIONS = [  # of Python, jax, flax, ray, and orbax-checkpoint; what is said of them
    ("3.11.0+ 0.10.2 0.12.8 2.60.0 0.12.8", ""),
    ("3.12.1 0.12.0.1 0.12.12 2.61.0rc0 0.13", ""),
    ("3.12.1 1.0.0.dev20270101 1.0 3.0.0.dev0 0.12.8", ""),
    ("3.12.1 0.9.2 0.12.8 2.60.0 0.12.8", "jax is 0.9.2, and >=0.10.2,<0.11.2 is"),
    ("3.12.1 0.11.1 0.9.0 2.60.0 0.12.8", "flax is 0.9.0, and >=0.12.8 is needed."),
    ("3.12.1 0.12.0 0.12.12 2.57.1 0.12.8", "ray is 2.57.1, and >=2.60 is needed."),
    ("3.12.1 0.10.2 0.12.10 2.60.0 0.12.8", "jax is 0.10.2, and >=0.11.1 is needed."),
    ("3.12.1 0.12.0 0.12.9 2.60.0 0.12.8", "jax is 0.12.0, and >=0.10.2,<0.11.2 is"),
    ("3.12.1 0.12.0 0.12.12 2.60.0 1.0.0rc1", "orbax-checkpoint is 1.0.0rc1, and <1"),
    ("3.10.12 - 0.12.8 - -", "ray is missing, and >=2.60 is needed; Python is 3.10.12"),
]


@pytest.mark.parametrize("versions, message", VERSIONS)
def test_versions_that_do_not_work_are_refused_in_a_sentence(
    tmp_path, monkeypatch, versions, message
):
    """By their metadata alone."""
    python, *others = versions.split()
    for name, version in zip(("jax", "flax", "ray", "orbax_checkpoint"), others):
        folder = tmp_path / f"{name}-{version}.dist-info"
        if version != "-":
            folder.mkdir()
            text = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
            (folder / "METADATA").write_text(text)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.setattr("platform.python_version", lambda: python)
    if not message:
        return trainkit.check_versions()
    with pytest.raises(ImportError, match=re.escape(message)) as error:
        trainkit.check_versions()
    assert "-r` and requirements-gpu.txt" in str(error.value)


def test_windows_is_refused_in_a_sentence():
    script = "import importlib.metadata, sys; sys.platform = 'win32'; import trainkit"
    with pytest.raises(AssertionError, match="runs on Linux and macOS, found 'win32'"):
        python(script)
