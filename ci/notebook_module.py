"""Load the notebook's own definitions as a module, so that nothing is written twice.

Ray pickles functions of `__main__`, which is where a notebook's are, by value; the module
is registered for the same treatment.
"""

import ast
import linecache
import os
import sys
import types
from pathlib import Path

import nbformat
import ray

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOK = ROOT / os.environ.get("NOTEBOOK", "README.ipynb")
GIVEN = {"storage": Path("storage").resolve(), "variables": {}}  # which cells choose


def is_definition(node: ast.stmt) -> bool:
    """Imports, functions, classes, constants: all but what a cell runs or shows."""
    if isinstance(node, ast.Assign):
        if ast.unparse(node.value).startswith("jax.jit("):
            return True
        return all(isinstance(t, ast.Name) and t.id.isupper() for t in node.targets)
    kinds = ast.Import | ast.ImportFrom | ast.FunctionDef | ast.ClassDef
    return isinstance(node, kinds)


def code_cells(path: Path = NOTEBOOK) -> list:
    """The notebook's code cells, in order, as nbformat reads them."""
    return [c for c in nbformat.read(path, as_version=4).cells if c.cell_type == "code"]


def load_notebook(path: Path = NOTEBOOK, model: Path | None = None) -> types.ModuleType:
    """The notebook's definitions as the module `tutorial`.

    Those of the file `model`, such as examples/llama.py, take the places of GPT-2's.
    """
    module = types.ModuleType("tutorial")
    sys.modules["tutorial"] = module
    vars(module).update(GIVEN)
    cells = [cell for cell in code_cells(path) if cell.source[0] != "!"]  # a command
    for index, cell in enumerate(cells, 1):
        tree = ast.parse(cell.source)
        tree.body = [node for node in tree.body if is_definition(node)]
        name = f"{path} code cell {index}"
        lines = cell.source.splitlines(keepends=True)
        linecache.cache[name] = len(cell.source), None, lines, name  # as Jupyter does
        exec(compile(tree, name, "exec"), module.__dict__)
    if model:
        exec(compile(model.read_text(), model, "exec"), module.__dict__)
    ray.cloudpickle.register_pickle_by_value(module)
    return module
