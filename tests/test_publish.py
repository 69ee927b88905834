"""What ci/publish.py writes into checkouts of the repositories that publish the page."""

import ast
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import image
import nbformat
import publish
import pytest
import render_readme
import yaml
from addresses import Addresses

ROOT = Path(__file__).resolve().parent.parent
NAME = "gpt2-jaxtrainer"
EXAMPLE = f"templates/{NAME}"
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


def snapshot(folder: Path) -> dict[str, tuple]:
    """Each file's contents, permissions, and time of writing."""
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    return {
        path.relative_to(folder).as_posix(): (
            path.read_bytes(),
            path.stat().st_mode,
            path.stat().st_mtime_ns,
        )
        for path in files
    }


def make_registry(folder: Path) -> Path:
    for name in ("templates/another", "configs/another", "tests/another"):
        (folder / name).mkdir(parents=True)
        (folder / name / "file.yaml").write_text("theirs")
    (folder / "BUILD.yaml").write_text(BUILD)
    return folder


@pytest.fixture(scope="module")
def registry(tmp_path_factory):
    """A small checkout of the registry, with the template in it."""
    folder = make_registry(tmp_path_factory.mktemp("registry"))
    publish.publish(folder, NAME, SOURCE)
    return folder


@pytest.fixture
def published(registry):
    """The example's folder in the checkout, and the address of the checkout."""
    return registry / EXAMPLE, registry, "anyscale/templates", "main"


def addresses_on(page: Path) -> list[str]:
    """Where the Markdown links to, and which images it shows, outside of code."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S)
    return re.findall(r"\]\(([^)]+)\)", text)


def cell_with(notebook: Path, what: str) -> nbformat.NotebookNode:
    cells = nbformat.read(notebook, as_version=4).cells
    (cell,) = [cell for cell in cells if what in cell.source]
    return cell


def test_registry_gets_what_it_wants_and_nothing_else(registry):
    written = snapshot(registry)
    others = {
        f"{folder}/another/file.yaml" for folder in ("templates", "configs", "tests")
    }
    assert all(written[path][0] == b"theirs" for path in others)
    own = written.keys() - others
    folders = (f"{EXAMPLE}/", f"configs/{NAME}/", f"tests/{NAME}/")
    assert {path for path in own if not path.startswith(folders)} == {"BUILD.yaml"}
    assert own >= {
        f"{EXAMPLE}/README.ipynb",
        f"{EXAMPLE}/README.md",
        f"{EXAMPLE}/requirements.txt",
        f"{EXAMPLE}/configs/smoke.yaml",
        f"{EXAMPLE}/trainkit/config.py",
        f"configs/{NAME}/aws.yaml",
        f"configs/{NAME}/gce.yaml",
        f"tests/{NAME}/tests.sh",
    }
    assert os.access(registry / f"tests/{NAME}/tests.sh", os.X_OK)
    assert "NAME" not in (registry / f"tests/{NAME}/tests.sh").read_text()


def test_second_run_changes_nothing(registry):
    before = snapshot(registry)
    assert publish.publish(registry, NAME, SOURCE)[0] == "Nothing to change."
    assert snapshot(registry) == before


def test_entry_is_added_and_replaced_and_others_keep_their_bytes(registry):
    text = (registry / "BUILD.yaml").read_text()
    assert text.startswith(BUILD + "\n- name: gpt2-jaxtrainer\n")
    entry = text.removeprefix(BUILD + "\n")
    old = "- name: gpt2-jaxtrainer\n  dir: old # ours\n# in between\n  test: {a: 1}\n"
    between = BUILD.replace(
        "# owner: @somebody", f"# owner: @us\n{old}\n# owner: @somebody"
    )
    replaced = publish.with_entry(between, entry, NAME)
    assert replaced == between.replace(old, entry)
    assert publish.with_entry(text, entry, NAME) == text
    for end in ("", "\n", "\n\n"):
        text = BUILD.rstrip() + end
        added = publish.with_entry(text, entry, NAME)
        assert added.startswith(text) and added.endswith("the-last\n\n" + entry)
    for text in ("", "name: no-list\n", "  - name: indented\n"):
        with pytest.raises(SystemExit, match="no list of entries"):
            publish.with_entry(text, entry, NAME)


def test_entry_follows_the_registry_rules(registry):
    *others, entry = yaml.safe_load((registry / "BUILD.yaml").read_text())
    assert [other["name"] for other in others] == ["another", "the-last"]
    assert entry.keys() == {
        "name",
        "owner_team",
        "dir",
        "cluster_env",
        "compute_config",
        "test",
    }
    assert entry["name"] == NAME and entry["dir"] == EXAMPLE
    assert entry["owner_team"] == "ray-train"
    assert entry["cluster_env"].keys() == {"image_uri"}
    assert entry["compute_config"] == {
        "AWS": f"configs/{NAME}/aws.yaml",
        "GCP": f"configs/{NAME}/gce.yaml",
    }
    assert entry["test"]["tests_path"] == f"tests/{NAME}/"
    assert entry["test"]["command"] == "bash tests.sh"
    assert 0 < entry["test"]["timeout_in_sec"] <= 1800  # the registry's aim
    for file in entry["compute_config"].values():
        assert (registry / file).read_bytes() == (
            ROOT / "configs/compute" / Path(file).name
        ).read_bytes()


def test_every_address_is_absolute_and_leads_to_a_file(published):
    example, checkout, repository, branch = published
    guide = (example / "docs/guide.md").read_text()
    titles = re.findall(r"^#+ (.*)", guide, re.M)
    headings = {re.sub(r"[^\w-]", "", t.lower().replace(" ", "-")) for t in titles}
    for page in (example / "README.md", example / "docs/guide.md"):
        found = addresses_on(page)
        assert len(found) > 20
        assert [to for to in found if not re.match("https://|#", to)] == []
        here = re.compile(
            rf"https://(?:github.com/{repository}/(?:blob|tree)"
            rf"|raw.githubusercontent.com/{repository})/{branch}/([^#]+)"
        )
        paths = [match[1] for to in found if (match := here.match(to))]
        assert [path for path in paths if not (checkout / path).exists()] == []
        assert any(path.endswith(".png") for path in paths)
        anchors = {to.partition("docs/guide.md#")[2] for to in found} - {""}
        assert anchors <= headings
    assert f"{SOURCE}/blob/main/CONTRIBUTING.md" in addresses_on(example / "README.md")


def test_page_is_the_plain_rendering_with_every_output(published, tmp_path):
    example, *_ = published
    command = [sys.executable, "-m", "nbconvert", "--to", "markdown"]
    command += [str(example / "README.ipynb"), "--output", "README"]
    subprocess.run([*command, "--output-dir", str(tmp_path)], check=True)
    page = (example / "README.md").read_text()
    assert (tmp_path / "README.md").read_text() == page
    notebook = nbformat.read(example / "README.ipynb", as_version=4)
    nbformat.validate(notebook)
    for cell in notebook.cells:
        assert not cell.get("outputs") and not cell.get("execution_count")
    last = json.loads(render_readme.OUTPUTS.read_text())
    texts = [cell["text"] for cell in last["cells"].values() if cell["text"]]
    assert len(texts) > 10
    caption = f"*Output on two CPU cores, {last['date']}:*"
    assert page.count(caption) == len(texts)
    assert all(text in page for text in texts)
    for plot in ("loss.png", "drill.png"):
        assert re.search(rf"!\[[^\]]+\]\(https://\S+/images/{plot}\)", page)


def test_set_up_names_nothing_that_is_not_there(published):
    example, *_ = published
    text = (example / "README.md").read_text()
    assert "ci/" not in re.sub(r"https://\S+", "", text)
    for name in re.findall(r"\b(?:requirements|configs/)[\w/-]*\.(?:txt|yaml)", text):
        assert (example / name).is_file() or not (ROOT / name).is_file(), name
    cell = cell_with(example / "README.ipynb", "## Set up")
    original = cell_with(ROOT / "README.ipynb", "## Set up").source
    kept = original[original.rindex("ci/") :].partition("\n\n")[2]
    assert kept in text and cell.source not in original


def test_workers_get_the_package_and_the_requirements(registry):
    source = cell_with(registry / EXAMPLE / "README.ipynb", "ray.init(").source
    (call,) = [
        node
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "ray.init"
    ]
    (value,) = [k.value for k in call.keywords if k.arg == "runtime_env"]
    environment = {k.value: v for k, v in zip(value.keys, value.values)}
    assert ast.unparse(environment["py_modules"]) == "['trainkit']"
    assert (registry / EXAMPLE / "trainkit/__init__.py").is_file()
    assert ast.literal_eval(environment["pip"]) == "requirements.txt"
    install = cell_with(registry / EXAMPLE / "README.ipynb", publish.INSTALL)
    assert install.metadata.tags == ["aside"]  # a job's script leaves it out


def test_requirements_hold_what_the_image_lacks_or_say_why(registry):
    lines = (registry / EXAMPLE / "requirements.txt").read_text().splitlines()[1:]
    pins = image.read_pins()
    listed = [line.partition("  # ") for line in lines]
    assert {pin for pin, _, _ in listed} <= set(pins.values())
    assert [pin for pin, _, why in listed if why] == [pins[n] for n in image.REFUSED]
    left_out = set(pins.values()) - {pin for pin, _, _ in listed}
    assert left_out == {pins[n] for n in image.BROUGHT - image.REFUSED.keys()}


def test_versions_are_compared_with_those_of_the_image(tmp_path):
    pins = {n: pin.split("==")[1] for n, pin in image.read_pins().items()}
    lines = [f"{name}=={pins[name]}" for name in sorted(image.BROUGHT - {"numpy"})]
    freeze = tmp_path / "ray-2.60.0-py312-cu129.freeze.txt"
    uri = "anyscale/ray:2.60.0-py312-cu129"
    (note,) = image.differences(uri, tmp_path)
    assert freeze.name in note
    freeze.write_text("\n".join([*lines, "numpy==1.0"]))
    (note,) = image.differences(uri, tmp_path)
    assert note == f"numpy: {pins['numpy']} here, 1.0 in the image"
    freeze.write_text("\n".join(lines))
    with pytest.raises(SystemExit, match=r"lacks \['numpy'\]"):
        image.differences(uri, tmp_path)


@pytest.mark.parametrize(
    "text, expected",
    [
        ("[a](docs/guide.md#x)", "[a](https://github.com/o/r/blob/b/t/guide.md#x)"),
        ("[`c`](LICENSE)", "[`c`](https://github.com/me/us/blob/main/LICENSE)"),
        ("[d](trainkit)", "[d](https://github.com/me/us/tree/main/trainkit)"),
        (
            "![e](images/loss.png 'f')",
            "![e](https://raw.githubusercontent.com/me/us/main/images/loss.png 'f')",
        ),
        (
            '<img width=9 src="images/loss.png">',
            '<img width=9 src="https://raw.githubusercontent.com/me/us/main/images/loss.png">',
        ),
        (
            "[![g](images/loss.png)](LICENSE)",
            "[![g](https://raw.githubusercontent.com/me/us/main/images/loss.png)]"
            "(https://github.com/me/us/blob/main/LICENSE)",
        ),
        ("[h]: LICENSE", "[h]: https://github.com/me/us/blob/main/LICENSE"),
        ("[i](#here) [j](https://k.l/m) [n](mailto:o@p.q)", None),
        ("`[r](LICENSE)` and ``[s](`LICENSE)``", None),
        ("```\n[t](LICENSE)\n```", None),
    ],
)
def test_address(text, expected):
    carried = {"docs/guide.md": "t/guide.md"}
    source = "https://github.com/me/us"
    addresses = Addresses(carried, "https://github.com/o/r", "b", source)
    assert addresses.rewrite("README.md", text) == (expected or text)


def test_link_to_nothing_is_refused():
    addresses = Addresses({}, "https://github.com/o/r", "b", SOURCE)
    for text in ("[a](no/file.md)", "[a](../../outside)"):
        with pytest.raises(
            SystemExit, match="docs/guide.md names .*, which isn't there"
        ):
            addresses.rewrite("docs/guide.md", text)


def test_what_is_wrong_is_named_and_nothing_is_written(tmp_path):
    registry = make_registry(tmp_path / "registry")
    before = snapshot(tmp_path)
    for folder, name, source, message in [
        (tmp_path / "nowhere", NAME, SOURCE, "it has no BUILD.yaml"),
        (registry, "../x", SOURCE, "--name ../x"),
        (registry, NAME, "http://x", "--source http://x"),
        (registry, "another", SOURCE, "is another example"),
    ]:
        with pytest.raises(SystemExit, match=re.escape(message)):
            publish.publish(folder, name, source)
    assert snapshot(tmp_path) == before


def test_command_says_in_a_sentence_what_is_wrong(tmp_path):
    command = [sys.executable, "ci/publish.py", "--into", str(tmp_path)]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 1
    assert result.stderr == (
        f"{tmp_path} is no checkout of https://github.com/anyscale/templates: "
        "it has no BUILD.yaml.\n"
    )


def test_interrupted_writing_leaves_whole_files(tmp_path, monkeypatch):
    path = tmp_path / "BUILD.yaml"
    path.write_text("old")

    def fail(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(Path, "replace", fail)
        with pytest.raises(OSError):
            publish.write(path, b"new")
    assert snapshot(tmp_path).keys() == {"BUILD.yaml"} and path.read_text() == "old"
    assert publish.write(path, b"new") and path.read_text() == "new"


def test_update_removes_old_files_of_ours_and_keeps_the_registry_s(registry):
    old = registry / EXAMPLE / "trainkit/old.py"
    lock = registry / EXAMPLE / "python_depset.lock"
    old.write_text("")
    lock.write_text("made there")
    changed = publish.publish(registry, NAME, SOURCE)
    assert changed[0] == f"{EXAMPLE}/trainkit/old.py (removed)"
    assert not old.exists() and lock.exists()
    lock.unlink()


def test_placeholder_is_named(tmp_path):
    *_, note = publish.publish(make_registry(tmp_path), NAME, publish.SOURCE)
    assert "--source is missing" in note and "CONTRIBUTING.md" in note
