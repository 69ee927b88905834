"""Write README.md from README.ipynb.

    python ci/render_readme.py           write it
    python ci/render_readme.py --check   exit 1, with a diff, if it is out of date

The notebook must be stored without outputs; --check says so if it is not.
"""

import argparse
import difflib
import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ENVIRONMENT = ROOT / ".venv"  # which ci/test.sh and ci/smoke.sh make

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


def to_markdown(notebook: nbformat.NotebookNode) -> str:
    """The notebook's prose and code as Markdown."""
    for index, cell in enumerate(notebook.cells):
        if cell.get("outputs") or cell.get("execution_count"):
            raise SystemExit(f"README.ipynb: cell {index} has outputs; clear them.")
    markdown, _ = MarkdownExporter().from_notebook_node(notebook)
    return markdown.strip() + "\n"


def render(notebook_path: Path) -> str:
    """The notebook in this file as Markdown."""
    return to_markdown(nbformat.read(notebook_path, as_version=4))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args().check
    readme = ROOT / "README.md"
    rendered = render(ROOT / "README.ipynb")
    if not check:
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
