"""Load the notebook's own definitions as a module, so that nothing is written twice.

Ray pickles functions of `__main__`, which is where a notebook's are, by value; the module
is registered for the same treatment. Without Ray, what needs it is left out, and the model
and its train step are there all the same.
"""

import ast
import contextlib
import importlib
import importlib.util
import json
import linecache
import sys
import types
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOK = ROOT / "README.ipynb"
RAY = importlib.util.find_spec("ray")
HAS_RAY = bool(RAY and RAY.origin)  # and isn't a folder that happens to have its name


def is_definition(node: ast.stmt) -> bool:
    """Imports, functions, classes, and constants: all but what a cell runs or shows."""
    if isinstance(node, ast.Assign):
        return all(isinstance(t, ast.Name) and t.id[0].isupper() for t in node.targets)
    return isinstance(
        node, ast.Import | ast.ImportFrom | ast.FunctionDef | ast.ClassDef
    )


def code_cells(path: Path = NOTEBOOK) -> list:
    """The notebook's code cells, in order, as nbformat reads them."""
    import nbformat

    return [c for c in nbformat.read(path, as_version=4).cells if c.cell_type == "code"]


def load_notebook(path: Path = NOTEBOOK) -> types.ModuleType:
    """The notebook's definitions as the module `tutorial`."""
    module = types.ModuleType("tutorial")
    sys.modules["tutorial"] = module
    cells = json.loads(path.read_text())["cells"]
    sources = ["".join(c["source"]) for c in cells if c["cell_type"] == "code"]
    for index, source in enumerate(sources, 1):
        tree = ast.parse(source)
        tree.body = [node for node in tree.body if is_definition(node)]
        name = f"{path} code cell {index}"
        lines = source.splitlines(keepends=True)
        linecache.cache[name] = len(source), None, lines, name  # as Jupyter does
        define(module, tree, name)
    if HAS_RAY:
        import ray

        ray.cloudpickle.register_pickle_by_value(module)
    return module


def abstract_state(tutorial: types.ModuleType, config, mesh):
    """The shapes and shardings of the notebook's state on `mesh`."""
    from trainkit import states  # which imports JAX

    rules = tutorial.SHARDING_RULES
    return states.abstract_state(tutorial.create_state, config, mesh, rules)


def initial_state(tutorial: types.ModuleType, config, mesh):
    """The notebook's state before the first step, on the devices of `mesh`."""
    from trainkit import states

    abstract = abstract_state(tutorial, config, mesh)
    return states.initial_state(tutorial.create_state, config, abstract)


def load_tools(name: str) -> types.ModuleType:
    """The module of trainkit of that name; without Ray, what of it doesn't need Ray."""
    if HAS_RAY:
        return importlib.import_module(f"trainkit.{name}")
    module, path = types.ModuleType(f"trainkit.{name}"), ROOT / f"trainkit/{name}.py"
    define(module, ast.parse(path.read_text()), str(path))
    return module


def define(module: types.ModuleType, tree: ast.Module, name: str) -> None:
    """Run the statements of `tree` in `module`; without Ray, all but those that need it."""
    if HAS_RAY:
        exec(compile(tree, name, "exec"), module.__dict__)
        return
    for node in tree.body:
        for part in one_by_one(node):
            with contextlib.suppress(ImportError, NameError, AttributeError):
                exec(compile(ast.Module([part], []), name, "exec"), module.__dict__)


def one_by_one(node: ast.stmt) -> list[ast.stmt]:
    """A statement; one that imports several names as one for each."""
    if not isinstance(node, ast.Import | ast.ImportFrom):
        return [node]
    fields = dict(ast.iter_fields(node))
    parts = [type(node)(**fields | {"names": [name]}) for name in node.names]
    return [ast.copy_location(part, node) for part in parts]
