"""Write the tutorial into a checkout of Anyscale's template registry, anyscale/templates.

    python ci/publish.py --into ../templates --source https://github.com/OWNER/NAME

`--source` is this repository's address. Other addresses become absolute, the set-up becomes
that of ci/places, and what each cell showed becomes a cell of its own; the rest is as it is
here. A second run changes nothing, and no other file of the checkout is touched: of BUILD.yaml,
only this template's entry.
"""

import argparse
import re
from pathlib import Path

import render_readme  # first: it finds the environment that has the other two

# isort: split
import nbformat
from addresses import GITHUB, Addresses

ROOT = Path(__file__).resolve().parent.parent
TEXTS = ROOT / "ci/places/anyscale"
REGISTRY = f"{GITHUB}anyscale/templates"
HOLDS = ("BUILD.yaml", "templates", "configs", "tests")  # by which a checkout is known
NAME = "gpt2-jaxtrainer"
FOLDER = f"templates/{NAME}"
INSTALL = "!uv pip install --quiet --system -r requirements.txt"
# As configs/stories.yaml says.
TIME = "38 minutes to run on four A10G GPUs, by arithmetic"
LOCK = "uv pip compile requirements.txt --output-file python_depset.lock"


def carried_files() -> dict[str, str]:
    """Which of our files are carried, and where to; of the images, those shown."""
    own = ["README.ipynb", "LICENSE", "README.md", "docs/guide.md"]
    pages = "".join((ROOT / page).read_text() for page in own[2:])
    own += sorted(set(re.findall(r"images/[\w-]+\.\w+", pages)))
    # A job leaves out what the first names; messages and the guide name those of ci/.
    own += [".gitignore", "ci/requirements.txt"]
    patterns = ("trainkit/*.py", "trainkit/*.json", "requirements-*.txt")
    patterns += ("ci/*_vocabulary.py", "configs/*.yaml", "configs/compute/kube*.yaml")
    for pattern in patterns:
        own += sorted(path.relative_to(ROOT).as_posix() for path in ROOT.glob(pattern))
    clouds = ("aws.yaml", "gce.yaml")
    carried = {f"configs/compute/{file}": f"configs/{NAME}/{file}" for file in clouds}
    return {path: f"{FOLDER}/{path}" for path in own} | carried


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
    title, _, text = cells[0].source.partition("\n\n")
    text = re.sub(r"\d+ to \d+ minutes to run on two CPU cores", TIME, text)
    badges = (TEXTS / "badges.md").read_text().strip()
    cells[0].source = "\n\n".join([title, badges, text])
    # Paragraphs up to the last that needs ci/ are for this repository only.
    _, _, rest = setup[0].source[setup[0].source.rindex("ci/") :].partition("\n\n")
    setup[0].source = "## Set up\n\n" + (TEXTS / "setup.md").read_text().strip()
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


def with_entry(text: str, entry: str) -> str:
    """BUILD.yaml with `entry` in place of the one of this template, or at its end."""
    old = re.compile(rf"^- name: {NAME}\n(?: .*\n|\n(?= ))*", re.M)
    if old.search(text):
        return old.sub(lambda _: entry, text)
    return f"{text.rstrip()}\n\n{entry}"


def make_files(checkout: Path, source: str) -> dict[str, bytes]:
    """The contents of all files, by their paths in the checkout."""
    carried = carried_files()
    addresses, guide = Addresses(carried, REGISTRY, source), "docs/guide.md"
    notebook = make_notebook(addresses)
    files = {there: (ROOT / path).read_bytes() for path, there in carried.items()}
    pins = (ROOT / "requirements-gpu.txt").read_text()
    entry = (ROOT / "configs/compute/BUILD.yaml").read_text()
    (uri,) = re.findall(r"image_uri: (\S+)", entry)
    pins = re.sub(r"(?m)^(#|ray).*\n", "", pins)
    entry = entry[entry.index("- name:") :]
    texts = {
        f"{FOLDER}/README.ipynb": nbformat.writes(notebook) + "\n",
        f"{FOLDER}/README.md": render_readme.to_markdown(notebook),
        f"{FOLDER}/{guide}": addresses.rewrite(guide, (ROOT / guide).read_text()),
        f"{FOLDER}/requirements.txt": f"# What {uri} needs beside Ray\n{pins}",
        f"tests/{NAME}/tests.sh": (TEXTS / "tests.sh").read_text(),
        "BUILD.yaml": with_entry((checkout / "BUILD.yaml").read_text(), entry),
    }
    return files | {path: text.encode() for path, text in texts.items()}


def publish(checkout: Path, source: str) -> list[str]:
    """Write all files that differ, and remove ours that are no more; say which."""
    if missing := [path for path in HOLDS if not (checkout / path).exists()]:
        raise SystemExit(
            f"{checkout} is no checkout of {REGISTRY}: it has no {missing[0]}."
        )
    if not re.fullmatch(rf"{GITHUB}[\w.-]+/[\w.-]+", source):
        raise SystemExit(f"--source {source}: expected {GITHUB}OWNER/NAME.")
    changed, files = [], make_files(checkout, source)
    for name, contents in files.items():
        path = checkout / name
        if not path.is_file() or path.read_bytes() != contents:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(contents)
            path.chmod(0o755 if path.suffix == ".sh" else 0o644)
            changed.append(name)
    for folder in ("ci", "configs", "docs", "images", "trainkit"):
        for path in (checkout / FOLDER / folder).rglob("*.*"):
            name = path.relative_to(checkout).as_posix()
            if path.is_file() and name not in files:
                path.unlink()
                changed.append(f"{name} (removed)")
    return changed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--into", type=Path, required=True, help="the checkout")
    parser.add_argument("--source", required=True, help="this repository on GitHub")
    options = parser.parse_args()
    changed = publish(options.into.expanduser(), options.source.rstrip("/"))
    print(*(changed or ["Nothing to change."]), sep="\n")
    print(f"For the lock file, in {FOLDER}: {LOCK}")


if __name__ == "__main__":
    main()
