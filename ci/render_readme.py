"""Write README.md from README.ipynb, with what its cells showed in a smoke run.

It also writes examples/survive.py from the cells that have the tag `survive`.

    python ci/render_readme.py           write it, with the outputs of the last run
    python ci/render_readme.py --run     run the notebook first, on two CPU cores, 4 minutes
    python ci/render_readme.py --check   exit 1, with a diff, if it is out of date

The notebook is stored without outputs. Those of the last run are in docs/outputs.json, each
with the code of its cell, and the plots in images/. A cell that has changed since is refused;
after a change of trainkit/, use --run.
"""

import argparse
import base64
import datetime
import difflib
import itertools
import json
import os
import re
import shutil
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbconvert import MarkdownExporter

ROOT = Path(__file__).resolve().parent.parent
OUTPUTS = ROOT / "docs/outputs.json"
RAY = re.compile(
    r"^(\x1b\[\d+m)*\((RayTrainWorker |TrainController |raylet).*?\)(\x1b\[0m)? ?"
)
STEP = re.compile(r"^step \d+ \|")
SURVIVE = '''"""A training run in JAX that survives: launched, saved, and restored with Ray.

    python survive.py

Made from the tutorial's cells by ci/render_readme.py. Set `storage` to a folder that all
machines share, choose `scaling`, and put your state, your step, and your data in place of
`create_line`, `line_step`, and `read_points`. The same name continues a run, a finished one if
you raise `steps`. A changed model needs another name.
"""

import os

os.environ["JAX_PLATFORMS"] = "cpu"  # of this process only
os.environ["RAY_TRAIN_ENABLE_PRINT_PATCH"] = "0"  # show what workers print only once

{}


if __name__ == "__main__":
    ray.init()
    fit(make_line_trainer("my-run", steps=24, log=log))
'''


def run(notebook: nbformat.NotebookNode, folder: Path) -> dict[str, dict]:
    """Run the notebook's smoke form in `folder`, with a copy of what it needs.

    Returns:
        what each code cell showed, by its id; plots go to the files their cells name.
    """
    shutil.rmtree(folder, ignore_errors=True)
    for name in ("trainkit", "configs"):
        shutil.copytree(ROOT / name, folder / name)
    os.environ |= {"RAY_ADDRESS": "local", "GPT2_CONFIG": "configs/smoke.yaml"}
    where = {"metadata": {"path": str(folder)}}
    NotebookClient(notebook, timeout=900, resources=where).execute()
    found = {}
    for cell in (cell for cell in notebook.cells if cell.cell_type == "code"):
        for output in cell.outputs:
            if "image/png" in output.get("data", {}):
                image = ROOT / "images" / cell.metadata.image
                image.write_bytes(base64.b64decode(output.data["image/png"]))
        found[cell.id] = {"code": cell.source, "text": text_of(cell, folder)}
    return found


def text_of(cell: nbformat.NotebookNode, folder: Path) -> str:
    """What an executed cell printed and showed, with `folder` as a dot."""
    text = ""
    for output in cell.outputs:
        if output.output_type == "execute_result":
            text += output.data["text/plain"] + "\n"
        elif output.get("name") == "stdout":
            text += output.text
    return shorten(text).replace(str(folder), ".")


def shorten(text: str) -> str:
    """What a cell printed, without Ray's prefixes; of a log's steps, the first and last."""
    lines = [RAY.sub("", line).rstrip() for line in text.strip("\n").splitlines()]
    lines = [line.partition(" To troubleshoot the problem")[0] for line in lines]
    # A bar may leave an empty line between two steps.
    for i in reversed(range(1, len(lines) - 1)):
        if not lines[i] and STEP.match(lines[i - 1]) and STEP.match(lines[i + 1]):
            del lines[i]
    shown = []
    for is_step, group in itertools.groupby(lines, lambda line: bool(STEP.match(line))):
        group = [*group]
        if is_step and len(group) > 2:
            group[1:-1] = ["..."]
        shown += group
    return "\n".join(shown)


def with_outputs(notebook: nbformat.NotebookNode) -> nbformat.NotebookNode:
    """The notebook with what its cells showed, as Markdown below them.

    Raises:
        SystemExit: a cell has changed since.
    """
    last = json.loads(OUTPUTS.read_text())
    caption = f"*Output on two CPU cores, {last['date']}:*"
    cells = []
    for cell in notebook.cells:
        cells.append(cell)
        if cell.cell_type != "code":
            continue
        shown = last["cells"].get(cell.id, {})
        if shown.get("code") != cell.source:
            raise SystemExit(
                f"README.ipynb: the code of cell {cell.id!r} isn't that of the last run. "
                "`python ci/render_readme.py --run` runs it, in 4 minutes."
            )
        below = []
        if shown["text"]:
            below.append(f"{caption}\n\n```text\n{shown['text']}\n```")
            caption = "*Output:*"
        if image := cell.metadata.get("image"):
            below.append(f"![{cell.metadata.alt}](images/{image})")
        if below:
            cells.append(nbformat.v4.new_markdown_cell("\n\n".join(below)))
            cells[-1].id = f"{cell.id}-shown"
    return nbformat.from_dict(notebook | {"cells": cells})


def survive(notebook: nbformat.NotebookNode) -> str:
    """The program of the cells that have the tag `survive`."""
    cells = [c for c in notebook.cells if "survive" in c.metadata.get("tags", [])]
    code = "\n\n\n".join(cell.source for cell in cells).replace("import os\n", "")
    return SURVIVE.format(code)


def to_markdown(notebook: nbformat.NotebookNode) -> str:
    """The notebook's prose and code as Markdown."""
    for cell in notebook.cells:
        if cell.get("outputs") or cell.get("execution_count"):
            raise SystemExit(f"README.ipynb: cell {cell.id!r} has outputs; clear them.")
    return MarkdownExporter().from_notebook_node(notebook)[0].strip() + "\n"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--run", action="store_true")
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    source = ROOT / "README.ipynb"
    if options.run:
        shown = run(nbformat.read(source, as_version=4), ROOT / "build/page")
        last = {"date": datetime.date.today().isoformat(), "cells": shown}
        OUTPUTS.write_text(json.dumps(last, indent=1) + "\n")
    notebook = nbformat.read(source, as_version=4)
    made = {
        ROOT / "README.md": to_markdown(with_outputs(notebook)),
        ROOT / "examples/survive.py": survive(notebook),
    }
    for path, text in made.items():
        if not options.check:
            path.write_text(text)
        elif text != path.read_text():
            pages = [x.splitlines(keepends=True) for x in (path.read_text(), text)]
            raise SystemExit(
                "".join(difflib.unified_diff(*pages, path.name, "rendered"))
            )
