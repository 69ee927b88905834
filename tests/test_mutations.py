"""A test that can't fail proves nothing: break each promise, and see its test fail."""

import re
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from conftest import WITH_PYTORCH
from mutations import MUTATIONS

ROOT = Path(__file__).resolve().parent.parent
TESTS = [mutation.test for mutation in MUTATIONS]


def broken(text: str, mutation) -> str:
    assert text.count(mutation.line) == 1, f"{mutation.file}: {mutation.line}"
    return text.replace(mutation.line, mutation.broken)


def break_line(root: Path, mutation) -> None:
    """Break a line of a file, or of one of the notebook's code cells."""
    path = root / mutation.file
    if path.suffix != ".ipynb":
        path.write_text(broken(path.read_text(), mutation))
        return
    notebook = nbformat.read(path, as_version=4)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    (cell,) = (cell for cell in code if mutation.line in cell.source)
    cell.source = broken(cell.source, mutation)
    nbformat.write(notebook, path)


@pytest.fixture
def copy(tmp_path):
    """A copy of the repository, without what git ignores."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    )
    for name in filter(lambda name: (ROOT / name).is_file(), listed.stdout.split("\n")):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes((ROOT / name).read_bytes())
    return tmp_path


def test_readme_lists_the_promises():
    rows = re.findall(
        r"\| `(test_\w+\.py::\w+)` \|", (ROOT / "tests/README.md").read_text()
    )
    assert sorted(rows) == sorted(TESTS) and len(set(rows)) == len(rows)


@pytest.mark.parametrize("mutation", MUTATIONS, ids=TESTS)
def test_line_is_there(copy, mutation):
    break_line(copy, mutation)


@pytest.mark.extra
@pytest.mark.parametrize("mutation", MUTATIONS, ids=TESTS)
def test_break_is_caught(copy, mutation):
    break_line(copy, mutation)
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-x", "-q", f"tests/{mutation.test}"],
        cwd=copy,
        env=WITH_PYTORCH,
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert result.returncode == 1, result.stdout[-2000:]  # tests failed, no other error
    name = mutation.test.partition("::")[2]
    assert re.search(rf"^(FAILED|ERROR) \S*{name}", result.stdout, re.M)
