"""Write the tutorial into a checkout of Anyscale's template registry, anyscale/templates.

    python ci/publish.py --into ../templates --source https://github.com/OWNER/NAME

`--source` is this repository's address. Other addresses become absolute, the set-up becomes
that of ci/places/anyscale, and what each cell showed becomes a cell of its own; the package,
the configurations, and some of the tests come along as they are. Of the checkout, this writes
the template's own folders and its entries in two files.
"""

import argparse
import re
import shutil
from pathlib import Path

import nbformat
import render_readme

ROOT = Path(__file__).resolve().parent.parent
PLACE = ROOT / "ci/places/anyscale"
REGISTRY = "https://github.com/anyscale/templates"
NAME = "gpt2-jaxtrainer"
FOLDER = f"templates/{NAME}"
LOCK = "python_depset.lock"  # which the registry's tools make
INSTALL = (
    f"!uv pip install -r {LOCK} --system --no-deps --index-strategy unsafe-best-match"
)
TESTS = ("conftest", "test_config", "test_device")
FENCE = re.compile(r"(^```.*?^```)", re.M | re.S)
LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!https?:|#)([^)#]+)(#[^)]*)?\)")


def carried_files() -> dict[str, Path]:
    """The files that come along as they are, by their paths in the checkout."""
    patterns = ("LICENSE", ".gitignore", "trainkit/*.*", "configs/*.yaml", "ci/job.sh")
    paths = [path for pattern in patterns for path in ROOT.glob(pattern)]
    shown = re.findall(r"\]\((images/[^)]+)\)", (ROOT / "README.md").read_text())
    paths += [ROOT / image for image in shown]
    files = {f"{FOLDER}/{path.relative_to(ROOT)}": path for path in paths}
    tests = [ROOT / f"tests/{name}.py" for name in TESTS]
    for path in [ROOT / "ci/notebook_module.py", PLACE / "on_gpus.py", *tests]:
        files[f"{FOLDER}/tests/{path.name}"] = path
    files[f"{FOLDER}/requirements.txt"] = PLACE / "requirements.txt"
    files[f"tests/{NAME}/tests.sh"] = PLACE / "tests.sh"
    for cloud in ("aws.yaml", "gce.yaml"):
        files[f"configs/{NAME}/{cloud}"] = ROOT / "configs/compute" / cloud
    return files


def absolute(text: str, source: str) -> str:
    """Markdown with absolute addresses: in the registry of what is there, or in `source`.

    Raises:
        SystemExit: if it names a file that there isn't.
    """
    carried = carried_files()

    def change(match: re.Match) -> str:
        picture, label, path, anchor = match.groups(default="")
        if not (ROOT / path).exists():
            raise SystemExit(f"README.ipynb names {path}, which isn't there.")
        base, there = source, path
        if f"{FOLDER}/{path}" in carried:
            base, there = REGISTRY, f"{FOLDER}/{path}"
        if picture:
            base = base.replace("github.com", "raw.githubusercontent.com")
            return f"![{label}]({base}/main/{there})"
        return f"[{label}]({base}/blob/main/{there}{anchor})"  # or a folder's tree

    parts = FENCE.split(text)
    parts[::2] = [LINK.sub(change, part) for part in parts[::2]]
    return "".join(parts)


def make_notebook(source: str) -> nbformat.NotebookNode:
    """README.ipynb with absolute addresses, what its cells showed, and the set-up there."""
    notebook = nbformat.read(ROOT / "README.ipynb", as_version=4)
    cells = render_readme.with_outputs(notebook).cells
    title, _, text = cells[0].source.partition("\n\n")
    text = re.sub(r" The cells run in [^.\n]*\.", "", text)
    badges = (PLACE / "badges.md").read_text().strip()
    cells[0].source = "\n\n".join([title, badges, text])
    (setup,) = [c for c in cells if c.source.startswith("## Set up\n")]
    # Paragraphs up to the last that needs ci/ are for this repository only.
    _, _, rest = setup.source[setup.source.rindex("ci/") :].partition("\n\n")
    setup.source = "## Set up\n\n" + (PLACE / "setup.md").read_text().strip()
    # The cell is for this node, and `pip` for the others.
    install = nbformat.v4.new_code_cell(INSTALL, id="install")
    install.metadata.tags = ["aside"]  # which a job's script leaves out
    after = nbformat.v4.new_markdown_cell(rest, id="after-install")
    place = cells.index(setup) + 1
    cells[place:place] = [install, after] if rest else [install]
    (init,) = [c for c in cells if c.cell_type == "code" and "ray.init(" in c.source]
    pip = f'runtime_env={{"pip": "{LOCK}", '
    init.source = init.source.replace("runtime_env={", pip)
    for cell in cells:
        if cell.cell_type == "markdown":
            cell.source = absolute(cell.source, source)
    return nbformat.from_dict(notebook | {"cells": cells})


def set_entry(path: Path, entry: str) -> None:
    """Write `entry` into a YAML list, in place of the one of its name, or at its end."""
    first = re.escape(entry.splitlines()[0])
    old = re.compile(rf"^{first}\n(?:(?! *(?:- name:|#)).+\n)*", re.M)
    text = path.read_text()
    if not old.search(text):
        path.write_text(f"{text.rstrip()}\n\n{entry}")
    else:
        path.write_text(old.sub(lambda _: entry, text))


def publish(checkout: Path, source: str) -> None:
    """Write the template, in place of what an earlier call wrote; the lock stays."""
    notebook = make_notebook(source)
    template = checkout / FOLDER
    for path in template.rglob("*.*"):
        if path.is_file() and path.name != LOCK:
            path.unlink()
    for there, path in carried_files().items():
        (checkout / there).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, checkout / there)
    (template / "README.ipynb").write_text(nbformat.writes(notebook) + "\n")
    (template / "README.md").write_text(render_readme.to_markdown(notebook))
    entry = (PLACE / "BUILD.yaml").read_text()
    set_entry(checkout / "BUILD.yaml", entry[entry.index("- name:") :])
    depsets = checkout / "dependencies/template.depsets.yaml"
    set_entry(depsets, (PLACE / "depset.yaml").read_text())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--into", type=Path, required=True, help="the checkout")
    parser.add_argument("--source", required=True, help="this repository on GitHub")
    options = parser.parse_args()
    publish(options.into, options.source.rstrip("/"))
