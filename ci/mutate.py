"""Break each line in small ways, and count which breaks the fast tests notice.

    python ci/mutate.py trainkit/layers.py

tries every break of one module; README.ipynb means the definitions in its cells, and without a
name all are tried. The breaks are those of Cosmic Ray: `ci/mutation-requirements.txt`. Its own
runner starts Python for each of them, which takes ten times as long as the tests: here one
process imports JAX, Ray, and PyTorch, and forks for each break. It works in a copy of the
repository, so processes that a test starts see the break as well.

A first run of the tests, unbroken, records the functions that each test calls and the time that
it takes. A break then meets the tests that call its function: those of the module's own file
first, and the quicker ones before the others. Each table counts what the tests noticed: a test
that fails, or that takes much longer than it should.
"""

import argparse
import ast
import collections
import contextlib
import datetime
import difflib
import hashlib
import importlib
import itertools
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
import types
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

import nbformat
import parso
import pytest
from cosmic_ray.mutating import mutate_code
from cosmic_ray.operators.provider import OperatorProvider

ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / "build" / "mutation"
COPY = BUILD / "copy"
NOTEBOOK = "README.ipynb"
IMPORTED = ("conftest", "jax.experimental.pallas.ops.tpu.splash_attention")
IMPORTED += (
    "optax",
    "orbax.checkpoint",
    "ray.data",
    "ray.train.v2.jax",
    "tensorboardX",
)
IMPORTED += ("torch", "transformers.models.gpt2.modeling_gpt2", "datasets", "pandas")
# One replacement for each operator; Cosmic Ray has eleven for a plus.
PAIRS = """Add_Sub Sub_Add Mul_Div Div_Mul FloorDiv_Mul Mod_FloorDiv Pow_Mul RShift_LShift
    LShift_RShift BitOr_BitAnd BitAnd_BitOr BitXor_BitAnd Eq_NotEq NotEq_Eq Lt_LtE LtE_Lt
    Gt_GtE GtE_Gt Is_IsNot IsNot_Is USub_UAdd Delete_Not Delete_Invert""".split()
OTHERS = """AddNot ReplaceTrueWithFalse ReplaceFalseWithTrue ReplaceAndWithOr
    ReplaceOrWithAnd ReplaceBreakWithContinue ReplaceContinueWithBreak ExceptionReplacer
    NumberReplacer RemoveDecorator ZeroIterationForLoop""".split()
OWN = {  # test files of a module beside the one of its name
    "README": ["loop", "training", "model", "prepare"],
    "layers": ["layers", "loss", "model"],
    "gradients": ["gradients", "training", "devices"],
    "states": ["model", "huggingface"],
    "checkpoints": ["lost_runs", "harder_machines"],
}
PASSED = (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED)
OTHER_TESTS_S = 20.0  # of tests in other files than the module's own, for each break


class Break(NamedTuple):
    """A file with one line changed."""

    path: str
    cell: int | None  # of the notebook, from 1
    line: int
    text: str  # the file's or the cell's
    diff: str


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("paths", nargs="*", help="trainkit/layers.py or README.ipynb")
    parser.add_argument("--sample", type=int, help="try so many breaks of each file")
    parser.add_argument("--seed", type=int, default=0, help="of their order")
    parser.add_argument(
        "--tests", nargs="+", help="test files; all, unless they are given"
    )
    parser.add_argument("--minutes", type=float, help="stop then, and go on next time")
    options = parser.parse_args()
    modules = sorted(str(p.relative_to(ROOT)) for p in ROOT.glob("trainkit/*.py"))
    end = time.monotonic() + 60 * (options.minutes or 1e6)
    make_copy()
    import_everything()
    calls = record_calls(options.tests)
    check_that_breaks_are_run(calls)
    for path in options.paths or [*modules, NOTEBOOK]:
        breaks = list(breaks_of(path))
        random.Random(options.seed).shuffle(breaks)
        tried = breaks[: options.sample]
        report(path, len(breaks), try_breaks(path, tried, calls, end))


def make_copy() -> None:
    """The repository as it is, without what git ignores, in build/."""
    shutil.rmtree(COPY, ignore_errors=True)
    options = ["--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(
        ["git", "ls-files", *options], cwd=ROOT, check=True, capture_output=True
    )
    for name in listed.stdout.decode().splitlines():
        if (ROOT / name).is_file():
            (COPY / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, COPY / name)  # its time, too
    os.chdir(COPY)


def import_everything() -> None:
    """What takes long to import, and is broken nowhere: nothing of the repository."""
    folders = [str(COPY), str(COPY / "ci"), str(COPY / "tests")]
    sys.path[:] = folders + [p for p in sys.path if p != str(ROOT / "ci")]
    os.environ["JAX_COMPILATION_CACHE_DIR"] = str(ROOT / "build" / "jax-cache")
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # none is needed
    before = dict(os.environ)
    for name in IMPORTED:  # the first one sets the environment, for the others
        importlib.import_module(name)
    os.environ.clear()
    os.environ.update(before)
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", "")).startswith(str(COPY)):
            KEPT[name] = sys.modules.pop(name)  # each break imports it anew


KEPT = {}  # the repository's modules, unbroken


def run_tests(chosen: list[str], output: Path, seconds: float, *plugins) -> int | None:
    """The exit code of pytest in a process of its own; None if that took too long."""
    pid = os.fork()
    if pid == 0:
        os.setsid()
        with output.open("w") as file:
            os.dup2(file.fileno(), 1), os.dup2(file.fileno(), 2)
        os.kill = partial(kill_own, os.kill)
        options = ["-q", "-p", "no:cacheprovider", "-m", "fast", "-o", "addopts="]
        code = 1
        with contextlib.suppress(BaseException):
            code = pytest.main([*options, *chosen], plugins=list(plugins))
        sys.stdout.flush()
        os._exit(int(code))
    try:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                return os.waitstatus_to_exitcode(status)
            time.sleep(0.02)
        return None
    finally:  # with all that the tests have started
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, 0)


def kill_own(kill: Callable, process: int, number: int) -> None:
    """`os.kill`, but a break that has another number doesn't reach other programs."""
    if number and (process <= 0 or os.getsid(process) != os.getsid(0)):
        raise PermissionError(f"process {process} isn't one of these tests'")
    kill(process, number)


class Recorder:
    """A plugin of pytest: the seconds that each test takes, and the functions it calls."""

    def __init__(self, path: Path):
        self.path, self.found, self.failed = path, {}, set()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item):
        import jax

        jax.clear_caches()  # or a function that another test has compiled isn't called
        codes, start = {}, time.monotonic()
        sys.settrace(lambda frame, *_: codes.update({id(frame.f_code): frame.f_code}))
        try:
            return (yield)
        finally:
            sys.settrace(None)
            ours = [c for c in codes.values() if c.co_filename.startswith(str(COPY))]
            called = set(map(name_of_function, ours))
            self.found[item.nodeid] = [time.monotonic() - start, sorted(called)]

    def pytest_runtest_logreport(self, report):
        if report.failed:
            self.failed.add(report.nodeid)

    def pytest_sessionfinish(self):
        passed = {k: v for k, v in self.found.items() if k not in self.failed}
        self.path.write_text(json.dumps(passed))


def name_of_function(code: types.CodeType) -> str:
    """The function or method that this is or belongs to, as file:name."""
    file = code.co_filename.removeprefix(f"{COPY}/").partition(" ")[0]
    return f"{file}:{code.co_qualname.partition('.<locals>')[0]}"


def record_calls(files: list[str] | None) -> dict[str, tuple[float, set[str]]]:
    """For each test its seconds, and the functions that it calls, as file:name.

    What the tests of a file call is recorded anew when that file changes.
    """
    calls = {}
    (BUILD / "calls").mkdir(exist_ok=True)
    chosen = map(COPY.joinpath, files) if files else COPY.glob("tests/test_*.py")
    for file in sorted(chosen):
        if not re.search(r"trainkit\.|tutorial\.", file.read_text()):
            continue
        path = BUILD / "calls" / f"{file.stem}-{hash_of(file)}.json"
        if not path.exists():
            output = BUILD / "calls" / f"{file.stem}.txt"
            code = run_tests([f"tests/{file.name}"], output, 600, Recorder(path))
            if code not in PASSED:
                print(f"Tests fail without any break, and are left out: see {output}")
        if path.exists():
            for test, (seconds, called) in json.loads(path.read_text()).items():
                calls[test] = seconds, set(called)
    return calls


def hash_of(path: Path) -> str:
    return hashlib.blake2b(path.read_bytes(), digest_size=6).hexdigest()


def check_that_breaks_are_run(calls: dict) -> None:
    """A module that can't even be imported has to be noticed."""
    path = COPY / "trainkit" / "__init__.py"
    with changed(path, "raise RuntimeError('broken')\n"):
        if run([next(iter(calls))], calls) != "noticed":
            sys.exit("A break isn't run")


@contextlib.contextmanager
def changed(path: Path, text: str) -> Iterator[None]:
    """`path` with other contents, and as it was afterwards, with its time."""
    before, times = path.read_bytes(), path.stat()
    path.write_text(text)  # the new time makes Python compile it again
    try:
        yield
    finally:
        path.write_bytes(before)
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


def texts_of(path: str) -> Iterator[tuple[int | None, str]]:
    """The text of a module, or of each code cell of the notebook with its number."""
    if path != NOTEBOOK:
        yield None, (COPY / path).read_text()
        return
    cells = nbformat.read(COPY / path, as_version=4).cells
    code = [cell for cell in cells if cell.cell_type == "code"]
    yield from ((i, cell.source) for i, cell in enumerate(code, 1))


def breaks_of(path: str) -> Iterator[Break]:
    """Every break of a file that changes what it does."""
    operators, names = OperatorProvider(), []
    for name in operators:
        if name.endswith(tuple("_" + pair for pair in PAIRS)) or name in OTHERS:
            names.append(name)
    for cell, text in texts_of(path):
        seen = {meaning(text, cell)}
        parts = [node.get_code() for node in parso.parse(text).children]
        for (i, part), name in itertools.product(enumerate(parts), names):
            for broken in broken_parts(part, operators[name]()):
                new_text = "".join([*parts[:i], broken, *parts[i + 1 :]])
                with contextlib.suppress(SyntaxError):
                    if (new := meaning(new_text, cell)) not in seen:
                        seen.add(new)
                        yield Break(path, cell, *difference(text, new_text))


def broken_parts(part: str, operator) -> Iterator[str]:
    """A statement with each of the changes that an operator of Cosmic Ray makes to it."""
    for occurrence in itertools.count():
        try:
            broken = mutate_code(part, operator, occurrence)
        except AttributeError:  # it can't break `except ray.exceptions.RayTaskError`
            continue
        if broken is None:
            return
        yield broken


def meaning(text: str, cell: int | None) -> str:
    """The code less how functions may be called and, in a cell, what isn't a definition.

    Cosmic Ray takes the star before a keyword for a product, and `|` in a type for an or.
    """
    tree = ast.parse(text)
    if cell:
        is_definition = KEPT["notebook_module"].is_definition
        tree.body = [node for node in tree.body if is_definition(node)]
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            node.returns = None
        elif isinstance(node, ast.arg):
            node.annotation = None
        elif isinstance(node, ast.arguments):
            node.args = node.posonlyargs + node.args + node.kwonlyargs
            node.defaults += filter(None, node.kw_defaults)
            node.posonlyargs, node.kwonlyargs, node.kw_defaults = [], [], []
    return ast.unparse(tree)


def difference(text: str, broken: str) -> tuple[int, str, str]:
    """The number of the first line that differs, the new text, and what differs."""
    lines = text.splitlines(), broken.splitlines()
    first = next(i for i, (a, b) in enumerate(zip(*lines), 1) if a != b)
    diff = list(difflib.unified_diff(*lines, n=0, lineterm=""))[3:]
    return first, broken, "\n".join(diff)


def function_around(broken: Break) -> str | None:
    """The function whose body has the broken line, as file:name; None if none has."""
    (text,) = (text for cell, text in texts_of(broken.path) if cell == broken.cell)
    waiting = [("", node) for node in ast.parse(text).body]
    while waiting:
        prefix, node = waiting.pop()
        if isinstance(node, ast.ClassDef):
            waiting += [(f"{node.name}.", part) for part in node.body]
        elif isinstance(node, ast.FunctionDef):
            if node.body[0].lineno <= broken.line <= node.end_lineno:
                return f"{broken.path}:{prefix}{node.name}"
    return None


def tests_for(broken: Break, calls: dict) -> list[list[str]]:
    """The tests of the module's own files, and others that call the broken function.

    Each in the order in which to run them. A test of the own file counts even if only a
    process that it starts calls the function, which isn't recorded.
    """
    function, stem = function_around(broken), Path(broken.path).stem
    own_files = tuple(f"tests/test_{name}.py" for name in OWN.get(stem, [stem]))
    own, others = [], []
    for test in sorted(calls, key=lambda test: calls[test][0]):
        if test.startswith(own_files):
            own.append(test)
        elif function is None or function in calls[test][1]:
            others.append(test)
    total = itertools.accumulate(calls[test][0] for test in others)
    return [own, [test for test, s in zip(others, total) if s < OTHER_TESTS_S]]


class InOrder:
    """A plugin of pytest: the tests that were named, and in that order."""

    def __init__(self, tests: list[str]):
        self.places = {test: i for i, test in enumerate(tests)}

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items):
        items[:] = [item for item in items if item.nodeid in self.places]
        items.sort(key=lambda item: self.places[item.nodeid])


def try_breaks(path: str, breaks: list[Break], calls: dict, end: float) -> dict:
    """What happened to each break: "noticed", "took too long", "not called", "survived".

    What was noticed in an earlier run with the same file isn't tried again.
    """
    record = BUILD / f"{name_of(path)}-{hash_of(COPY / path)}.json"
    known = json.loads(record.read_text()) if record.exists() else {}
    for tests in zip(*(tests_for(broken, calls) for broken in breaks)):
        together = {test: None for some in tests for test in some}
        if together and run(list(together), calls) != "survived":
            sys.exit(f"Tests fail without any break: see {BUILD / 'output.txt'}")
    sys.dont_write_bytecode = True  # or one break's could be taken for the next one's
    os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
    found = {}
    for broken in breaks:
        key = f"{function_around(broken) or broken.path}\n{broken.diff}"
        if known.get(key) not in ("noticed", "took too long"):
            if time.monotonic() > end:
                found[key] = known.get(key, "not tried")
                continue
            known[key] = try_break(broken, calls)
            record.write_text(json.dumps(known))
        found[key] = known[key]
    return found


def try_break(broken: Break, calls: dict) -> str:
    path, text = COPY / broken.path, broken.text
    if broken.cell:
        notebook = nbformat.read(path, as_version=4)
        code = [cell for cell in notebook.cells if cell.cell_type == "code"]
        code[broken.cell - 1].source = text
        text = nbformat.writes(notebook)
    result = "not called"
    with changed(path, text):
        for tests in filter(None, tests_for(broken, calls)):
            result = run(tests, calls)
            if result != "survived":
                break
    return result


def run(tests: list[str], calls: dict) -> str:
    """What these tests make of the code as it is now."""
    seconds = 30 + 5 * sum(calls[test][0] for test in tests)
    files = list(dict.fromkeys(test.partition("::")[0] for test in tests))
    code = run_tests(["-x", *files], BUILD / "output.txt", seconds, InOrder(tests))
    if code is None:
        return "took too long"
    return "survived" if code in PASSED else "noticed"


def name_of(path: str) -> str:
    return path.replace("/", "-")


def report(path: str, n_breaks: int, found: dict[str, str]) -> None:
    """Print a row of the table; leave the survivors in build/mutation."""
    counts = collections.Counter(found.values())
    noticed = counts["noticed"] + counts["took too long"]
    tried = len(found) - counts["not tried"]
    share = f"{noticed / tried:.0%}" if tried else "-"
    today = datetime.date.today()
    print(
        f"| `{path}` | {n_breaks} | {tried} | {noticed} | {share} | {today} |",
        flush=True,
    )
    left = {k: v for k, v in found.items() if v in ("survived", "not called")}
    text = "\n\n".join(f"{result}: {key}" for key, result in left.items())
    (BUILD / f"{name_of(path)}.survivors.txt").write_text(text + "\n")


if __name__ == "__main__":
    main()
