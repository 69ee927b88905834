"""train.bin and val.bin: their folder, their contents, and the order of their windows.

The format is nanoGPT's: a number for each token, documents one after the other, and an
end-of-text token after each. It is a uint16, or a uint32 in a vocabulary of more than 65,536.
A *window* is `block_size + 1` tokens; consecutive windows share one token, so no token between
two windows is left out.

Ray Data's tasks import this module, so it imports neither JAX nor Flax nor Orbax.
"""

import contextlib
import errno
import glob
import hashlib
import json
import math
import os
import re
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import ray.data
from tqdm import tqdm

from trainkit import tokenizers

WINDOWS_IN_RANGE = 2**17  # that Ray Data plans
WINDOWS_AT_ONCE = 512  # that a task reads: 1 MB at GPT-2's block_size
LLM_C = (20240520, 20240801)  # which llm.c's token files begin with: GPT-2's, Llama's
OURS = (ValueError, ConnectionError, FileNotFoundError)  # raised on purpose, in tasks
SAMPLE = 2**16  # bytes


def read_in_order(context: ray.data.DataContext) -> None:
    """Let datasets give their rows in order however their tasks finish; and show no bars.

    A worker reads its own windows, for which a CPU is enough. Without that limit, the
    dataset of each worker would ask an autoscaler for more.
    """
    options = context.execution_options
    context.enable_progress_bars = False
    options.preserve_order = True
    if ray.is_initialized() and ray.get_runtime_context().get_actor_id():
        options.resource_limits = ray.data.ExecutionResources.for_limits(cpu=1)


def existing(config, source: dict) -> dict | None:
    """The manifest of the files that are already in `config.data_dir`, if any.

    Raises:
        FileExistsError: the folder holds tokens of another source, or other files.
        PermissionError: the folder can't be made.
        ValueError: a file there is damaged, or the folder can't be replaced.
    """
    folder = Path(config.data_dir)
    if (folder / "manifest.json").exists():
        manifest = read_manifest(folder)
        # If the text files are gone, their tokens are still good; and older manifests say
        # less.
        defaults = {"max_documents": None, "dtype": "uint16", "text_column": "text"}
        found, now = defaults | manifest["source"], defaults | source
        added = {"names"} | {"digest", "code"} - found.keys()  # `digest` has the names
        of, by = (x.get("code", "").partition(" ")[2] for x in (found, now))
        if of != by:  # another Python, which writes the same code in another way
            added.add("code")
        differing = [
            f"{key} was {found.get(key)!r}, and is {value!r}"
            for key, value in now.items()
            if key not in added and value != found.get(key)
        ]
        if differing:
            raise FileExistsError(
                f"data_dir: {folder} holds tokens of another source: "
                f"{'; '.join(differing)}. Choose another data_dir, or delete that folder."
            )
        return manifest
    if all(path_of(config, split).exists() for split in ("train", "val")):
        return {"source": f"the files that were already in {folder}"}
    if folder.exists() and any(folder.iterdir()):
        raise FileExistsError(
            f"{folder} holds files, but not both train.bin and val.bin. Set data_dir to "
            "another folder, or delete this one."
        )
    place = next(path for path in folder.resolve().parents if path.exists())
    if not (place.is_dir() and os.access(place, os.W_OK)):
        raise PermissionError(
            f"data_dir: {folder} can't be made, since {place} "
            f"{'is not writable' if place.is_dir() else 'is a file'}. Choose a folder "
            "that this user may write to."
        )
    if folder.is_mount():
        raise ValueError(f"data_dir: {folder} is a mounted disk; choose a folder in it")
    return None


def read_manifest(folder: Path) -> dict:
    """What `write_manifest` wrote.

    Raises:
        ValueError: it is damaged, or a token file isn't as long as it says.
    """
    path = folder / "manifest.json"
    try:
        manifest = json.loads(path.read_text())
        size = np.dtype(manifest["source"].get("dtype", "uint16")).itemsize
        sizes = {folder / f"{k}.bin": size * n for k, n in manifest["tokens"].items()}
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise ValueError(
            f"{path} is damaged ({error!r}). Delete that folder to make it anew."
        ) from error
    for file, size in sizes.items():
        if file.exists() and (found := file.stat().st_size) != size:
            raise ValueError(
                f"{file} has {found} bytes, but {path.name} says {size}. Delete that "
                "folder to make it anew."
            )
    return manifest


@contextlib.contextmanager
def new_folder(config) -> Iterator[Path]:
    """A folder to write in, which becomes `config.data_dir` if all goes well.

    An interrupted run leaves nothing behind that could pass for a finished one. If another
    process has made `data_dir` meanwhile, its files stay.
    """
    folder = Path(config.data_dir).resolve()  # a link stays one
    prefix = f"{folder.name}.partial-{socket.gethostname()}-"
    for old in folder.parent.glob(f"{glob.escape(prefix)}*"):
        process = old.name.removeprefix(prefix)
        if process == str(os.getpid()) or not is_running(process):
            shutil.rmtree(old)  # it was killed, perhaps with this process's number
    partial = folder.with_name(f"{prefix}{os.getpid()}")
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


def write(config, tokenized: ray.data.Dataset, source: dict) -> dict:
    """Make `config.data_dir` of tokenized documents, in order; return its manifest.

    Args:
        tokenized: rows of `split`, as `corpus.read` gives it, and `tokens`, a document's
            tokens as the bytes of numbers of `config.token_dtype`.
        source: what `corpus.describe` says.

    Raises:
        OSError: the disk is full.
        ValueError: one of the splits has no documents.
    """
    counts, size = {"train": 0, "val": 0}, np.dtype(config.token_dtype).itemsize
    with new_folder(config) as folder:
        try:
            with (
                (folder / "train.bin").open("wb") as train,
                (folder / "val.bin").open("wb") as val,
                tqdm(desc=folder.parent.name, unit="doc") as bar,
            ):
                for split, tokens in documents_in(tokenized):
                    if not split:
                        val_is_next = is_val(bar.n, config.val_fraction)
                        split = "val" if val_is_next else "train"
                    counts[split] += (val if split == "val" else train).write(
                        tokens
                    ) // size
                    bar.update()
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            raise OSError(
                errno.ENOSPC,
                f"data_dir: the disk of {folder.parent} has no room for the tokens. Make "
                "some, or set data_dir to another disk",
            ) from error
        if not all(counts.values()):
            lacking = "train on; set it lower"
            if counts["train"]:
                lacking = "validate with; set it higher"
            raise ValueError(
                f"val_fraction: {config.val_fraction} of {bar.n} documents leaves none to "
                f"{lacking}, or bring more documents"
            )
        return write_manifest(folder, source, bar.n, counts)


def documents_in(tokenized: ray.data.Dataset) -> Iterator[tuple[str, bytes]]:
    """The split and the tokens of each document, in order.

    Raises:
        ValueError, ConnectionError, FileNotFoundError: what a task of ours found wrong.
    """
    try:
        read_in_order(tokenized.context)
        for rows in tokenized.iter_batches(batch_size=None):
            yield from zip(rows["split"], rows["tokens"])
    except ray.exceptions.RayTaskError as error:  # which has the task's error as text
        kinds = {kind.__name__: kind for kind in OURS}
        ours = rf"({'|'.join(kinds)}): ((?:dataset|text_column|tokenizer): .*)"
        if found := re.search(ours, str(error)):
            raise kinds[found[1]](found[2]) from error
        raise


def is_val(place: int, fraction: float) -> bool:
    """Whether the document at that place, from 0, is for validation.

    These are the first and others, evenly spread: of n documents, `fraction` of n, rounded up.
    """
    before, after = (round(n * fraction, 9) for n in (place, place + 1))  # 0.2 x 35 > 7
    return math.ceil(after) > math.ceil(before)


def write_manifest(folder: Path, source: dict, documents: int, tokens: dict) -> dict:
    """Say beside the token files what they are made from; return what was written."""
    manifest = {"source": source, "documents": documents, "tokens": tokens}
    (folder / "manifest.json").write_text(json.dumps(manifest, indent=2))
    return manifest


def path_of(config, split: str) -> Path:
    """train.bin or val.bin."""
    return Path(config.data_dir) / f"{split}.bin"


def open_tokens(config, split: str) -> np.ndarray:
    """The tokens of `train.bin` or `val.bin`, `config.token_dtype` [tokens], memory-mapped.

    Raises:
        FileNotFoundError, ValueError: the file cannot be trained on.
    """
    path = path_of(config, split)
    if not path.exists():
        raise FileNotFoundError(
            f"{path} does not exist; delete what is left of {path.parent}, if anything, "
            "and run prepare_dataset(config)"
        )
    size, each = path.stat().st_size, np.dtype(config.token_dtype).itemsize
    if size % each or size // each <= config.block_size:
        raise ValueError(
            f"{path} has {size} bytes; expected {each} for each token, and more tokens than "
            f"block_size ({config.block_size})"
        )
    return np.memmap(path, dtype=config.token_dtype, mode="r")


def check_format(path: Path, dtype: str) -> None:
    """Refuse a file that isn't bare tokens of that type, as far as its beginning shows.

    Raises:
        ValueError: with what it seems to be, and what to do.
    """
    start = np.fromfile(path, np.uint16, 2**16)
    found = None
    if bytes(start[:3])[:6] == b"\x93NUMPY":
        found = "a file of numpy.save: write the array with tofile"
    elif start[:2].view(np.uint32)[0] in LLM_C:
        found = "a file of llm.c: leave out its first 1,024 bytes, the header"
    elif dtype == "uint16" and start[1::2].max() < 16 <= start[::2].max():
        found = "four bytes for each token: np.fromfile(path, np.uint32) reads it"
    if found:
        raise ValueError(
            f"{path}: expected the bare tokens, {dtype}, as nanoGPT writes them; this looks "
            f"like {found}"
        )


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


def largest_token(config, split: str) -> int:
    """The largest id in a file; one that has a manifest needn't be read for it."""
    tokens = open_tokens(config, split)
    if (Path(config.data_dir) / "manifest.json").exists():
        return tokenizers.load(config.tokenizer).n_vocab - 1
    chunks = range(0, len(tokens), 2**26)
    return max(int(tokens[start : start + 2**26].max()) for start in chunks)


def check(config) -> None:
    """Refuse files that are unusable, too short, or hold ids that the model lacks.

    Raises:
        FileNotFoundError, ValueError: with what was found, and what to change.
    """
    for split in ("train", "val"):
        open_tokens(config, split)
        check_format(path_of(config, split), config.token_dtype)
        if (largest := largest_token(config, split)) >= config.vocab_size:
            raise ValueError(
                f"{path_of(config, split)} may hold token ids up to {largest}, "
                f"but vocab_size is {config.vocab_size}"
            )
    windows = count_windows(config, "val")
    needed = config.eval_steps * config.batch_size
    if windows < needed:
        raise ValueError(
            f"{path_of(config, 'val')} has {windows} windows, but eval_steps x batch_size "
            f"asks for {needed}. Set one of these lower, or, in another data_dir, "
            "val_fraction higher, if the dataset has no validation split of its own."
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


def window_numbers(
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


def read(config, split: str, numbers: np.ndarray) -> np.ndarray:
    """The windows with these numbers, `config.token_dtype` [..., block_size + 1].

    Raises:
        OSError: the file ends too soon.
    """
    path, T = path_of(config, split), config.block_size
    tokens = np.empty((numbers.size, T + 1), config.token_dtype)
    with path.open("rb", buffering=0) as file:
        if hasattr(os, "posix_fadvise"):  # Linux: don't read ahead
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
        for row, window in zip(tokens, numbers.ravel().tolist()):
            file.seek(window * T * tokens.itemsize)
            if file.readinto(row) != row.nbytes:
                raise OSError(f"{path} ended, or couldn't be read, in window {window}")
    return tokens.reshape(*numbers.shape, T + 1)


def parts_of(numbers: np.ndarray) -> list[np.ndarray]:
    """`numbers`, [steps, rows], cut into parts of some steps: a task reads one, in advance."""
    steps = max(WINDOWS_AT_ONCE // numbers.shape[1], 1)
    return [numbers[start : start + steps] for start in range(0, len(numbers), steps)]


def cut_steps(config, steps: range) -> Iterator[range]:
    """`steps` in ranges of so many windows; each becomes a Ray Dataset.

    Ray Data plans all tasks of a dataset before the first starts.
    """
    stride = math.ceil(WINDOWS_IN_RANGE / config.batch_size)
    for start in range(0, len(steps), stride):
        yield steps[start : start + stride]


def is_running(process: int | str) -> bool:
    """Whether this machine has a process of that number; of what is no number, perhaps."""
    try:
        os.kill(int(process), 0)
    except ProcessLookupError:
        return False
    except (PermissionError, ValueError):  # another user's, or of another host
        pass
    return True
