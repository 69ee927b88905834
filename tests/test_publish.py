"""What ci/publish.py writes into a checkout of the registry that publishes the page."""

import json
import re
import subprocess
import sys
from pathlib import Path

import nbformat
import publish
import pytest
import render_readme
import yaml
from addresses import Addresses
from conftest import ROOT

import trainkit.config

NAME, EXAMPLE = publish.NAME, publish.FOLDER
BUILD = """\
# owner: @someone
- name: another  # in another style
  dir: templates/another
  cluster_env: {image_uri: "anyscale/ray:2.57.0-py312"}

# owner: @somebody-else
- name: the-last
  dir: templates/the-last
"""
SOURCE = "https://github.com/someone/gpt2"
THEIRS = [f"{folder}/another/file.yaml" for folder in ("templates", "configs", "tests")]


def snapshot(folder: Path) -> dict[str, tuple]:
    """Each file's contents, permissions, and time of writing."""
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    about = [(path.read_bytes(), path.stat()) for path in files]
    names = [path.relative_to(folder).as_posix() for path in files]
    return {n: (b, s.st_mode, s.st_mtime_ns) for n, (b, s) in zip(names, about)}


@pytest.fixture(scope="module")
def registry(tmp_path_factory):
    """A small checkout of the registry, with the template in it."""
    folder = tmp_path_factory.mktemp("registry")
    for name in THEIRS:
        (folder / name).parent.mkdir(parents=True)
        (folder / name).write_text("theirs")
    (folder / "BUILD.yaml").write_text(BUILD)
    publish.publish(folder, SOURCE)
    (folder / EXAMPLE / "python_depset.lock").write_text("made there\n")
    return folder


def test_registry_gets_what_it_wants_and_nothing_else(registry):
    written = snapshot(registry)
    assert all(written[path][0] == b"theirs" for path in THEIRS)
    folders = (f"{EXAMPLE}/", f"configs/{NAME}/", f"tests/{NAME}/")
    own = {path for path in written if path.startswith(folders)}
    assert written.keys() - own == {"BUILD.yaml", *THEIRS}
    assert {f"{EXAMPLE}/README.ipynb", f"{EXAMPLE}/configs/smoke.yaml"} < own
    assert written[f"tests/{NAME}/tests.sh"][1] & 0o111
    *_, entry = yaml.safe_load((registry / "BUILD.yaml").read_text())
    assert (entry["name"], entry["dir"]) == (NAME, EXAMPLE)
    assert entry["cluster_env"].keys() == {"image_uri"}
    assert entry["test"]["tests_path"] == f"tests/{NAME}/"
    assert entry["test"]["timeout_in_sec"] == 1800  # the registry's aim
    for file in entry["compute_config"].values():
        ours = ROOT / "configs/compute" / Path(file).name
        assert written[file][0] == ours.read_bytes()


def test_hooks_of_the_registry_have_nothing_to_change(registry, tmp_path):
    """No space ends a line, one line break ends a file, and the page is plain nbconvert's."""
    for name, (contents, *_) in snapshot(registry).items():
        if name.endswith((".md", ".ipynb", ".yaml", ".txt", ".sh", ".py")):
            text = contents.decode()
            assert not re.search(r"[ \t]+$", text, re.M), name
            assert name in THEIRS or re.search(r"\S\n\Z", text), name
    command = [sys.executable, "-m", "nbconvert", "--to", "markdown"]
    command += [str(registry / EXAMPLE / "README.ipynb"), "--output", "README"]
    subprocess.run([*command, "--output-dir", str(tmp_path)], check=True)
    found = (tmp_path / "README.md").read_bytes()
    assert (registry / EXAMPLE / "README.md").read_bytes() == found


def test_entry_is_added_and_replaced_and_others_keep_their_bytes(registry):
    text = (registry / "BUILD.yaml").read_text()
    entry = text.removeprefix(BUILD + "\n")
    assert entry.startswith("- name: gpt2-jaxtrainer\n")
    old = "- name: gpt2-jaxtrainer\n  dir: old # ours\n\n  test: {a: 1}\n"
    between = BUILD.replace("# owner: @somebody", f"{old}\n# owner: @some")
    assert publish.with_entry(between, entry) == between.replace(old, entry)
    assert publish.with_entry(text, entry) == text
    for end in ("", "\n\n"):
        assert publish.with_entry(BUILD.rstrip() + end, entry) == text


def test_registry_s_test_trains_on_the_gpus_for_a_few_steps(registry):
    """The lines of tests.sh that make its configuration, run here."""
    script = (registry / f"tests/{NAME}/tests.sh").read_text()
    (lines,) = re.findall(r"^sed (?:.*\\\n)*.*\n", script, re.M)
    folder = registry / EXAMPLE
    subprocess.run(["bash", "-euc", lines], cwd=folder, check=True)
    path = folder / re.search(r"GPT2_CONFIG=(\S+)", script)[1]
    whole = trainkit.config.load_config(folder / "configs/stories.yaml")
    few = trainkit.config.load_config(path)
    path.unlink()
    assert few.platform == "gpu" and few.max_steps <= 100 < whole.max_steps
    assert few.eval_interval < few.max_steps
    assert few.max_documents < whole.max_documents
    assert (few.n_layer, few.batch_size) == (whole.n_layer, whole.batch_size)


def test_every_address_is_absolute_and_leads_to_a_file(registry):
    raw = "https://raw.githubusercontent.com/anyscale/templates"
    here = rf"(?:{publish.REGISTRY}/(?:blob|tree)|{raw})/main/([^#]+)"
    for page in ("README.md", "docs/guide.md"):
        text = (registry / EXAMPLE / page).read_text()
        text = re.sub(r"^```.*?^```", "", text, flags=re.M | re.S)
        found = re.findall(r"\]\(([^)]+)\)", text)
        assert [to for to in found if not re.match("https://|#", to)] == []
        paths = [match[1] for to in found if (match := re.match(here, to))]
        assert any(path.endswith(".png") for path in paths) or "guide" in page
        assert [path for path in paths if not (registry / path).exists()] == []


def test_page_begins_as_the_registrys_do_and_shows_what_cells_showed(registry):
    """And has nothing of what only is here."""
    page = (registry / EXAMPLE / "README.md").read_text()
    title, badges, *_ = page.split("\n\n")
    assert title.startswith("# ") and badges.count("[![") == 2
    assert f"to read, {publish.TIME}\n" in page
    stories = (ROOT / "configs/stories.yaml").read_text()
    assert f"that is {publish.TIME.split()[0]} minutes by arithmetic" in stories
    assert f"template-preview/{NAME}" in badges
    clone = f"git clone {publish.REGISTRY} && cd templates/{EXAMPLE}\n"
    assert clone in page and "Anyscale-specific configuration" in page
    assert "ci/" not in re.sub(r"https://\S+", "", page)
    for name in re.findall(r"\b(?:requirements|configs/)[\w/-]*\.(?:txt|yaml)", page):
        assert (registry / EXAMPLE / name).is_file() or not (ROOT / name).is_file()
    last = json.loads(render_readme.OUTPUTS.read_text())
    texts = [text for cell in last["cells"].values() if (text := cell.get("text"))]
    assert page.count(f"*Output on two CPU cores, {last['date']}:*") == len(texts) > 5
    assert all(f"```text\n{text}\n```" in page for text in texts)


def test_workers_get_the_package_and_the_requirements(registry):
    notebook = nbformat.read(registry / EXAMPLE / "README.ipynb", as_version=4)
    nbformat.validate(notebook)
    (init,) = [c.source for c in notebook.cells if "ray.init(" in c.source]
    given = 'runtime_env={"pip": "requirements.txt", "py_modules": ["trainkit"], '
    assert given in init
    (install,) = [c for c in notebook.cells if publish.INSTALL in c.source]
    assert install.metadata.tags == ["aside"]  # a job's script leaves it out
    pins = (registry / EXAMPLE / "requirements.txt").read_text().splitlines()[1:]
    ours = (ROOT / "requirements-gpu.txt").read_text().splitlines()[1:]
    assert pins == [pin for pin in ours if not pin.startswith("ray[")] != ours


RAW = "https://raw.githubusercontent.com/me/us/main/images/loss.png"
US = "https://github.com/me/us"
LICENSE = f"{US}/blob/main/LICENSE"


@pytest.mark.parametrize(
    "text, expected",
    [
        ("[a](docs/guide.md#x)", "[a](https://github.com/o/r/blob/main/t/guide.md#x)"),
        ("[`c`](LICENSE)", f"[`c`]({LICENSE})"),
        ("[d](trainkit)", f"[d]({US}/tree/main/trainkit)"),
        ("![e](images/loss.png 'f')", f"![e]({RAW} 'f')"),
        ('<img width=9 src="images/loss.png">', f'<img width=9 src="{RAW}">'),
        ("[![g](images/loss.png)](LICENSE)", f"[![g]({RAW})]({LICENSE})"),
        ("[h]: LICENSE", f"[h]: {LICENSE}"),
        ("[i](#here) [j](https://k.l/m) [n](mailto:o@p.q)", None),
        ("`[r](LICENSE)` and ``[s](`LICENSE)``", None),
        ("```\n[t](LICENSE)\n```\n~~~\n[u](LICENSE)\n~~~", None),
        ("```\nv\n```\n[w](LICENSE)", f"```\nv\n```\n[w]({LICENSE})"),
    ],
)
def test_address(text, expected):
    addresses = Addresses({"docs/guide.md": "t/guide.md"}, "https://github.com/o/r", US)
    assert addresses.rewrite("README.md", text) == (expected or text)


def test_what_is_wrong_is_named_and_nothing_is_written(registry, tmp_path):
    for text in ("[a](no/file.md)", "[a](../..)"):
        with pytest.raises(SystemExit, match="docs/guide.md names .*, which isn't"):
            Addresses({}, US, SOURCE).rewrite("docs/guide.md", text)
    before = snapshot(registry)
    with pytest.raises(SystemExit, match="it has no BUILD.yaml"):
        publish.publish(tmp_path, SOURCE)
    with pytest.raises(SystemExit, match="--source http://x"):
        publish.publish(registry, "http://x")
    assert not [*tmp_path.iterdir()]
    # A second time, old files of ours go, and a lock that was made there stays.
    (registry / EXAMPLE / "trainkit/old.py").touch()
    assert publish.publish(registry, SOURCE) == [f"{EXAMPLE}/trainkit/old.py (removed)"]
    assert snapshot(registry) == before
