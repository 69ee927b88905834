"""Requirements: exact pins, the same everywhere, and a set that can be installed."""

import re
import subprocess

import pytest
from conftest import ROOT
from packaging.requirements import Requirement

GPU = "requirements-gpu.txt"
TPU = "requirements-tpu.txt"
CPU = "ci/requirements.txt"
TESTS = "ci/test-requirements.txt"
ANYSCALE = "ci/places/anyscale/requirements.txt"
PYTHONS = ["3.11", "3.12", "3.13", "3.14"]


def pins(name: str, python: str) -> dict[str, str]:
    """The versions that a requirements file pins for one Python, by package."""
    found = map(Requirement, re.findall(r"(?m)^\w.*", (ROOT / name).read_text()))
    target = {"python_version": python}
    found = [r for r in found if not r.marker or r.marker.evaluate(target)]
    versions = {r.name: str(r.specifier) for r in found}
    assert all(re.fullmatch(r"==[\w.]+", version) for version in versions.values())
    return versions


@pytest.mark.parametrize("python", PYTHONS)
def test_files_agree(python):
    gpu = pins(GPU, python)
    assert gpu == pins(TPU, python)
    assert gpu.items() <= pins(CPU, python).items()
    assert pins(ANYSCALE, "3.12").items() <= pins(GPU, "3.12").items()


@pytest.mark.extra
@pytest.mark.parametrize("python", ["3.11", "3.14"])
@pytest.mark.parametrize(
    "files, machine, brought",
    [
        ([GPU], "x86_64", "jax-cuda12-plugin"),
        ([TPU], "x86_64", "libtpu"),
        ([CPU, TESTS], "x86_64", "libtpu"),  # to compile for TPUs
        ([CPU, TESTS], "aarch64", "jax"),  # such as Docker's on a Mac
    ],
)
def test_files_resolve(files, machine, brought, python):
    """With wheels of PyPI only, and for accelerators that aren't here, too."""
    command = (
        "uv pip compile --quiet --no-config --only-binary :all: "
        f"--python-version {python} --python-platform {machine}-manylinux_2_31"
    ).split()
    done = subprocess.run([*command, *files], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert f"\n{brought}==" in done.stdout
