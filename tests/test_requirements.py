"""Requirements: exact pins, the same everywhere, and a set that can be installed."""

import ast
import os
import re
import subprocess
import sys
import tomllib

import pytest
from conftest import ROOT
from notebook_module import code_cells
from packaging.requirements import Requirement
from samples import imports_of

FILES = ["requirements-gpu.txt", "requirements-tpu.txt", "ci/requirements.txt"]
TESTS = "ci/test-requirements.txt"
IMPORT_NAMES = {"orbax-checkpoint": "orbax", "pyyaml": "yaml"}
PYTHONS = ["3.11", "3.12", "3.13", "3.14"]
LIBTPU_PLATFORM = "x86_64-manylinux_2_31"  # of its wheels
PLATFORMS = [LIBTPU_PLATFORM, "aarch64-manylinux_2_28", "aarch64-apple-darwin"]


def pins(name: str, python: str, arm: bool = False) -> dict[str, str]:
    """The versions that a requirements file pins for one Python on Linux, by package."""
    machine = {"platform_machine": "aarch64" if arm else "x86_64"}
    target = machine | {"python_version": python, "sys_platform": "linux"}
    lines = (ROOT / name).read_text().splitlines()
    found = [Requirement(line) for line in lines if line and line[0] != "#"]
    found = [r for r in found if not r.marker or r.marker.evaluate(target)]
    matches = {r.name: re.fullmatch(r"==([\w.]+)", str(r.specifier)) for r in found}
    assert all(matches.values()), f"{name}: not every line is an exact pin"
    return {package: match[1] for package, match in matches.items()}


@pytest.mark.parametrize("python", PYTHONS)
def test_files_agree(python):
    gpu, tpu, cpu = (pins(name, python) for name in FILES)
    assert gpu == tpu
    assert gpu.items() <= cpu.items()
    assert not cpu.keys() & pins(TESTS, python).keys()


def test_every_package_is_used_and_every_import_pinned():
    """By the notebook and by the modules beside it."""
    sources = [cell.source for cell in code_cells()]
    sources += [path.read_text() for path in (ROOT / "trainkit").glob("*.py")]
    names = set().union(*(imports_of(ast.parse(source)) for source in sources))
    imported = {name.split(".")[0] for name in names} - {"trainkit"}
    pinned = pins(FILES[0], "3.12").keys()
    pinned -= {"ipywidgets", "matplotlib"}  # tqdm and pandas draw with them
    expected = {IMPORT_NAMES.get(name, name.replace("-", "_")) for name in pinned}
    assert imported - sys.stdlib_module_names == expected


# Macs have no NVIDIA GPUs, and Google's TPU hosts are x86-64.
ONLY = {"requirements-gpu.txt": PLATFORMS[:2], "requirements-tpu.txt": PLATFORMS[:1]}
WHERE = [(name, on) for name in [*FILES, TESTS] for on in ONLY.get(name, PLATFORMS)]


@pytest.mark.extra
@pytest.mark.parametrize("python", PYTHONS)
@pytest.mark.parametrize("name, platform", WHERE)
def test_file_resolves(name, platform, python):
    """Each file, with wheels of PyPI only, whatever is here, and for accelerators too."""
    command = (
        "uv pip compile --quiet --no-config --format pylock.toml --only-binary :all:"
        f" --python-version {python} --python-platform {platform}"
    ).split()
    command += [name] if name != TESTS else ["ci/requirements.txt", TESTS]
    environment = os.environ | {"MACOSX_DEPLOYMENT_TARGET": "14.0"}
    environment.pop("UV_FIND_LINKS", None)
    options = {"env": environment, "cwd": ROOT, "text": True, "timeout": 600}
    result = subprocess.run(command, capture_output=True, **options)
    assert result.returncode == 0, result.stderr[-3000:]
    packages = tomllib.loads(result.stdout)["packages"]
    found = {package["name"]: package["version"] for package in packages}
    arm = platform != LIBTPU_PLATFORM
    assert pins(name, python, arm).items() <= found.items()
    compiles_for_tpus = name in ("requirements-tpu.txt", TESTS) and not arm
    assert ("libtpu" in found) == compiles_for_tpus
    assert ("jax-cuda12-plugin" in found) == (name == "requirements-gpu.txt")
    assert name == TESTS or not found.keys() & {"torch", "boto3", "ruff", "sphinx"}
