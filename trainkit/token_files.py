"""train.bin and val.bin: their folder, their contents, and the order of their windows.

The format is nanoGPT's: a number for each token, documents one after the other, and an
end-of-text token after each. It is a uint16, or a uint32 in a vocabulary of more than 65,536.
A *window* is `block_size + 1` tokens, of which the next window shares the last.
"""

import functools
import hashlib
import io
import os
from pathlib import Path

import numpy as np

from trainkit.config import TrainingConfig

SPLITS = ("train", "val")
_SAMPLE, _SAMPLES = 2**16, 256  # bytes, and how many of them are hashed


def path_of(config: TrainingConfig, split: str) -> Path:
    """train.bin or val.bin."""
    return Path(config.data_dir) / f"{split}.bin"


def open_tokens(config: TrainingConfig, split: str) -> np.ndarray:
    """The tokens of a file, `config.token_dtype` [tokens], memory-mapped.

    Raises:
        FileNotFoundError: it hasn't been made.
        ValueError: it is empty, or ends within a token.
    """
    path, each = path_of(config, split), np.dtype(config.token_dtype).itemsize
    size = path.stat().st_size
    if not size or size % each:
        raise ValueError(f"{path} has {size} bytes; expected {each} for each token")
    return np.memmap(path, dtype=config.token_dtype, mode="r")


def check(config: TrainingConfig, manifest: dict | None = None) -> dict[str, int]:
    """Refuse files that can't be trained on; return how many tokens each has.

    Args:
        manifest: what `corpus.write` noted. Without it, all tokens are read.

    Raises:
        FileNotFoundError, ValueError: with what was found, and what was expected.
    """
    found = {}
    for split in SPLITS:
        tokens = open_tokens(config, split)
        path = path_of(config, split)
        found[split] = len(tokens)
        if manifest and found[split] != manifest["tokens"][split]:
            raise ValueError(
                f"{path} has {found[split]} tokens, and not those of its manifest.json, "
                f"{manifest['tokens'][split]}. Delete the folder to make it anew"
            )
        if not tokens[1 : 2**16 : 2].any():
            raise ValueError(f"{path} isn't {config.token_dtype}: every second is 0")
        if manifest:
            largest = manifest["largest_id"][split]
        else:
            largest = _largest(path, path.stat().st_mtime_ns, config.token_dtype)
        if largest >= config.vocab_size:
            raise ValueError(
                f"{path} has the token {largest}, and vocab_size is {config.vocab_size}"
            )
    windows = {split: count_windows(config, split) for split in SPLITS}
    if not windows["train"] or windows["val"] < config.eval_windows:
        raise ValueError(
            f"{config.data_dir} has {windows} windows, and eval_windows asks for "
            f"{config.eval_windows} of val. Set it or block_size lower, or leave more text "
            "for val"
        )
    return found


@functools.cache  # a notebook that has prepared tokens launches with them
def _largest(path: Path, changed_ns: int, dtype: str) -> int:
    """The largest token in a file, which is read as a whole."""
    return int(np.memmap(path, dtype=dtype, mode="r").max())


def digest(config: TrainingConfig) -> dict[str, str]:
    """What tells the contents of token files from others: their length, and a hash.

    Of a file of more than 16 MiB, 256 samples of 64 KiB are hashed.

    Raises:
        FileNotFoundError: there are none.
    """
    found = {}
    for split in SPLITS:
        tokens = len(open_tokens(config, split))
        hashed = hashlib.sha256()
        with path_of(config, split).open("rb") as file:
            size = file.seek(0, 2)
            for start in range(0, size, max(size // _SAMPLES, _SAMPLE)):
                file.seek(start)
                hashed.update(file.read(_SAMPLE))
        found[split] = f"{tokens:,} tokens, {hashed.hexdigest()[:16]}"
    return found


def count_windows(config: TrainingConfig, split: str) -> int:
    """The number of windows in train.bin or val.bin."""
    return (len(open_tokens(config, split)) - 1) // config.block_size


@functools.lru_cache(2)  # a step may have windows of two epochs
def _order(seed: int, epoch: int, windows: int) -> np.ndarray:
    """A permutation, int64 [windows]; NumPy promises that RandomState's stays as it is."""
    return np.random.RandomState([seed, epoch]).permutation(windows)


def _version(found: os.stat_result) -> tuple[int, int]:
    """What a file has that is written anew: the same on all nodes, as its inode may not be."""
    # Mounts differ in parts of a second.
    return found.st_size, found.st_mtime_ns // 10**9


class Windows:
    """The windows of train.bin or val.bin, by step.

    An object is sent to a task as it is, which opens the file once.
    """

    def __init__(self, config: TrainingConfig, split: str, rows: np.ndarray):
        """Of the batch of each step, these rows."""
        self._config = config
        self._split = split
        self._rows = rows
        self._count = count_windows(config, split)
        self._version = _version(path_of(config, split).stat())

    def numbers(self, step: int) -> np.ndarray:
        """Which windows of the file are the batch of a step, int64 [batch_size].

        They are a function of the seed and the step: an epoch of "train" has each window
        once, in an order of its own. "val" isn't shuffled.
        """
        size, seed = self._config.batch_size, self._config.seed
        places = np.arange(step * size, (step + 1) * size)
        epochs, windows = np.divmod(places, self._count)
        if self._split == "train":
            for epoch in np.unique(epochs):
                here = epochs == epoch
                windows[here] = _order(seed, int(epoch), self._count)[windows[here]]
        return windows

    def read(self, step: int) -> np.ndarray:
        """The rows of the batch of a step, `config.token_dtype` [rows, block_size + 1].

        Raises:
            OSError: the file ends too soon.
            ValueError: it has been written anew since this object was made.
        """
        windows, T = self.numbers(step)[self._rows], self._config.block_size
        tokens = np.empty((len(windows), T + 1), self._config.token_dtype)
        for row, window in zip(tokens, windows.tolist()):
            self._file.seek(window * T * tokens.itemsize)
            if self._file.readinto(row.data) != row.nbytes:
                raise OSError(f"{self._file.name} ended in window {window}")
        return tokens

    @functools.cached_property
    def _file(self) -> io.FileIO:
        path = path_of(self._config, self._split)
        file = path.open("rb", buffering=0)  # no memmap
        if _version(os.fstat(file.fileno())) != self._version:
            raise ValueError(
                f"data_dir: {path} has been written since this run started to read it. Launch "
                "the run again, which compares the tokens"
            )
        return file

    def __getstate__(self) -> dict:
        return {name: x for name, x in vars(self).items() if name != "_file"}
