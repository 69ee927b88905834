"""The source of the notebook's functions, by which an edit names another run."""

import ast
import dataclasses
import hashlib
import inspect
import json
import linecache
import sys
from collections.abc import Callable
from pathlib import Path

from trainkit import token_files
from trainkit.config import TrainingConfig


def source_of(*functions: Callable) -> dict[str, str]:
    """The source of functions, and of what they use of the same notebook or script, by name.

    Comments, docstrings, and format don't count. CONSTANTS do, and classes with methods.
    """
    found = {}
    remaining = list(functions)
    while remaining:
        each = inspect.unwrap(remaining.pop())
        # Python keeps the source of a cell, and a class knows it by its methods.
        methods = (inspect.unwrap(f) for f in (each, *vars(each).values()))
        files = [f.__code__.co_filename for f in methods if inspect.isfunction(f)]
        tree = ast.parse("".join(linecache.getlines(files[0] if files else "")))
        for node in (n for n in tree.body if getattr(n, "name", "") == each.__name__):
            for part in ast.walk(node):
                if isinstance(part, ast.FunctionDef | ast.ClassDef):
                    if ast.get_docstring(part):
                        part.body = part.body[1:]
            found[each.__name__] = ast.unparse(node)
            names = {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}
            namespace = vars(sys.modules[each.__module__])
            for name in names & namespace.keys() - found.keys():
                value = inspect.unwrap(namespace[name])
                if inspect.isfunction(value) or inspect.isclass(value):
                    if value.__module__ == each.__module__:
                        remaining.append(value)
                elif name.isupper() and " at 0x" not in repr(value):  # an address
                    found[name] = repr(value)
    return found


def named_run(config: TrainingConfig, path: str, *code: Callable) -> TrainingConfig:
    """`config` itself if it has a `run_name`, or else with one of `path` and a fingerprint."""
    parts = [config.recipe, token_files.digest(config), source_of(*code)]
    fingerprint = hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()
    name = config.run_name or f"{Path(path).stem}-{fingerprint[:6]}"
    return dataclasses.replace(config, run_name=name)
