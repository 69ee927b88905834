"""Tokens and tokenizers to try things with, a few steps of training, and other processes."""

import linecache
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import tokenizers
from conftest import ROOT, walk

from trainkit import token_files

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


def windows_for(config, steps, seed=1) -> np.ndarray:
    """uint16 [steps, B, T + 1]"""
    shape = (steps, config.batch_size, config.block_size + 1)
    return walk(config, shape, np.random.default_rng(seed))


def losses_alone(tutorial, config) -> list[float]:
    """The losses of a run, computed by this process, on the mesh that is set."""
    state, losses = tutorial.create_state(config), []
    batches = token_files.Windows(config, "train", np.arange(config.batch_size))
    for step in range(config.max_steps):
        state, metrics = tutorial.train_step(state, batches.read(step), config)
        losses.append(float(metrics["loss"]))
    return losses


def byte_pairs(path: Path, texts: list[str], size: int = 300) -> tokenizers.Tokenizer:
    """A tokenizer of byte pairs that is trained here; its first token ends a text."""
    found, options = tokenizers.ByteLevelBPETokenizer(), {"special_tokens": [END]}
    found.train_from_iterator(texts * 20, size, show_progress=False, **options)
    path.parent.mkdir(parents=True, exist_ok=True)
    found.save(str(path))
    return tokenizers.Tokenizer.from_file(str(path))


def hub_of(folder: Path, here: Path) -> Callable:
    """A `snapshot_download` that brings those files of a folder which it is asked for."""

    def download(name: str, allow_patterns: list[str]) -> str:
        here.mkdir(exist_ok=True)
        for pattern in allow_patterns:
            for path in folder.glob(pattern):
                shutil.copy(path, here)
        return str(here)

    return download


def block_of_guide(words: str) -> str:
    """The guide's block of Python with these words."""
    guide = (ROOT / "docs/guide.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", guide, re.DOTALL)
    (block,) = [block for block in blocks if words in block]
    return block


def run_from_guide(words: str, names: dict) -> dict:
    """`names`, and what the guide's block of Python with these words defines."""
    block = block_of_guide(words)
    lines = block.splitlines(keepends=True)
    linecache.cache[words] = len(block), None, lines, words  # as Jupyter does
    exec(compile(block, words, "exec"), names)
    return names
