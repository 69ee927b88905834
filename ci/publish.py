"""Write the tutorial into a checkout of Anyscale's template registry, anyscale/templates.

    python ci/publish.py --into ../templates --name gpt2-jaxtrainer

Addresses become absolute, the set-up becomes that of ci/places, and what each cell showed
becomes a cell of its own; the rest is as it is here. A second run changes nothing, and no
other file of the checkout is touched: of BUILD.yaml, only this template's entry.
"""

import argparse
import os
import re
from pathlib import Path

import render_readme  # first: it finds the environment that has the other two

# isort: split
import image
import nbformat
import yaml
from addresses import GITHUB, Addresses

ROOT = Path(__file__).resolve().parent.parent
TEXTS = ROOT / "ci/places/anyscale"
SOURCE = f"{GITHUB}OWNER/gpt2-jaxtrainer"  # a placeholder until this has an address
INSTALL = "!uv pip install --quiet --system -r requirements.txt"
GUIDE, BUILD = "docs/guide.md", "BUILD.yaml"


REGISTRY = f"{GITHUB}anyscale/templates"
HOLDS = (BUILD, "templates", "configs", "tests")  # by which a checkout is known
NAME = "gpt2-jaxtrainer"


def carried_files(name: str) -> dict[str, str]:
    """Which of our files are carried, and where to; of the images, those shown."""
    folder = f"templates/{name}"
    own = ["README.ipynb", "README.md", GUIDE]
    pages = "".join((ROOT / page).read_text() for page in own[1:])
    own += sorted(set(re.findall(r"images/[\w-]+\.\w+", pages)))
    own += ["requirements-gpu.txt", "requirements-tpu.txt"]
    patterns = ("trainkit/*.py", "trainkit/*.json")
    for pattern in (*patterns, "configs/*.yaml", "configs/compute/kube*.yaml"):
        own += sorted(path.relative_to(ROOT).as_posix() for path in ROOT.glob(pattern))
    carried = {path: f"{folder}/{path}" for path in own}
    for cloud in ("aws.yaml", "gce.yaml"):
        carried[f"configs/compute/{cloud}"] = f"configs/{name}/{cloud}"
    return carried


def make_notebook(addresses: Addresses) -> nbformat.NotebookNode:
    """README.ipynb with absolute addresses, what its cells showed, and the set-up there."""
    notebook = nbformat.read(ROOT / "README.ipynb", as_version=4)
    notebook = render_readme.with_outputs(notebook)
    cells = notebook.cells
    setup = [c for c in cells if re.match(r"## Set up\n[^\0]*\bci/", c.source)]
    init = [
        c for c in cells if re.search(r"(?m)^ray\.init\([^\0]*runtime_env={", c.source)
    ]
    if len(setup) != 1 or len(init) != 1:
        raise SystemExit(
            'README.ipynb: expected one cell "## Set up" that names commands of ci/, and '
            "one that calls ray.init(runtime_env={...}). Adapt ci/publish.py to the page."
        )
    # Paragraphs up to the last that needs ci/ are for this repository only.
    _, _, rest = setup[0].source[setup[0].source.rindex("ci/") :].partition("\n\n")
    text = (TEXTS / "setup.md").read_text().strip()
    setup[0].source = f"## Set up\n\n{text}"
    # The cell is for this node, `pip` for the others.
    new = [nbformat.v4.new_code_cell(INSTALL, metadata={"tags": ["aside"]})]
    new += [nbformat.v4.new_markdown_cell(rest)] if rest else []
    pip = '{"pip": "requirements.txt", '
    init[0].source = init[0].source.replace("runtime_env={", f"runtime_env={pip}")
    for number, cell in enumerate(new, 1):
        cell.id = f"set-up-{number}"
    after = cells.index(setup[0]) + 1
    cells[after:after] = new
    for cell in cells:
        if cell.cell_type == "markdown":
            cell.source = addresses.rewrite("README.ipynb", cell.source)
    return notebook


def with_entry(text: str, entry: str, name: str) -> str:
    """BUILD.yaml with `entry` in place of the one of that name, or at its end."""
    root = yaml.compose(text)
    if not isinstance(root, yaml.SequenceNode) or root.start_mark.column:
        raise SystemExit("BUILD.yaml is no list of entries that begin with `- name:`.")
    lines = text.splitlines(keepends=True)
    for item in root.value:
        if name in [value.value for key, value in item.value if key.value == "name"]:
            first, end = item.start_mark.line, item.start_mark.line + 1
            while end < len(lines) and lines[end][0] in " #\r\n":
                end += 1
            while lines[end - 1][0] in "#\r\n":  # these belong to what follows
                end -= 1
            return "".join([*lines[:first], entry, *lines[end:]])
    return text + "\n" * (2 - (text[-2:] == "\n\n") - (text[-1:] == "\n")) + entry


def make_files(name: str, checkout: Path, source: str) -> tuple[dict, list]:
    """The contents of all files, by their paths in the checkout, and what to tell."""
    folder, carried = f"templates/{name}", carried_files(name)
    addresses = Addresses(carried, REGISTRY, "main", source)
    notebook = make_notebook(addresses)
    entry = (ROOT / "configs/compute" / BUILD).read_text()
    entry = entry[entry.index("- name:") :]
    (fields,) = yaml.safe_load(entry)
    image_uri = fields["cluster_env"]["image_uri"]
    files = {there: (ROOT / path).read_bytes() for path, there in carried.items()}
    files[f"{folder}/README.ipynb"] = nbformat.writes(notebook) + "\n"
    files[f"{folder}/README.md"] = render_readme.to_markdown(notebook)
    files[f"{folder}/{GUIDE}"] = addresses.rewrite(GUIDE, (ROOT / GUIDE).read_text())
    files[f"{folder}/requirements.txt"] = image.requirements(image_uri)
    tests = (TEXTS / "tests.sh").read_text().replace("NAME", name)
    files[f"tests/{name}/tests.sh"] = tests
    entry = entry.replace(fields["name"], name)
    registered = (checkout / BUILD).read_bytes().decode()
    files[BUILD] = with_entry(registered, entry, name)  # last, when all is there
    notes = image.differences(image_uri, checkout / "dependencies/images")
    if addresses.left_behind and source == SOURCE:
        left = ", ".join(sorted(addresses.left_behind))
        notes.append(f"--source is missing: links to {left} lead to {SOURCE}.")
    return {p: f.encode() if isinstance(f, str) else f for p, f in files.items()}, notes


def write(path: Path, contents: bytes) -> bool:
    """Write a file that isn't so already; beside it first, so that it's always whole."""
    script = path.suffix == ".sh"
    if path.is_file() and path.read_bytes() == contents:
        if not script or os.access(path, os.X_OK):
            return False
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.new")
    try:
        beside.write_bytes(contents)
        beside.chmod(0o755 if script else 0o644)
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)
    return True


def publish(checkout: Path, name: str, source: str) -> list[str]:
    """Write all files that differ, and remove ours that are no more; say which."""
    if missing := [path for path in HOLDS if not (checkout / path).exists()]:
        raise SystemExit(
            f"{checkout} is no checkout of {REGISTRY}: it has no {missing[0]}."
        )
    if not re.fullmatch(r"[a-z0-9_-]+", name):
        raise SystemExit(f"--name {name}: use only a to z, digits, - and _.")
    if not re.fullmatch(rf"{GITHUB}[\w.-]+/[\w.-]+", source):
        raise SystemExit(f"--source {source}: expected an address such as {SOURCE}.")
    example = checkout / "templates" / name
    if example.exists() and not (example / "trainkit/__init__.py").is_file():
        raise SystemExit(f"{example} is another example. Choose another --name.")
    files, notes = make_files(name, checkout, source)
    changed = [path for path, text in files.items() if write(checkout / path, text)]
    for own in ("configs", "docs", "images", "trainkit"):
        for path in [p for p in (example / own).rglob("*.*") if p.is_file()]:
            if path.relative_to(checkout).as_posix() not in files:
                path.unlink()
                changed.append(f"{path.relative_to(checkout)} (removed)")
    return [*(changed or ["Nothing to change."]), *notes]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--into", type=Path, required=True, help="the checkout")
    parser.add_argument("--name", default=NAME, help="of the template's folder")
    parser.add_argument("--source", default=SOURCE, help="this repository on GitHub")
    args = parser.parse_args()
    try:
        lines = publish(args.into.expanduser(), args.name, args.source)
    except OSError as error:
        raise SystemExit(f"{error}. What is written is whole; run it again.") from None
    print(*lines, sep="\n")


if __name__ == "__main__":
    main()
