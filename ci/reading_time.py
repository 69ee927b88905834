"""Count how long the page takes to read, step by step, and where GPT-2 is launched.

    python ci/reading_time.py

A minute is 200 words of prose or 25 lines of code. The aims are 20 minutes, and GPT-2's launch
before three quarters of them.
"""

import re
from pathlib import Path

import render_readme  # first: it finds the environment that has nbformat

# isort: split
import nbformat

NOTEBOOK = render_readme.ROOT / "README.ipynb"


def minutes(cell: nbformat.NotebookNode) -> float:
    """The time that a cell takes to read."""
    if cell.cell_type == "code":
        return sum(bool(line.strip()) for line in cell.source.splitlines()) / 25
    return len(re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", cell.source).split()) / 200


def count(path: Path = NOTEBOOK) -> tuple[dict[str, float], float]:
    """The minutes of each step, by its heading, and the share before GPT-2's `.fit()`."""
    steps, launches, heading = {}, [], "Introduction"
    for cell in nbformat.read(path, as_version=4).cells:
        if found := re.match(r"## (.*)", cell.source):
            heading = found[1]
        steps[heading] = steps.get(heading, 0) + minutes(cell)
        if cell.cell_type == "code" and ".fit()" in cell.source:
            launches.append(sum(steps.values()))
    return steps, launches[1] / sum(steps.values())  # the first is step 1's


def main() -> None:
    steps, share = count()
    for heading, time in steps.items():
        print(f"{time:5.1f} min  {heading}")
    total = sum(steps.values())
    print(f"{total:5.1f} min to read; GPT-2 is launched after {share:.0%} of them")


if __name__ == "__main__":
    main()
