"""Tokens and tokenizers to try things with, a few steps of training, and other processes."""

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace

import jax.extend.core
import numpy as np
import pyarrow as pa
import tokenizers
from conftest import ROOT
from flax import nnx

END = "<|endoftext|>"


def python(script: str | Path, *arguments, cwd=ROOT, **variables: str | None) -> str:
    """What a new Python prints that runs a script, which is its text or its path.

    None takes a variable away. Raises an AssertionError with all output if the script fails.
    """
    program = [script] if isinstance(script, Path) else ["-c", script]
    command = [sys.executable, *map(str, [*program, *arguments])]
    environment = {k: v for k, v in (os.environ | variables).items() if v is not None}
    options = {"env": environment, "cwd": cwd, "errors": "replace", "timeout": 2400}
    done = subprocess.run(command, capture_output=True, **options)
    assert done.returncode == 0, (done.stdout + done.stderr)[-5000:]
    return done.stdout


def random_tokens(config, shape, seed=0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, config.vocab_size, shape)


def equations(jaxpr, name: str) -> list[dict]:
    """The parameters of the equations of that name, however deep they are."""
    found = []
    for equation in jaxpr.eqns:
        found += [equation.params] if equation.primitive.name == name else []
        for inner in jax.extend.core.jaxprs_in_params(equation.params):
            found += equations(inner, name)
    return found


def loss_of(tutorial, model, windows) -> float:
    """The loss of a model."""
    return float(tutorial.loss_fn(nnx.state(model, nnx.Param), windows, model.config))


def imports_of(tree: ast.AST) -> set[str]:
    """What a program imports, as dotted names."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, "a relative import"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def windows_for(config, steps, seed=1) -> np.ndarray:
    """uint16 [steps, B, T + 1]; each token tends to follow its predecessor."""
    rng = np.random.default_rng(seed)
    shape = (steps, config.batch_size, config.block_size + 1)
    walk = np.cumsum(rng.choice([1, 2, 3], size=shape, p=[0.8, 0.1, 0.1]), axis=-1)
    return (walk % config.vocab_size).astype(np.uint16)


def shuffled_in_plain_integers(index: int, size: int, key: int) -> int:
    """The Feistel network of `token_files.shuffle_index`, with Python's integers."""

    def mix(x):
        x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        x = (x ^ x >> 27) * 0x94D049BB133111EB % 2**64
        return x ^ x >> 31

    bits = max(1, -(-(size - 1).bit_length() // 2))
    key, lower = mix(key + 1), 2**bits - 1
    while True:
        left, right = index >> bits, index & lower
        for i in range(4):
            left, right = right, left ^ mix((right + key + (i << 40)) % 2**64) & lower
        index = left << bits | right
        if index < size:
            return index


def run(tutorial, config, batches):
    """The state after the steps on `batches`, and their losses."""
    state, losses = tutorial.create_state(config), []
    for windows in batches:
        state, metrics = tutorial.train_step(state, windows, config)
        losses.append(float(metrics["loss"]))
    return state, losses


def byte_pairs(path: Path, texts: list[str], size: int = 300) -> tokenizers.Tokenizer:
    """A tokenizer of byte pairs that is trained here; its first token ends a text."""
    found, options = tokenizers.ByteLevelBPETokenizer(), {"special_tokens": [END]}
    found.train_from_iterator(texts * 20, size, show_progress=False, **options)
    path.parent.mkdir(parents=True, exist_ok=True)
    found.save(str(path))
    return tokenizers.Tokenizer.from_file(str(path))


class Blocks:
    """As much of a `ray.data.Dataset` as a cluster isn't needed for."""

    def __init__(self, blocks: Iterable[dict], context: SimpleNamespace | None = None):
        self.blocks = blocks
        self.context = context or SimpleNamespace(execution_options=SimpleNamespace())

    def map_batches(self, function, batch_size, num_cpus=1):
        made = []
        for rows in self.blocks:
            found = function(rows)
            for x in [found] if isinstance(found, dict | pa.Table) else found:
                if isinstance(x, pa.Table):
                    x = {k: np.array(values) for k, values in x.to_pydict().items()}
                made.append(x)
        return Blocks(made, self.context)

    def limit(self, rows: int):
        made = []
        for block in self.blocks:
            made.append({name: column[:rows] for name, column in block.items()})
            rows -= len(made[-1]["split"])
        return Blocks(made, self.context)

    def iter_batches(self, batch_size, prefetch_batches=1) -> Iterator[dict]:
        assert self.context.execution_options.preserve_order
        for block in self.blocks:
            rows = len(next(iter(block.values())))
            for i in range(0, rows, size := batch_size or max(rows, 1)):
                yield {name: column[i : i + size] for name, column in block.items()}


def without_a_cluster(monkeypatch) -> None:
    """Let datasets be read in this process."""

    def dataset(parts: list[np.ndarray], column="data") -> Blocks:
        return Blocks([{column: part} for part in parts])

    def items(rows, override_num_blocks: int, column="item") -> Blocks:
        return dataset(np.array_split(rows, override_num_blocks), column)

    def count(n: int, override_num_blocks: int) -> Blocks:
        return items(range(n), override_num_blocks, "id")

    for name in ("put", "get"):
        monkeypatch.setattr(f"ray.{name}", lambda value: value)
    for name, function in (("range", count), ("from_items", items)):
        monkeypatch.setattr(f"ray.data.{name}", function)
    monkeypatch.setattr("ray.data.from_numpy", dataset)


def run_from_guide(words: str, names: dict) -> dict:
    """`names`, and what the guide's block of Python with these words defines."""
    guide = (ROOT / "docs/guide.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", guide, re.DOTALL)
    (block,) = [block for block in blocks if words in block]
    exec(block, names)
    return names


def add_from_guide(tutorial, name: str) -> None:
    """Define in the notebook what the guide's block with the function `name` defines."""
    run_from_guide(f"def {name}(", vars(tutorial))
