"""Requirements: exact pins, the same everywhere, and a set that can be installed."""

import ast
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
IMPORT_NAMES = {"orbax-checkpoint": "orbax", "ruamel.yaml": "ruamel"}
PYTHONS = ["3.11", "3.12", "3.13", "3.14"]
LIBTPU_PLATFORM = "x86_64-manylinux_2_31"  # of its wheels
PLATFORMS = [LIBTPU_PLATFORM, "aarch64-manylinux_2_28", "aarch64-apple-darwin"]
# Macs have no NVIDIA GPUs, and Google's TPU hosts are x86-64.
ONLY = {FILES[0]: PLATFORMS[:2], FILES[1]: PLATFORMS[:1]}
WHERE = [(name, on) for name in [*FILES, TESTS] for on in ONLY.get(name, PLATFORMS)]


def pins(name: str, python: str, machine: str = "x86_64") -> dict[str, str]:
    """The versions that a requirements file pins for one Python on Linux, by package."""
    target = {"platform_machine": machine, "python_version": python}
    lines = (ROOT / name).read_text().splitlines()
    found = [Requirement(line) for line in lines if line and line[0] != "#"]
    found = [r for r in found if not r.marker or r.marker.evaluate(target)]
    matches = {r.name: re.fullmatch(r"==([\w.]+)", str(r.specifier)) for r in found}
    assert all(matches.values()), f"{name}: not every line is an exact pin"
    return {package: match[1] for package, match in matches.items()}


@pytest.mark.parametrize("python", PYTHONS)
def test_files_agree(python):
    gpu, tpu, cpu = (pins(name, python) for name in FILES)
    assert gpu == tpu and gpu.items() <= cpu.items()
    assert not cpu.keys() & pins(TESTS, python).keys()


def test_every_package_is_used_and_every_import_pinned():
    """By the notebook and by the modules beside it."""
    sources = [path.read_text() for path in (ROOT / "trainkit").glob("*.py")]
    text = "\n".join([*sources, *(cell.source for cell in code_cells())])
    names = imports_of(ast.parse(text))
    imported = {name.split(".")[0] for name in names} - {"trainkit"}
    pinned = pins(FILES[0], "3.12").keys()
    pinned -= {"ipywidgets", "matplotlib"}  # tqdm and pandas draw with them
    expected = {IMPORT_NAMES.get(name, name.replace("-", "_")) for name in pinned}
    assert imported - sys.stdlib_module_names == expected


@pytest.mark.extra
@pytest.mark.parametrize("python", PYTHONS)
@pytest.mark.parametrize("name, platform", WHERE)
def test_file_resolves(name, platform, python, monkeypatch):
    """Each file, with wheels of PyPI only, whatever is here, and for accelerators too."""
    command = (
        "uv pip compile --quiet --no-config --format pylock.toml --only-binary :all:"
        f" --python-version {python} --python-platform {platform}"
    ).split()
    command += [name] if name != TESTS else ["ci/requirements.txt", TESTS]
    monkeypatch.setenv("MACOSX_DEPLOYMENT_TARGET", "14.0")
    monkeypatch.delenv("UV_FIND_LINKS", raising=False)
    options = {"cwd": ROOT, "text": True, "timeout": 600}
    result = subprocess.run(command, capture_output=True, **options)
    assert result.returncode == 0, result.stderr[-3000:]
    packages = tomllib.loads(result.stdout)["packages"]
    found = {package["name"]: package["version"] for package in packages}
    normal = {k.replace(".", "-"): v for k, v in pins(name, python, platform).items()}
    assert normal.items() <= found.items()
    compiles_for_tpus = name in (FILES[1], TESTS) and platform == LIBTPU_PLATFORM
    assert ("libtpu" in found) == compiles_for_tpus
    assert ("jax-cuda12-plugin" in found) == (name == FILES[0])
