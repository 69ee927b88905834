"""Write README.md from README.ipynb, with what its cells showed in a smoke run.

    python ci/render_readme.py           write it, with the outputs of the last run, and in
                                         both, how large the package is
    python ci/render_readme.py --run     run the notebook first, on two CPU cores, 4 minutes
    python ci/render_readme.py --check   exit 1, with a diff, if it is out of date

The notebook is stored without outputs. Those of the last run are in docs/outputs.json, each
with the code of its cell, and the plots in images/. When code has changed since, the first and
the last command say so.
"""

import argparse
import base64
import datetime
import difflib
import json
import os
import re
import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ENVIRONMENT = ROOT / ".venv"  # which ci/test.sh and ci/smoke.sh make
OUTPUTS = ROOT / "docs/outputs.json"
PREFIX = re.compile(
    r"^(\x1b\[\d+m)?\((RayTrainWorker|TrainController) .*?\)(\x1b\[0m)? ?"
)
NOISE = re.compile(r"^\[Gloo\]|^(\x1b\[\d+m)?\(raylet\)|^\s*$")
STEP = re.compile(r"^step \d+ \|")

try:
    import nbformat
    from nbconvert import MarkdownExporter
except ModuleNotFoundError as error:
    python = ENVIRONMENT / "bin/python"
    if not python.exists() or Path(sys.prefix) == ENVIRONMENT:
        raise SystemExit(
            f"{error}, and {ENVIRONMENT} doesn't have it. `bash ci/smoke.sh` installs it."
        ) from None
    os.execv(python, [python, *sys.argv])


def run(notebook: nbformat.NotebookNode, folder: Path) -> nbformat.NotebookNode:
    """Run the notebook in its smoke form, in a copy of what it needs."""
    from nbclient import NotebookClient

    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for name in ("trainkit", "configs"):
        shutil.copytree(ROOT / name, folder / name)
    os.environ |= {"RAY_ADDRESS": "local", "GPT2_CONFIG": "configs/smoke.yaml"}
    os.environ.setdefault("TIKTOKEN_CACHE_DIR", str(ENVIRONMENT / "tiktoken"))
    resources = {"metadata": {"path": str(folder)}}
    return NotebookClient(notebook, timeout=900, resources=resources).execute()


def shorten(text: str, folder: Path) -> str:
    """What a cell printed, without Ray's prefixes, others' lines, and paths of a machine.

    Of lines of the log in a row, the first and the last stay.
    """
    lines = [PREFIX.sub("", line) for line in text.splitlines()]
    if any(map(STEP.match, lines)):
        lines = [line for line in lines if not NOISE.match(line)]
        inner = [
            all(map(STEP.match, lines[max(i - 1, 0) : i + 2]))
            and 0 < i < len(lines) - 1
            for i in range(len(lines))
        ]
        lines = [
            "..." if within else line
            for i, (line, within) in enumerate(zip(lines, inner))
            if not (within and inner[i - 1])
        ]
    else:
        lines = [line for line in lines if not line.startswith("[Gloo]")]
    text = "\n".join(line.rstrip() for line in lines).strip("\n")
    return text.replace(str(folder), ".")


def text_of(cell: nbformat.NotebookNode, folder: Path) -> str:
    """What a cell that was run in `folder` printed and returned."""
    text = ""
    for output in cell.outputs:
        if output.output_type == "execute_result":
            text += output.data["text/plain"] + "\n"
        elif output.get("name") == "stdout":
            text += output.text
    return shorten(text, folder)


def collect(executed: nbformat.NotebookNode, folder: Path) -> dict[str, dict]:
    """What each code cell showed, by its id; plots go to the files their cells name."""
    found = {}
    for cell in executed.cells:
        if cell.cell_type != "code":
            continue
        found[cell.id] = {"code": cell.source, "text": text_of(cell, folder)}
        for image in (
            o.data["image/png"]
            for o in cell.outputs
            if "image/png" in o.get("data", ())
        ):
            (ROOT / "images" / cell.metadata.image).write_bytes(base64.b64decode(image))
    return found


def with_outputs(notebook: nbformat.NotebookNode) -> nbformat.NotebookNode:
    """The notebook with what its cells showed, as Markdown below them.

    Raises:
        SystemExit: a cell has changed since.
    """
    last = json.loads(OUTPUTS.read_text())
    shown, cells = last["cells"], []
    caption = f"*Output on two CPU cores, {last['date']}:*"
    for cell in notebook.cells:
        cells.append(cell)
        if cell.cell_type != "code":
            continue
        if shown.get(cell.id, {}).get("code") != cell.source:
            raise SystemExit(
                f"README.ipynb: the code of cell {cell.id!r} isn't that of the last run. "
                "`python ci/render_readme.py --run` runs it, in 4 minutes."
            )
        below = []
        if text := shown[cell.id]["text"]:
            below.append(f"{caption}\n\n```text\n{text}\n```")
        if image := cell.metadata.get("image"):
            below.append(f"![{cell.metadata.alt}](images/{image})")
        if below:
            new = nbformat.v4.new_markdown_cell("\n\n".join(below))
            new.id = f"{cell.id}-shown"
            cells.append(new)
    return nbformat.from_dict(notebook | {"cells": cells})


def to_markdown(notebook: nbformat.NotebookNode) -> str:
    """The notebook's prose and code as Markdown."""
    for index, cell in enumerate(notebook.cells):
        if cell.get("outputs") or cell.get("execution_count"):
            raise SystemExit(f"README.ipynb: cell {index} has outputs; clear them.")
    markdown, _ = MarkdownExporter().from_notebook_node(notebook)
    return markdown.strip() + "\n"


def render(notebook_path: Path) -> str:
    """The notebook in this file as Markdown, with what its cells showed."""
    return to_markdown(with_outputs(nbformat.read(notebook_path, as_version=4)))


def count_package(text: str) -> str:
    """`text` with the size of the package as it is, such as "2,600 lines in 12 modules"."""
    modules = [*(ROOT / "trainkit").glob("*.py")]
    lines = sum(len(path.read_text().splitlines()) for path in modules)
    size = f"{round(lines, -2):,} lines in {len(modules)} modules"
    return re.sub(r"[\d,]+ lines in \d+ modules", size, text)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--run", action="store_true")
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    notebook, readme = ROOT / "README.ipynb", ROOT / "README.md"
    if options.run:
        folder = ROOT / "build/page"
        executed = run(nbformat.read(notebook, as_version=4), folder)
        last = {
            "date": datetime.date.today().isoformat(),
            "cells": collect(executed, folder),
        }
        OUTPUTS.write_text(json.dumps(last, indent=1) + "\n")
    if not options.check:
        notebook.write_text(count_package(notebook.read_text()))
    rendered = count_package(render(notebook))
    if not options.check:
        readme.write_text(rendered)
        return 0
    found = readme.read_text() if readme.exists() else ""
    difference = difflib.unified_diff(
        found.splitlines(keepends=True),
        rendered.splitlines(keepends=True),
        "README.md",
        "README.md as README.ipynb renders it",
    )
    sys.stdout.writelines(difference)
    return int(found != rendered)


if __name__ == "__main__":
    sys.exit(main())
