"""Load the notebook's own definitions as a module, so that nothing is written twice.

Ray pickles functions of `__main__`, which is where a notebook's are, by value; the module
is registered for the same treatment. Where Ray is missing, its names stand for nothing, and
the model and its train step are there all the same.
"""

import ast
import importlib.util
import json
import linecache
import sys
import types
from importlib.machinery import ModuleSpec
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOK = ROOT / "README.ipynb"


def is_installed(name: str) -> bool:
    """Whether there is such a package, and not a folder that happens to have its name."""
    spec = importlib.util.find_spec(name)
    return bool(spec and spec.origin)


HAS_RAY = is_installed("ray")
# What the model and its train step don't need: Ray, what it works with, and others.
MISSING = {"datasets", "pandas", "pyarrow", "ray"}
OTHERS = ("filelock", "fsspec", "tiktoken", "tokenizers", "tqdm")
MISSING = set() if HAS_RAY else MISSING | {n for n in OTHERS if not is_installed(n)}


class Name(type):
    """A name of a missing package: a class to inherit from, with any name in it."""

    def __getattr__(cls, name: str) -> "Name":
        if name.startswith("__"):
            raise AttributeError(name)
        return Name(name, (), {})


class MissingModule(types.ModuleType):
    """A module of a missing package."""

    __getattr__ = Name.__getattr__


class Finder:
    """Finds the modules of missing packages."""

    def find_spec(self, name: str, path=None, target=None) -> ModuleSpec | None:
        missing = name.partition(".")[0] in MISSING
        return ModuleSpec(name, self, is_package=True) if missing else None

    def create_module(self, spec: ModuleSpec) -> types.ModuleType:
        return MissingModule(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        """There is nothing in it."""


if MISSING:
    sys.meta_path.insert(0, Finder())


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
        exec(compile(tree, name, "exec"), module.__dict__)
    if HAS_RAY:
        import ray

        ray.cloudpickle.register_pickle_by_value(module)
    return module


def initial_state(tutorial: types.ModuleType, config, mesh):
    """The notebook's state before the first step, on the devices of `mesh`."""
    from trainkit import sharding  # which imports JAX

    abstract = sharding.abstract_state(tutorial.create_state, config, mesh)
    return sharding.initial_state(tutorial.create_state, config, abstract)
