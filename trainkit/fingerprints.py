"""What tells a file from others, and the code that decides a result from other code.

The cells of the notebook define the model, the loss, the optimizer, the train step, and the
windows. A run that went on with others would be neither the old run nor a new one, and no
number would say so.
"""

import ast
import copy
import difflib
import dis
import functools
import hashlib
import inspect
import linecache
import math
import os
import sys
import types
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

SAMPLE = 2**16  # bytes
CONSTANTS = (bool, int, float, str, tuple)


def of_file(path: str | Path) -> str:
    """What tells a file from others: a hash of its size, and of its contents.

    Of more than 64 MiB, a thousand samples of 64 KiB count.
    """
    size, hashed = os.path.getsize(path), hashlib.blake2b(digest_size=8)
    hashed.update(str(size).encode())
    samples = min(math.ceil(size / SAMPLE), 1_024)
    with open(path, "rb") as file:
        for i in range(samples):
            file.seek(i * max(size - SAMPLE, 0) // max(samples - 1, 1))
            hashed.update(file.read(SAMPLE))
    return hashed.hexdigest()


def collect_code(functions: tuple[Callable, ...]) -> dict[str, str]:
    """The source of `functions` and of all that they use of their own module, by name."""
    module = vars(sys.modules[unwrapped(functions[0]).__module__])
    found, waiting = {}, list(map(unwrapped, functions))
    while waiting:
        value = waiting.pop()
        if value.__name__ in found or not (node := definition(value, module)):
            continue
        found[value.__name__] = node
        for name in global_names(value):
            used = unwrapped(module.get(name))
            if isinstance(used, type | types.FunctionType):
                if used.__module__ == module["__name__"]:
                    waiting.append(used)
            elif name in module and isinstance(used, CONSTANTS):
                found[name] = ast.parse(f"{name} = {used!r}").body[0]
    return {name: normal(found[name]) for name in sorted(found)}


def diff(before: Callable, after: Callable) -> str:
    """What differs between the definitions of two functions, line by line, whole."""
    sides = [inspect.getsource(f).splitlines() for f in (before, after)]
    lines = difflib.unified_diff(*sides, n=len(sides[0]), lineterm="")
    return "\n".join([*lines][3:])  # without the names of files, and of the place


def of_code(function: Callable) -> str:
    """A short text that differs where the code of `function` does, for one Python."""
    text = "".join(collect_code((function,)).values())
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    return f"{zlib.crc32(text.encode())} on Python {version}"


def unwrapped(value):
    """The function under `jax.jit` and `functools.partial`."""
    while isinstance(value, functools.partial):
        value = value.func
    return inspect.unwrap(value) if callable(value) else value


def global_names(value) -> Iterator[str]:
    """The global names that a function, or a class by its bases and methods, refers to."""
    if isinstance(value, type):
        yield from (base.__name__ for base in value.__bases__)
        for part in vars(value).values():
            part = getattr(part, "__func__", getattr(part, "fget", part))
            if isinstance(part, types.FunctionType):
                yield from global_names(part)
        return
    code = getattr(value, "__code__", value)
    for instruction in dis.get_instructions(code):
        if instruction.opname == "LOAD_GLOBAL":
            yield instruction.argval
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from global_names(constant)


def definition(value, module: dict) -> ast.stmt | None:
    """The definition of a function or class in its cell or file, if that is known.

    `inspect.getsource` doesn't find the classes of a notebook.
    """
    own = [value, *vars(value).values()] if isinstance(value, type) else [value]
    every = own + [unwrapped(v) for v in module.values()]
    files = [f.__code__.co_filename for f in every if isinstance(f, types.FunctionType)]
    for file in dict.fromkeys(files):
        for node in parsed("".join(linecache.getlines(file))):
            if getattr(node, "name", None) == value.__name__:
                return node
    return None


@functools.lru_cache(maxsize=256)
def parsed(text: str) -> list[ast.stmt]:
    """The statements of a cell or file; none if it is no plain Python, as with `%time`."""
    try:
        return ast.parse(text).body
    except SyntaxError:
        return []


def normal(node: ast.stmt) -> str:
    """A definition without comments and docstrings, as this Python formats it."""
    node = copy.deepcopy(node)
    for part in ast.walk(node):
        kinds = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
        if isinstance(part, kinds) and ast.get_docstring(part) is not None:
            part.body = part.body[1:] or [ast.Pass()]
    return ast.unparse(node)


def parse_code(text: str) -> dict[str, str]:
    """The definitions in a text that `collect` gave, by name, as this Python formats it."""
    nodes = ast.parse(text).body
    names = [n.targets[0].id if isinstance(n, ast.Assign) else n.name for n in nodes]
    return {name: ast.unparse(node) for name, node in zip(names, nodes)}
