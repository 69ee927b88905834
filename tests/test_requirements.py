"""Requirements: exact pins, the same everywhere, and a set that can be installed."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest
from notebook_module import code_cells

ROOT = Path(__file__).resolve().parent.parent
FILES = ["requirements-gpu.txt", "requirements-tpu.txt", "ci/requirements.txt"]
IMPORT_NAMES = {
    "huggingface-hub": "huggingface_hub",
    "orbax-checkpoint": "orbax",
    "pyyaml": "yaml",
    "tensorboardx": "tensorboardX",
}


def pins(name: str) -> dict[str, str]:
    lines = [
        line.split("#")[0].strip() for line in (ROOT / name).read_text().splitlines()
    ]
    matches = [
        re.fullmatch(r"([\w-]+)(\[[\w,]+\])?==([\w.]+)", line) for line in lines if line
    ]
    assert all(matches), f"{name}: not every line is an exact pin"
    return {match[1]: match[3] for match in matches}


def test_files_agree():
    gpu, tpu, cpu = map(pins, FILES)
    assert gpu == tpu
    assert gpu.items() <= cpu.items()


def imports_of(source: str) -> set[str]:
    """The packages that a program imports."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add(node.module.split(".")[0])
    return found


def test_every_package_is_used_and_every_import_pinned():
    """By the notebook and by the modules beside it."""
    sources = [cell.source for cell in code_cells()]
    sources += [path.read_text() for path in (ROOT / "trainkit").glob("*.py")]
    imported = set().union(*map(imports_of, sources)) - {"trainkit"}
    pinned = {IMPORT_NAMES.get(name, name) for name in pins("requirements-gpu.txt")}
    pinned -= {"ipywidgets", "matplotlib"}  # tqdm and pandas draw with them
    assert imported - set(sys.stdlib_module_names) == pinned


@pytest.mark.extra
@pytest.mark.parametrize("python", ["3.11", "3.12"])
@pytest.mark.parametrize("name", FILES)
def test_file_resolves(name, python):
    """A full resolution from metadata alone, accelerator packages included."""
    command = [
        "uv",
        "pip",
        "compile",
        "--quiet",
        "--no-header",
        "--python-version",
        python,
    ]
    command += ["--python-platform", "x86_64-manylinux_2_31"]
    result = subprocess.run(
        [*command, str(ROOT / name)], capture_output=True, text=True, timeout=600
    )
    assert result.returncode == 0, result.stderr[-3000:]
    resolved = dict(re.findall(r"^([\w.-]+)==([\w.+]+)", result.stdout, re.M))
    assert pins(name).items() <= resolved.items()
    assert ("libtpu" in resolved) == (name != "requirements-gpu.txt")  # CI compiles
    assert ("jax-cuda12-plugin" in resolved) == (name == "requirements-gpu.txt")
