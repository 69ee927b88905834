"""How fast text becomes tokens, beside nanoGPT's way of doing it.

    python benchmarks/prepare.py [--rounds 3] [--megabytes 25 1000]

Tokenizes Python's help pages, repeated, each with a number in front, from the cache of the
datasets library: with the notebook's cells, and with nanoGPT's two loops, written anew here:
one `encode_ordinary` a row with `datasets.map`, then a memory map filled in 1,024 pieces.
Each measurement has a process of its own. Memory is the most that this process had of its
own, without what it shares with others, such as Ray's object store.
"""

import argparse
import hashlib
import itertools
import os
import tempfile
import threading
import time
from functools import partial
from pathlib import Path
from pydoc_data.topics import topics
from statistics import median

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("RAY_DATA_LOG_LEVEL", "WARNING")

import common
import datasets
import numpy as np
import psutil
import tiktoken

from trainkit import corpus
from trainkit.config import TrainingConfig

WAYS = ("ours", "nanoGPT's")


def make_documents(size: float):
    """Rows of `size` bytes in all."""
    for number, page in enumerate(itertools.cycle(topics.values())):
        if size <= 0:
            break
        size -= len(page)
        yield {"text": f"{number}. {page}"}


def divide(documents: datasets.Dataset) -> datasets.DatasetDict:
    return documents.train_test_split(test_size=0.0005, seed=2357, shuffle=True)


def encode_row(row: dict) -> dict:
    tokenizer = tiktoken.get_encoding("gpt2")
    ids = [*tokenizer.encode_ordinary(row["text"]), tokenizer.eot_token]
    return {"ids": ids, "len": len(ids)}


def nanogpt(documents: datasets.Dataset, folder: Path) -> None:
    """Write the tokens of `documents` as nanoGPT does."""
    import prepare  # a function of __main__ would go to the processes with all of JAX

    for split, part in divide(documents).items():
        rows = part.map(
            prepare.encode_row, remove_columns=["text"], num_proc=common.CORES
        )
        total, start = int(np.sum(rows["len"], dtype=np.uint64)), 0
        path = folder / {"train": "train.bin", "test": "val.bin"}[split]
        tokens = np.memmap(path, dtype=np.uint16, mode="w+", shape=(total,))
        for piece in range(pieces := min(1_024, len(rows))):
            shard = rows.shard(num_shards=pieces, index=piece, contiguous=True)
            ids = np.concatenate(shard.with_format("numpy")["ids"])
            tokens[start : start + len(ids)] = ids
            start += len(ids)
        tokens.flush()


def ours(documents: datasets.Dataset, folder: Path) -> None:
    """Write the tokens of `documents` as the notebook does."""
    tutorial = common.load_notebook()

    def pages():
        return [corpus.from_datasets(part) for part in divide(documents).values()]

    tutorial.DATASETS["pages"] = pages
    few = {"batch_size": 1, "eval_steps": 1, "block_size": 64}
    config = TrainingConfig(dataset="pages", data_dir=str(folder), **few)
    tutorial.prepare_dataset(config)


def measure(way: str, root: Path) -> dict:
    """Seconds, bytes of memory, and what tells the files of one way from others."""
    datasets.disable_caching()
    documents = datasets.load_from_disk(root / "documents")
    folder = Path(tempfile.mkdtemp(dir=root))
    if way == "ours":
        common.start_ray("local", num_cpus=common.CORES)
    process, memory, done = psutil.Process(), [0], threading.Event()

    def watch() -> None:
        while not done.wait(0.1):
            found = process.memory_info()
            memory[0] = max(memory[0], found.rss - found.shared)

    threading.Thread(target=watch, daemon=True).start()
    start = time.perf_counter()
    {"ours": ours, "nanoGPT's": nanogpt}[way](documents, folder)
    seconds = time.perf_counter() - start
    done.set()
    files = [(folder / f"{split}.bin").read_bytes() for split in ("train", "val")]
    digest = [hashlib.sha256(file).hexdigest() for file in files]
    tokens = sum(map(len, files)) // 2
    return {"tokens": tokens, "seconds": seconds, "memory": memory[0], "digest": digest}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--megabytes", type=int, nargs="+", default=[25, 1_000])
    arguments = parser.parse_args()
    table = []
    for size in arguments.megabytes:
        with tempfile.TemporaryDirectory(dir=".") as root:
            root = Path(root).resolve()
            rows = partial(make_documents, size * 1e6)
            documents = datasets.Dataset.from_generator(rows, cache_dir=str(root))
            documents.save_to_disk(root / "documents")
            runs = common.interleave(
                measure, [(way, root) for way in WAYS], arguments.rounds
            )
        if any(run["digest"] != runs[0][0]["digest"] for run in sum(runs, [])):
            raise SystemExit("The files differ, so the speeds cannot be compared")
        seconds = [median(run["seconds"] for run in way) for way in runs]
        for name, way, spent in zip(WAYS, runs, seconds):
            speed = f"{way[0]['tokens'] / spent / 1e6:.2f}"
            memory = f"{max(run['memory'] for run in way) / 1e6:.0f} MB"
            ratio = f"{seconds[1] / spent:.2f}"
            table.append([f"{size:,} MB", name, speed, ratio, memory])
    columns = ["text", "way", "million tokens/s", "ratio to nanoGPT's", "memory"]
    common.print_table(columns, table, ["datasets", "ray", "tiktoken"])


if __name__ == "__main__":
    main()
