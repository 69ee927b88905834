"""The package beside the notebook: its form, what importing it costs, and how it travels."""

import ast
import dataclasses
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import image
import pytest

import trainkit

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "trainkit"
TREES = {
    path.stem: ast.parse(path.read_text())
    for path in sorted(PACKAGE.glob("*.py"))
    if path.stem != "__init__"
}
LISTED = re.findall(r"^(\w+) {2,}\S", trainkit.__doc__, re.MULTILINE)
HEAVY = {"jax", "flax", "orbax", "transformers", "torch"}


def test_list_names_every_module_once():
    assert sorted(LISTED) == sorted(TREES)


def imports_of(nodes: Iterable[ast.AST]) -> set[str]:
    """What import statements among `nodes` import, as dotted names."""
    names = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, "a relative import"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


@pytest.mark.parametrize("name", TREES)
def test_imports_point_upwards(name):
    """A module imports those above it in the list, and never the notebook."""
    above = LISTED[: LISTED.index(name)]
    imported = imports_of(TREES[name].body)
    ours = {i.split(".")[1] for i in imported if i.startswith("trainkit.")}
    assert ours <= set(above)
    packages = {i.split(".")[0] for i in imports_of(ast.walk(TREES[name]))}
    assert not packages & {"notebook_module", "nbformat", "tutorial", "__main__"}


@pytest.mark.parametrize("name", TREES)
def test_module_is_explained(name):
    tree = TREES[name]
    assert ast.get_docstring(tree)
    kinds = ast.FunctionDef | ast.ClassDef
    public = [n for n in tree.body if isinstance(n, kinds) and n.name[0] != "_"]
    for part in [n for n in public if isinstance(n, ast.ClassDef)]:
        inherited = (
            {"run"} if "Thread" in " ".join(map(ast.unparse, part.bases)) else set()
        )
        methods = [n for n in part.body if isinstance(n, kinds) and n.name[0] != "_"]
        public += [n for n in methods if n.name not in inherited]
    assert [node.name for node in public if not ast.get_docstring(node)] == []


@pytest.mark.parametrize("name", ["tokenizers", "config", "corpus", "token_files"])
def test_what_reads_text_needs_no_jax(name):
    """Ray Data's tasks import it, and should start quickly."""
    script = f"import sys, trainkit.{name}; print(*sys.modules, sep='\\n')"
    result = subprocess.run(
        [sys.executable, "-c", script],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    loaded = {line.split(".")[0] for line in result.stdout.splitlines()}
    assert "trainkit" in loaded and not loaded & HEAVY


FAR_WORKERS = """
import dataclasses, json, os, sys
sys.path[:0] = ["", "ci"]
os.environ["JAX_PLATFORMS"] = "cpu"
from notebook_module import code_cells, load_notebook
import numpy as np, ray, ray.train, trainkit
from trainkit import workers
(start,) = [c.source for c in code_cells() if "\\nray.init(" in c.source]
exec(start.split("resources = ")[0])
tutorial = load_notebook()
os.rename("trainkit", "elsewhere")

@ray.remote
def where():
    import trainkit.token_files
    return trainkit.token_files.__file__

def loop(settings):
    import trainkit.workers
    tutorial.train_loop_per_worker(settings)
    with open(settings["storage_path"] + "/where", "w") as file:
        file.write(trainkit.workers.__file__)

config = tutorial.TrainingConfig(**json.loads(sys.argv[1]))
result = tutorial.make_trainer(config, loop).fit()
assert result.error is None and result.metrics["step"] == config.max_steps
of_worker = open(config.storage_path + "/where").read()
print("FOUND", json.dumps([ray.get(where.remote()), of_worker]))
"""


@pytest.mark.extra
def test_package_reaches_workers_that_do_not_see_its_folder(
    small, write_bins, tmp_path
):
    """As in a cluster: Ray carries it to tasks and to training workers."""
    driver = tmp_path / "driver"
    (driver / "ci").mkdir(parents=True)
    shutil.copytree(PACKAGE, driver / "trainkit")
    shutil.copy(ROOT / "README.ipynb", driver)
    shutil.copy(ROOT / "ci/notebook_module.py", driver / "ci")
    config = write_bins(small(n_layer=1, max_steps=4, eval_interval=4))
    settings = json.dumps(dataclasses.asdict(config))
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    result = subprocess.run(
        [sys.executable, "-c", FAR_WORKERS, settings],
        cwd=driver,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-3000:]
    (found,) = re.findall(r"^FOUND (.*)$", result.stdout, re.MULTILINE)
    for path in map(Path, json.loads(found)):
        assert not path.is_relative_to(driver) and not path.is_relative_to(ROOT)


def test_python_in_a_path_with_a_space_is_refused(tmp_path):
    """Ray would start no worker, and wait for it forever."""
    python = tmp_path / "my folder/python"
    python.parent.mkdir()
    python.symlink_to(sys.executable)
    result = subprocess.run(
        [python, "-c", "import trainkit.config"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert result.returncode and f"holds a space, found '{python}'" in result.stderr


@pytest.mark.parametrize("script", ["smoke.sh", "test.sh"])
def test_clone_in_a_path_with_a_space_is_refused(tmp_path, script):
    """At once, before anything is installed."""
    clone = tmp_path / "my folder"
    shutil.copytree(ROOT / "ci", clone / "ci")
    result = subprocess.run(
        ["bash", clone / "ci" / script], capture_output=True, text=True
    )
    assert result.returncode == 1 and "Move this folder" in result.stderr
    assert not (clone / ".venv").exists()


def check_versions(site: Path, **versions: str) -> str:
    """What a Python that has these versions, by their metadata in `site`, says."""
    for name, version in versions.items():
        folder = site / f"{name.replace('-', '_')}-{version}.dist-info"
        folder.mkdir()
        text = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        (folder / "METADATA").write_text(text)
    result = subprocess.run(
        [sys.executable, "-S", "-c", "import trainkit; trainkit.check_versions()"],
        env={"PYTHONPATH": f"{ROOT}:{site}"},
        capture_output=True,
        text=True,
    )
    assert result.returncode == bool(result.stderr)
    return result.stderr.rpartition("ImportError: ")[2]


@pytest.mark.parametrize(
    "jax, flax, ray, message",
    [
        ("0.10.2", "0.12.8", "2.60.0", ""),
        ("0.11.1", "0.12.8", "2.60.0", ""),
        ("0.11.2", "0.12.10", "2.60.0", ""),
        ("0.12.0.1", "0.12.12", "2.61.0rc0", ""),
        ("1.0.0.dev20270101", "1.0", "3.0.0.dev0", ""),
        ("0.9.2", "0.12.8", "2.60.0", "jax is 0.9.2, and 0.10.2 or newer is needed."),
        ("0.12.0", "0.9.0", "2.60.0", "flax is 0.9.0, and 0.12.8 or newer is needed."),
        (
            "0.12.0",
            "0.12.12",
            "2.57.1",
            "ray is 2.57.1, and 2.60.0 or newer is needed.",
        ),
        (
            "0.10.2",
            "0.12.12",
            "2.60.0",
            "flax 0.12.12 needs jax 0.11.1 or newer, found 0.10.2.",
        ),
        (
            "0.12.0",
            "0.12.9",
            "2.60.0",
            "flax 0.12.9 needs jax 0.11.1 or older, found 0.12.0.",
        ),
    ],
)
def test_versions_that_do_not_work_are_refused_in_a_sentence(
    tmp_path, jax, flax, ray, message
):
    said = check_versions(tmp_path, jax=jax, flax=flax, ray=ray)
    assert message in said and bool(said) == bool(message)
    assert not said or "-r` and requirements-gpu.txt" in said


@pytest.mark.parametrize("version, refused", [("0.12.8", False), ("1.0.0rc1", True)])
def test_the_next_major_version_of_orbax_is_refused(tmp_path, version, refused):
    tested = {"jax": "0.12.0", "flax": "0.12.12", "ray": "2.60.0"}
    said = check_versions(tmp_path, **tested, **{"orbax-checkpoint": version})
    assert (
        f"orbax-checkpoint is {version}, and one before 1 is needed" in said
    ) == refused


def test_missing_packages_are_named(tmp_path):
    assert "jax is missing; ray is missing. Install" in check_versions(
        tmp_path, flax="0.12.8"
    )


def test_old_python_is_refused(monkeypatch):
    monkeypatch.setattr("platform.python_version", lambda: "3.10.12")
    with pytest.raises(ImportError, match=r"Python is 3.10.12, and 3.11 or newer"):
        trainkit.check_versions()


def test_pins_are_within_what_is_accepted():
    for name, version in trainkit.OLDEST.items():
        pinned = {
            tuple(
                map(int, image.read_pins(python=python)[name].split("==")[1].split("."))
            )
            for python in ("3.11", "3.12")
        }
        assert min(pinned) == tuple(map(int, version.split(".")))
