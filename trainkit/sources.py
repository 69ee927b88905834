"""The source of the notebook's functions, so that an edit is noticed, and a comment isn't."""

import ast
import inspect
import linecache
import sys
from collections.abc import Callable


def source_of(*functions: Callable) -> dict[str, str]:
    """The source of functions, and of what they use of the same notebook or script, by name.

    Comments, docstrings, and format don't count. Constants do, if their names are capitals.
    """
    found = {}
    remaining = list(functions)
    while remaining:
        each = inspect.unwrap(remaining.pop())
        # Python keeps the source of a cell, and a class knows it by its methods.
        methods = (f for f in (each, *vars(each).values()) if inspect.isfunction(f))
        file = next(methods).__code__.co_filename
        tree = ast.parse("".join(linecache.getlines(file)))
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
