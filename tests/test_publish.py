"""What ci/publish.py writes into a checkout of the registry that publishes the page."""

import re
import subprocess
import sys
from pathlib import Path

import nbformat
import publish
import pytest
from conftest import ROOT
from ruamel.yaml import YAML

from trainkit.config import load_config

SOURCE = "https://github.com/someone/gpt2"
LOCK = f"{publish.FOLDER}/{publish.LOCK}"
THEIRS = {
    "BUILD.yaml": "# owner: @someone\n- name: another\n  dir: templates/another\n",
    "dependencies/template.depsets.yaml": "depsets:\n  - name: another\n    output: a\n",
    "templates/another/README.md": "theirs",
}


def contents(folder: Path) -> dict[str, str]:
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


@pytest.fixture(scope="module")
def registry(tmp_path_factory) -> Path:
    """A small checkout of the registry, with the template in it."""
    folder = tmp_path_factory.mktemp("registry")
    for name, text in THEIRS.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    publish.publish(folder, SOURCE)
    return folder


def test_registry_gets_its_files_and_nothing_else(registry):
    written = contents(registry)
    folders = (f"{publish.FOLDER}/", f"configs/{publish.NAME}", f"tests/{publish.NAME}")
    assert {name for name in written if not name.startswith(folders)} == {*THEIRS}
    package = {path.name for path in (ROOT / "trainkit").glob("*.*")}
    assert {
        x.name for x in (registry / publish.FOLDER / "trainkit").iterdir()
    } == package
    build, depsets = (YAML(typ="safe").load(written[name]) for name in [*THEIRS][:2])
    entries = (build[1]["dir"], *build[1]["compute_config"].values())
    assert all((registry / place).exists() for place in entries)
    assert [x["output"] for x in depsets["depsets"]] == ["a", LOCK]
    # A second time, old files of ours go, and the lock that was made there stays.
    (registry / publish.FOLDER / "trainkit/old.py").touch()
    (registry / LOCK).write_bytes(b"made there")
    publish.publish(registry, SOURCE)
    assert contents(registry) == written | {LOCK: b"made there"}


def test_driver_and_workers_install_the_lock(registry):
    cells = nbformat.read(
        registry / publish.FOLDER / "README.ipynb", as_version=4
    ).cells
    code = [cell.source for cell in cells if cell.cell_type == "code"]
    assert any(
        f"!uv pip install -r {publish.LOCK} --system" in source for source in code
    )
    given = f'runtime_env={{"pip": "{publish.LOCK}", "py_modules": ["trainkit"]'
    assert any(given in source for source in code)
    # Of the pins here, those that the image lacks.
    pins = (registry / publish.FOLDER / "requirements.txt").read_text().splitlines()[1:]
    ours = (ROOT / "requirements-gpu.txt").read_text().splitlines()
    assert {*pins} < {line.partition(";")[0] for line in ours}


def test_page_is_plain_nbconverts_and_its_addresses_lead_to_files(registry, tmp_path):
    template = registry / publish.FOLDER
    command = [sys.executable, "-m", "nbconvert", "--to", "markdown", "README.ipynb"]
    subprocess.run([*command, "--output-dir", tmp_path], cwd=template, check=True)
    page = (template / "README.md").read_text()
    assert (tmp_path / "README.md").read_text() == page
    assert page.count("[![") == 2 and "to run on two CPU cores" not in page
    assert "ci/" not in re.sub(r"https://\S+", "", page)
    assert re.findall(r"\]\((?!https://|#)", re.sub(publish.FENCE, "", page)) == []
    there = re.findall(r"anyscale/templates/(?:(?:blob|tree)/)?main/([^)#]+)", page)
    assert {Path(path).suffix for path in there} >= {".png", ".py"}
    assert [path for path in there if not (registry / path).exists()] == []
    with pytest.raises(SystemExit, match="names no/file.md, which isn't there"):
        publish.absolute("[a](no/file.md)", SOURCE)


@pytest.mark.slow
def test_registrys_test_runs_some_of_ours_and_a_few_steps(registry):
    template = registry / publish.FOLDER
    script = (registry / f"tests/{publish.NAME}/tests.sh").read_text()
    (lines,) = re.findall(r"^sed (?:.*\\\n)*.*\n", script, re.M)
    subprocess.run(["bash", "-euc", lines], cwd=template, check=True)
    few = load_config(template / re.search(r"GPT2_CONFIG=(\S+)", script)[1])
    assert few.eval_interval < few.max_steps <= 100 and few.machines == "gpu"
    (command,) = re.findall(r"^python (-m pytest.*)", script, re.M)
    command = ["bash", "-c", f"{sys.executable} {command}"]
    done = subprocess.run(command, cwd=template, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:]
    assert int(re.search(r"(\d+) passed", done.stdout)[1]) >= 12
