"""train.bin and val.bin: their folder, their contents, and the order of their windows.

The format is nanoGPT's: a number for each token, documents one after the other, and an
end-of-text token after each. It is a uint16, or a uint32 in a vocabulary of more than 65,536.
A *window* is `block_size + 1` tokens; consecutive windows share one token, so no token between
two windows is left out.

Ray Data's tasks import this module, so it imports neither JAX nor Flax nor Orbax.
"""

import contextlib
import glob
import hashlib
import json
import math
import os
import re
import shutil
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from trainkit import tokenizers

WINDOWS_IN_RANGE = 2**17  # that Ray Data plans
WINDOWS_AT_ONCE = 512  # that a task reads: 1 MB at GPT-2's block_size
SAMPLE = 2**16  # bytes
DAY = 24 * 3600  # seconds
OTHERS = {  # what other files begin with
    rb"[\t-\x7f]*\Z": "text: set dataset to it, and data_dir to another folder",
    rb"\x93NUMPY": "a file of numpy.save: write the array with tofile",
    rb"\x88\xd8\x34\x01|\xa1\xd9\x34\x01": "llm.c's: leave out its first 1,024 bytes",
    rb"PK|\x1f\x8b": "an archive of zip or gzip",
}


def are_there(config) -> bool:
    """Whether `config.data_dir` has token files; otherwise, they can be made there.

    Raises:
        FileExistsError: the folder holds other files.
        ValueError: the finished folder couldn't take its place.
    """
    folder = Path(config.data_dir)
    files = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
    if "manifest.json" in files or {"train.bin", "val.bin"} <= files:
        return True
    if files:
        raise FileExistsError(
            f"{folder} holds files, but not both train.bin and val.bin. Set data_dir to "
            "another folder, or delete this one."
        )
    if folder.is_mount():
        raise ValueError(f"data_dir: {folder} is a mounted disk; choose a folder in it")
    return False


def read_manifest(folder: Path) -> dict:
    """What `corpus.write` wrote.

    Raises:
        ValueError: it is damaged, or a token file isn't as long as it says.
    """
    path = folder / "manifest.json"
    try:
        manifest = json.loads(path.read_text())
        each = np.dtype(manifest["source"].get("dtype", "uint16")).itemsize
        for split, tokens in manifest["tokens"].items():
            size = (folder / f"{split}.bin").stat().st_size
            if size != each * tokens:
                raise ValueError(f"{split}.bin has {size} bytes, not {each * tokens}")
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise ValueError(
            f"{path} or what it describes is damaged ({error!r}). Delete that folder to "
            "make it anew."
        ) from error
    return manifest


@contextlib.contextmanager
def new_folder(folder: str | Path) -> Iterator[Path]:
    """A folder to write in, which becomes `folder` if all goes well.

    An interrupted run leaves nothing behind that could pass for a finished one. If another
    process has made `folder` meanwhile, with a manifest, its files stay.
    """
    folder = Path(folder).resolve()  # a link stays one
    prefix, host = f"{folder.name}.partial-", socket.gethostname()
    for old in folder.parent.glob(f"{glob.escape(prefix)}*"):
        owner, _, process = old.name.removeprefix(prefix).rpartition("-")
        # It was killed, perhaps with this process's number; of other hosts, only time tells.
        dead = process == str(os.getpid()) or not is_running(process)
        with contextlib.suppress(FileNotFoundError):  # it has just got its name
            written = max(path.stat().st_mtime for path in (old, *old.iterdir()))
            if dead if owner == host else written < time.time() - DAY:
                shutil.rmtree(old)
    partial = folder.with_name(f"{prefix}{host}-{os.getpid()}")
    partial.mkdir(parents=True)
    try:
        yield partial
        try:
            partial.rename(folder)
        except OSError:
            if not (folder / "manifest.json").exists():
                raise
            shutil.rmtree(partial)
            print(f"Another process has made {folder} meanwhile; its files are used.")
    except BaseException:  # a full disk, say: leave it as it was
        shutil.rmtree(partial)
        raise


def path_of(config, split: str) -> Path:
    """train.bin or val.bin."""
    return Path(config.data_dir) / f"{split}.bin"


def open_tokens(config, split: str) -> np.ndarray:
    """The tokens of `train.bin` or `val.bin`, `config.token_dtype` [tokens], memory-mapped.

    Raises:
        FileNotFoundError, ValueError: the file cannot be trained on.
    """
    path = path_of(config, split)
    size, each = path.stat().st_size, np.dtype(config.token_dtype).itemsize
    if size % each or size // each <= config.block_size:
        raise ValueError(
            f"{path} has {size} bytes; expected {each} for each token, and more tokens than "
            f"block_size ({config.block_size})"
        )
    return np.memmap(path, dtype=config.token_dtype, mode="r")


def digest(config) -> dict[str, str]:
    """What tells the token files that are there from others."""
    each = np.dtype(config.token_dtype).itemsize
    paths = {split: path_of(config, split) for split in ("train", "val")}
    return {
        split: f"{path.stat().st_size // each:,} tokens, {file_digest(path)}"
        for split, path in paths.items()
        if path.exists()  # a run may stream its text
    }


def file_digest(path: str | Path) -> str:
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


def count_windows(config, split: str) -> int:
    """The number of windows in `train.bin` or `val.bin`."""
    return (len(open_tokens(config, split)) - 1) // config.block_size


def check(config) -> dict:
    """Refuse files that are unusable, too short, or hold ids that the model lacks.

    Files without a manifest are somebody's own: what they are taken for is said.

    Returns:
        What a manifest says, for files that have none.

    Raises:
        FileNotFoundError, ValueError: with what was found, and what to change.
    """
    folder, found, last = Path(config.data_dir), {}, 0
    ours = (folder / "manifest.json").exists()
    for split in ("train", "val"):
        path, tokens = path_of(config, split), open_tokens(config, split)
        found[split] = len(tokens)
        if ours:
            last = tokenizers.load(config.tokenizer).n_vocab - 1
        else:
            check_format(path, config)
            last = max(last, int(tokens.max()))
        if last >= config.vocab_size or not ours and last < config.vocab_size // 64:
            raise ValueError(
                f"{path} may hold token ids up to {last}, but vocab_size is "
                f"{config.vocab_size}: set it, and tokenizer, to what made the tokens (such "
                "as characters), or choose another data_dir"
            )
    windows = count_windows(config, "val")
    needed = config.eval_steps * config.batch_size
    if windows < needed:
        raise ValueError(
            f"{path_of(config, 'val')} has {windows} windows, but eval_steps x batch_size "
            f"asks for {needed}. Set one of these lower, or, in another data_dir, "
            "val_fraction higher, if the dataset has no validation split of its own."
        )
    if not ours:
        try:
            text = tokenizers.load(config.tokenizer).decode(tokens[:40].tolist())
        except Exception as error:  # no network, or an unknown token
            text = repr(error)
        print(
            f"{folder} has no manifest. Its tokens, {found}, are taken for those of "
            f"{config.tokenizer}; the last file begins with {text!r:.200}"
        )
    return {"source": f"the files that were already in {folder}", "tokens": found}


def check_format(path: Path, config) -> None:
    """Refuse a file that isn't bare tokens of `config`, as far as its beginning shows.

    Raises:
        ValueError: with what it seems to be, and what to do.
    """
    start, dtype = np.fromfile(path, np.uint16, 2**16), config.token_dtype
    found = [kind for other, kind in OTHERS.items() if re.match(other, start.tobytes())]
    if dtype == "uint16" and start[1::2].max() < 16 <= start[::2].max():
        found = ["four or more bytes a token: np.fromfile(path, np.uint32) reads it"]
    for other in ("meta.pkl", "train.idx", "train_index.bin"):
        if path.with_name(other).exists():
            found = [f"tokens of another program, which left {other} beside them"]
    if found:
        raise ValueError(
            f"{path}: expected the bare tokens of {config.tokenizer}, {dtype}, as nanoGPT "
            f"writes them; this looks like {found[0]}"
        )


def mix(x: np.ndarray) -> np.ndarray:
    """Scramble uint64 values (the output function of SplitMix64, Steele et al. 2014)."""
    x = (x ^ (x >> 30)) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> 27)) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> 31)


def shuffle_index(index: np.ndarray, size: int, key: np.ndarray) -> np.ndarray:
    """Send each index in range(size) to its place in the permutation that `key` names.

    A Feistel network is a permutation by construction, so nothing is kept in memory and
    the order is a function of the index. Four rounds permute a power of four that is at
    least `size`; an index that lands outside goes through again until it is inside (Black
    and Rogaway, 2002).
    """
    half = np.uint64(max(1, math.ceil((size - 1).bit_length() / 2)))
    mask = (np.uint64(1) << half) - np.uint64(1)
    index, key = index.astype(np.uint64), mix(key.astype(np.uint64) + np.uint64(1))
    outside = np.ones(index.shape, dtype=bool)
    while outside.any():
        left, right = index >> half, index & mask
        for i in range(4):
            left, right = right, left ^ (mix(right + key + np.uint64(i << 40)) & mask)
        index = np.where(outside, (left << half) | right, index)
        outside = index >= size
    return index.astype(np.int64)


def windows_of(
    config, split: str, steps: range, rows: np.ndarray | None = None
) -> np.ndarray:
    """Which windows of a file belong to these steps, int64 [steps, rows].

    They are a function of the seed and the step: an epoch of "train" has each window once,
    in an order of its own; "val" isn't shuffled.

    Args:
        rows: places of a batch, int [rows], such as a worker's; None: all.
    """
    rows = np.arange(config.batch_size) if rows is None else rows
    places = np.arange(steps.start, steps.stop)[:, None] * config.batch_size + rows
    n_windows = count_windows(config, split)
    epoch, window = np.divmod(places, n_windows)
    if split == "train":
        window = shuffle_index(window, n_windows, config.seed * 2**32 + epoch)
    return window


def window_indices(
    config, split: str, steps: range, rows: np.ndarray | None = None
) -> Iterator[list[np.ndarray]]:
    """What `windows_of` gives, in lists of arrays, int64 [some steps, rows].

    A task of Ray Data reads an array, in advance. A list becomes a dataset, since Ray Data
    plans all tasks of a dataset before the first starts.
    """
    width = config.batch_size if rows is None else len(rows)
    stride = math.ceil(WINDOWS_IN_RANGE / width)
    for start in range(0, len(steps), stride):
        indices = windows_of(config, split, steps[start : start + stride], rows)
        each = max(WINDOWS_AT_ONCE // width, 1)
        yield [indices[place : place + each] for place in range(0, len(indices), each)]


def read(config, split: str, indices: np.ndarray) -> np.ndarray:
    """The windows with these indices, `config.token_dtype` [..., block_size + 1].

    Raises:
        OSError: the file ends too soon.
    """
    path, T = path_of(config, split), config.block_size
    tokens = np.empty((indices.size, T + 1), config.token_dtype)
    with path.open("rb", buffering=0) as file:
        if hasattr(os, "posix_fadvise"):  # Linux: don't read ahead
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
        for row, window in zip(tokens, indices.ravel().tolist()):
            file.seek(window * T * tokens.itemsize)
            if file.readinto(row) != row.nbytes:
                raise OSError(f"{path} ended, or couldn't be read, in window {window}")
    return tokens.reshape(*indices.shape, T + 1)


def is_running(process: str) -> bool:
    """Whether this machine has a process of that number; of what is no number, perhaps."""
    try:
        os.kill(int(process), 0)
    except ProcessLookupError:
        return False
    except (PermissionError, ValueError):  # another user's, or of no number
        pass
    return True
