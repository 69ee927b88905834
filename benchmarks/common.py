"""What the benchmarks share. Import it before `trainkit`, which it finds from anywhere."""

import collections
import datetime
import importlib.metadata
import itertools
import multiprocessing
import os
import platform
import re
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "ci")]  # of trainkit, notebook_module

from notebook_module import load_notebook as load_notebook

COLLECTIVES = "all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute"


def interleave(function: Callable, rows: list[tuple], rounds: int) -> list[list]:
    """The results of `function(*row)` for each row, measured round after round.

    Each call has a process of its own. Whatever else a shared machine does meets all rows
    alike.
    """
    results = [[] for _ in rows]
    spawn = multiprocessing.get_context("spawn")
    for _, (row, kept) in itertools.product(range(rounds), zip(rows, results)):
        with ProcessPoolExecutor(1, mp_context=spawn) as pool:
            kept.append(pool.submit(function, *row).result())
        print(*row, kept[-1], file=sys.stderr)
    return results


def collectives(text: str) -> dict[str, dict[str, int]]:
    """How often a program, as text, has each kind of collective, by the type of its arrays."""
    found = {"in_loops": collections.Counter(), "outside": collections.Counter()}
    place = None
    for line in text.splitlines():
        if line.endswith("{"):  # of a loop's body, or of the program itself
            place = "outside" if line.startswith("ENTRY") else "in_loops"
        if match := re.search(rf"= \(?(\w+)\[.* ({COLLECTIVES})(-start)?\(", line):
            found[place][f"{match[2]} {match[1]}"] += 1
    return found


def print_table(columns: list[str], rows: list[list], packages: list[str]) -> None:
    """A Markdown table, after the machine and the versions that it comes from."""
    versions = (f"{name} {importlib.metadata.version(name)}" for name in packages)
    machine = f"{os.cpu_count()}-core {platform.machine()}, Python {platform.python_version()}"
    print(f"\n{machine}, {', '.join(versions)}, {datetime.date.today()}:\n")
    for row in [columns, ["---"] * len(columns), *rows]:
        print(f"| {' | '.join(map(str, row))} |")
