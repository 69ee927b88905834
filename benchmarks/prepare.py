"""How fast text becomes tokens, beside nanoGPT's way of doing it.

    python benchmarks/prepare.py

Tokenizes Python's help pages, repeated, each with a number in front, from files of the datasets
library: with the notebook's cells, and with nanoGPT's two loops, written anew here: one
`encode_ordinary` a row with `datasets.map`, then a memory map filled in 1,024 pieces. Each
measurement has a process of its own, and both must write the same bytes.
"""

import hashlib
import itertools
import os
import tempfile
import time
from pathlib import Path
from pydoc_data.topics import topics
from statistics import median

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("RAY_DATA_LOG_LEVEL", "WARNING")

import common
import datasets
import numpy as np
import tiktoken

from trainkit import corpus
from trainkit.config import TrainingConfig

ROUNDS = 3
CHARACTERS = 250_000_000


def make_documents():
    """Rows of about CHARACTERS in all."""
    size = CHARACTERS
    for number, page in enumerate(itertools.cycle(topics.values())):
        if size <= 0:
            break
        size -= len(page)
        yield {"text": f"{number}. {page}"}


def encode_row(row: dict) -> dict:
    tokenizer = tiktoken.get_encoding("gpt2")
    ids = [*tokenizer.encode_ordinary(row["text"]), tokenizer.eot_token]
    return {"ids": ids, "len": len(ids)}


def nanogpt(parts: list[datasets.Dataset], folder: Path) -> None:
    """Write the tokens of documents as nanoGPT does."""
    import prepare  # a function of __main__ would go to the processes with all of JAX

    options = {"remove_columns": ["text"], "num_proc": common.CORES}
    for part, name in zip(parts, ("train.bin", "val.bin")):
        rows = part.map(prepare.encode_row, **options)
        total = int(np.sum(rows["len"], dtype=np.uint64))
        tokens = np.memmap(folder / name, np.uint16, mode="w+", shape=(total,))
        pieces = min(1_024, len(rows))
        start = 0
        for piece in range(pieces):
            shard = rows.shard(num_shards=pieces, index=piece, contiguous=True)
            ids = np.concatenate(shard.with_format("numpy")["ids"])
            tokens[start : start + len(ids)] = ids
            start += len(ids)
        tokens.flush()


GIVEN = []


def given(downloads: str) -> list[datasets.Dataset]:
    return GIVEN


def ours(parts: list[datasets.Dataset], folder: Path) -> None:
    """Write the tokens of documents as the notebook does."""
    tutorial = common.load_notebook()
    few = {"batch_size": 1, "eval_steps": 1, "block_size": 64}
    config = TrainingConfig(dataset="pages", data_dir=str(folder), **few)
    GIVEN[:] = parts
    corpus.write(config, given, tutorial.tokenize)


def measure(way: str, root: Path) -> dict:
    """Seconds, and what tells the files of one way from others."""
    datasets.disable_caching()
    documents = datasets.load_from_disk(root / "documents")
    parts = documents.train_test_split(test_size=0.0005, seed=2357, shuffle=True)
    folder = Path(tempfile.mkdtemp(dir=root))
    if way == "ours":
        common.start_ray(num_cpus=common.CORES)
    start = time.perf_counter()
    {"ours": ours, "nanoGPT's": nanogpt}[way]([*parts.values()], folder)
    seconds = time.perf_counter() - start
    files = [(folder / name).read_bytes() for name in ("train.bin", "val.bin")]
    digests = [hashlib.sha256(file).hexdigest() for file in files]
    return {"seconds": seconds, "tokens": sum(map(len, files)) // 2, "digests": digests}


def main() -> None:
    with tempfile.TemporaryDirectory(dir=".") as root:
        root = Path(root).resolve()
        documents = datasets.Dataset.from_generator(make_documents, cache_dir=str(root))
        documents.save_to_disk(root / "documents")
        ways = [("ours", root), ("nanoGPT's", root)]
        runs = common.interleave(measure, ways, ROUNDS)
    if any(run["digests"] != runs[0][0]["digests"] for run in sum(runs, [])):
        raise SystemExit("The files differ, so the speeds cannot be compared")
    seconds = [median(run["seconds"] for run in way) for way in runs]
    table = []
    for (way, _), spent in zip(ways, seconds):
        speed = runs[0][0]["tokens"] / spent / 1e6
        table.append([way, f"{speed:.2f}", f"{seconds[1] / spent:.2f}"])
    columns = ["way", "million tokens/s", "ratio to nanoGPT's"]
    common.print_table(columns, table, ["datasets", "ray", "tiktoken"])


if __name__ == "__main__":
    main()
