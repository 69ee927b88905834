"""What ci/publish.py writes into a checkout of the registry that publishes the page."""

import os
import re
import subprocess
import sys
from pathlib import Path

import publish
import pytest
from notebook_module import code_cells
from ruamel.yaml import YAML

SOURCE = "https://github.com/someone/gpt2"
THEIRS = {
    "BUILD.yaml": "# owner: @someone\n- name: another\n  dir: templates/another\n",
    "dependencies/template.depsets.yaml": "depsets:\n  - name: another\n    output: a\n",
}


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
    def contents() -> dict[str, bytes]:
        files = [path for path in registry.rglob("*") if path.is_file()]
        return {str(path.relative_to(registry)): path.read_bytes() for path in files}

    written = contents()
    folders = (f"{publish.FOLDER}/", f"configs/{publish.NAME}", f"tests/{publish.NAME}")
    assert {name for name in written if not name.startswith(folders)} == {*THEIRS}
    build, depsets = (YAML(typ="safe").load(written[name]) for name in THEIRS)
    places = (build[1]["dir"], *build[1]["compute_config"].values())
    assert all((registry / place).exists() for place in places)
    assert depsets["depsets"][1]["output"] == f"{publish.FOLDER}/{publish.LOCK}"
    (registry / publish.FOLDER / "trainkit/no_longer.py").touch()
    lock = registry / publish.FOLDER / publish.LOCK
    lock.write_text("made by their tools")
    publish.publish(registry, SOURCE)
    assert contents() == written | {str(lock.relative_to(registry)): lock.read_bytes()}


def test_an_entry_is_written_in_place_of_the_one_of_its_name(tmp_path):
    path = tmp_path / "list.yaml"
    path.write_text("- name: ours\n  was: 1\n# the owner of\n- name: another\n")
    publish.set_entry(path, "- name: ours\n  is: 2\n")
    expected = "- name: ours\n  is: 2\n# the owner of\n- name: another\n"
    assert path.read_text() == expected


def test_driver_and_workers_install_the_lock(registry):
    cells = code_cells(registry / publish.FOLDER / "README.ipynb")
    (install,) = [cell for cell in cells if cell.source[0] == "!"]
    assert install.metadata.tags == ["aside"]  # a job's script has only Python
    code = "\n".join(cell.source for cell in cells)
    assert f"!uv pip install -r {publish.LOCK} --system" in code
    assert f'runtime_env={{"pip": "{publish.LOCK}", "py_modules": ["trainkit"]' in code


def test_addresses_on_the_page_lead_to_files(registry):
    page = (registry / publish.FOLDER / "README.md").read_text()
    assert page.count("[![") == 2 and "ci/" not in re.sub(
        r"https://\S+|ci/job\.sh", "", page
    )
    assert re.findall(r"\]\((?!https://|#)", re.sub(publish.FENCE, "", page)) == []
    there = re.findall(r"anyscale/templates/(?:(?:blob|tree)/)?main/([^)#]+)", page)
    assert there and all((registry / path).exists() for path in there)
    assert f"]({SOURCE}/blob/main/docs/guide.md#storage)" in page
    pictures = re.findall(r"!\[[^\]]*\]\((\S+)/images/\S+\)", page)
    raw = "https://raw.githubusercontent.com/anyscale/templates/main"
    assert {*pictures} == {f"{raw}/{publish.FOLDER}"}
    with pytest.raises(SystemExit, match="names no/file.md, which isn't there"):
        publish.absolute("[a](no/file.md)", SOURCE)


def test_registrys_test_trains_on_all_gpus_of_its_machines(registry):
    """Which its compute files say, in words; and with the command of its guide."""
    script = (registry / f"tests/{publish.NAME}/tests.sh").read_text()
    (gpus,) = re.findall(r"^gpus=(\d)", script, re.M)
    edits = re.findall(r"sed (-e .*?) configs/stories.yaml", script, re.S)[0]
    edits = edits.replace("\\\n", "").replace("$gpus", gpus).replace("'", '"')
    text = (registry / publish.FOLDER / "configs/stories.yaml").read_text()
    command = ["bash", "-c", f"sed {edits}"]
    done = subprocess.run(
        command, input=text, capture_output=True, text=True, check=True
    )
    keys = YAML(typ="safe").load(done.stdout)
    assert keys["scaling"] == {"num_workers": int(gpus), "use_gpu": True}
    assert (keys["max_steps"], keys["eval_interval"]) == (40, 20)
    for machine in ("g5.12xlarge", "g2-standard-48-nvidia-l4-4"):  # of four GPUs each
        files = (registry / f"configs/{publish.NAME}").iterdir()
        assert any(machine in path.read_text() for path in files) and gpus == "4"
    assert (registry / publish.FOLDER / "ci/job.sh").exists()


@pytest.mark.extra
def test_what_runs_on_gpus_fails_with_its_tests(registry, tmp_path, head):
    """Here on a node that says that it has two, without what is to be installed."""
    head.add_node(num_cpus=1, num_gpus=2)
    head.wait_for_nodes()
    script = (registry / publish.FOLDER / "tests/on_gpus.py").read_text()
    script = script.replace(', "pip": "python_depset.lock"', "")
    script = script.replace("subprocess.run(install, check=True)", "")
    (tmp_path / "on_gpus.py").write_text(script)
    for text, code in (("def test(): pass", 0), ("def test(): assert False", 1)):
        (tmp_path / "test_one.py").write_text(text)
        command = [sys.executable, "on_gpus.py", "2", "test_one.py"]
        address = {"RAY_ADDRESS": head.address}
        done = subprocess.run(command, cwd=tmp_path, env=os.environ | address)
        assert done.returncode == code


@pytest.mark.slow
def test_registrys_test_runs_some_of_ours(registry, monkeypatch):
    script = (registry / f"tests/{publish.NAME}/tests.sh").read_text()
    (options,) = re.findall(r"^python (-m pytest.*)", script, re.M)
    command = f"cd {registry / publish.FOLDER} && {sys.executable} {options}"
    # test_gradients takes longest, and runs here anyway.
    monkeypatch.setenv("PYTEST_ADDOPTS", "-k 'not test_gradients'")
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:]
