"""Count how long the page takes to read, and what a reader of its code meets.

    python ci/reading_time.py

A minute is 200 words of prose or 25 lines of code; what is folded counts apart. The aims are
20 minutes, GPT-2's launch before three quarters of them, at most 18 calls of the package from
at most eight names imported from it, and at most 30 lines in a cell. No build fails for them.
"""

import ast
import re

import render_readme  # first: it finds the environment that has nbformat

# isort: split
import nbformat

NOTEBOOK = render_readme.ROOT / "README.ipynb"


def lines_of(cell: nbformat.NotebookNode) -> int:
    """The lines of a cell that aren't blank."""
    return sum(bool(line.strip()) for line in cell.source.splitlines())


FOLDED = re.compile(r"</summary>(.*?)</details>", re.DOTALL)


def minutes(cell: nbformat.NotebookNode) -> float:
    """The time that a cell takes to read, without what is folded."""
    if cell.cell_type == "code":
        return lines_of(cell) / 25
    return minutes_of(FOLDED.sub("", cell.source))


def minutes_of(text: str) -> float:
    """The time that Markdown takes to read."""
    text = re.sub(r"!\[[^\]]*\]\([^)]*\)|<[^>]*>", "", text)  # pictures, tags
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text)  # links
    return sum(bool(re.search(r"\w", word)) for word in text.split()) / 200


def package_names(tree: ast.Module) -> dict[str, str]:
    """What the code imports of the package: each name, and what it stands for."""
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module.startswith("trainkit"):
            found |= {a.asname or a.name: f"{node.module}.{a.name}" for a in node.names}
        elif isinstance(node, ast.Import):
            found |= {a.name: a.name for a in node.names if a.name == "trainkit"}
    return found


def calls(tree: ast.Module) -> set[str]:
    """The functions and classes of the package that the code calls or inherits from."""
    names, found = package_names(tree), set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name | ast.Attribute):
            first, _, rest = ast.unparse(node).partition(".")
            whole = f"{names[first]}.{rest}".rstrip(".") if first in names else ""
            if whole.count(".") == 2 or (whole and first == "trainkit" and rest):
                found.add(whole)
    return found


def main() -> None:
    cells = nbformat.read(NOTEBOOK, as_version=4).cells
    code = [cell for cell in cells if cell.cell_type == "code"]
    steps, launches, heading = {}, [], "Introduction"
    for cell in cells:
        if found := re.match(r"## (.*)", cell.source):
            heading = found[1]
        steps[heading] = steps.get(heading, 0) + minutes(cell)
        if cell.cell_type == "code" and ".fit()" in cell.source:
            launches.append(sum(steps.values()))
    for heading, time in steps.items():
        print(f"{time:5.1f} min  {heading}")
    total = sum(steps.values())
    share = launches[1] / total  # the first is step 1's
    folded = minutes_of("".join(FOLDED.findall("".join(cell.source for cell in cells))))
    print(f"{total:5.1f} min to read; GPT-2 is launched after {share:.0%} of them")
    print(f"{folded:5.1f} min more, if all that is folded is opened")
    tree = ast.parse("\n".join(cell.source for cell in code))
    called, names = sorted(calls(tree)), package_names(tree)
    print(f"{len(called)} of the package: {', '.join(called)}")
    print(f"{len(names)} names imported from it: {', '.join(names)}")
    print(
        f"{sum(map(lines_of, code))} lines of code; {max(map(lines_of, code))} at most"
    )


if __name__ == "__main__":
    main()
