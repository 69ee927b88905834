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
FREEZE = "dependencies/images/ray-2.60.0-py312-cu129.freeze.txt"
THEIRS = {
    "BUILD.yaml": "# owner: @someone\n- name: another\n  dir: templates/another\n",
    "dependencies/template.depsets.yaml": "depsets:\n  - name: another\n    output: a\n",
    FREEZE: "Pydantic==2.12.3\nruamel.yaml==0.18.10\nray==2.60.0\n",
    "templates/another/README.md": "theirs",
}


def contents(folder: Path) -> dict[str, bytes]:
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


def test_registry_gets_what_it_wants_and_nothing_else(registry):
    written = contents(registry)
    folders = (
        f"{publish.FOLDER}/",
        f"configs/{publish.NAME}/",
        f"tests/{publish.NAME}",
    )
    assert {name for name in written if not name.startswith(folders)} == {*THEIRS}
    package = {path.name for path in (ROOT / "trainkit").glob("*.*")}
    assert {
        x.name for x in (registry / publish.FOLDER / "trainkit").iterdir()
    } == package
    build, depsets = (YAML(typ="safe").load(written[name]) for name in [*THEIRS][:2])
    names = [entry["name"] for entry in (*build, *depsets["depsets"])]
    assert names == ["another", publish.NAME, "another", names[3]]
    for place in (build[1]["dir"], *build[1]["compute_config"].values()):
        assert (registry / place).exists()
    # A second time, old files of ours go, and the lock that was made there stays.
    (registry / publish.FOLDER / "trainkit/old.py").touch()
    (registry / publish.FOLDER / publish.LOCK).write_text("made there\n")
    publish.publish(registry, SOURCE)
    assert contents(registry) == written | {
        f"{publish.FOLDER}/{publish.LOCK}": b"made there\n"
    }


def test_driver_and_workers_install_the_lock_of_what_the_image_lacks(registry):
    template = registry / publish.FOLDER
    code = "\n".join(
        cell.source
        for cell in nbformat.read(template / "README.ipynb", as_version=4).cells
        if cell.cell_type == "code"
    )
    assert f"!uv pip install -r {publish.LOCK} --system" in code
    assert f'ray.init(runtime_env={{"pip": "{publish.LOCK}", "py_modules"' in re.sub(
        r"\(\n.*?(?=runtime_env)", "(", code, flags=re.S
    )
    pins = (template / "requirements.txt").read_text().splitlines()[1:]
    assert all(re.fullmatch(r"[\w.\[\]-]+==[\w.]+", pin) for pin in pins)
    names = {re.match(r"[\w.-]+", pin)[0] for pin in pins}
    assert {"jax", "flax", "tiktoken"} < names
    assert not names & {"pydantic", "ruamel.yaml", "ray"}
    with pytest.raises(SystemExit, match="ray-9.freeze.txt isn't there"):
        publish.requirements(registry, "ray:9")


def test_page_is_plain_nbconverts_and_its_addresses_lead_to_files(registry, tmp_path):
    template = registry / publish.FOLDER
    command = [sys.executable, "-m", "nbconvert", "--to", "markdown", "README.ipynb"]
    subprocess.run([*command, "--output-dir", tmp_path], cwd=template, check=True)
    page = (template / "README.md").read_text()
    assert (tmp_path / "README.md").read_text() == page
    assert not re.search(r"[ \t]$", page, re.M)
    assert page.count("[![") == 2 and "two CPU cores to" not in page
    assert "ci/" not in re.sub(r"https://\S+", "", page)
    assert re.findall(r"\]\((?!https://|#)", re.sub(publish.FENCE, "", page)) == []
    there = re.findall(r"anyscale/templates/(?:(?:blob|tree)/)?main/([^)#]+)", page)
    assert {Path(path).suffix for path in there} >= {".png", ".py"}
    assert [path for path in there if not (registry / path).exists()] == []
    with pytest.raises(SystemExit, match="names no/file.md, which isn't there"):
        publish.absolute("[a](no/file.md)", SOURCE)
    code = "```\n[a](no/file.md)\n```"
    assert publish.absolute(code, SOURCE) == code


def test_registrys_test_runs_ours_and_a_few_steps(registry):
    template = registry / publish.FOLDER
    script = (registry / f"tests/{publish.NAME}/tests.sh").read_text()
    (lines,) = re.findall(r"^sed (?:.*\\\n)*.*\n", script, re.M)
    subprocess.run(["bash", "-euc", lines], cwd=template, check=True)
    few = load_config(template / re.search(r"GPT2_CONFIG=(\S+)", script)[1])
    assert few.eval_interval < few.max_steps <= 100 and few.machines == "gpu"
    assert "python -m pytest tests" in script
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests"]
    done = subprocess.run(command, cwd=template, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:]
    assert int(re.search(r"(\d+) passed", done.stdout)[1]) >= 12
