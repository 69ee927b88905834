"""How fast text becomes tokens, beside nanoGPT's way of doing it.

    python benchmarks/prepare.py [--rounds 3] [--megabytes 25 1000]

Tokenizes Python's help pages, repeated, each with a number in front, with the notebook's
`prepare_dataset`; with nanoGPT's two loops, written anew here: one `encode_ordinary` a row
with `datasets.map`, then a memory map filled in 1,024 pieces; and with tiktoken alone, on one
core, which writes nothing. Each measurement has a process of its own. The notebook's way
reads the files, and the others start from the same documents, memory-mapped.
"""

import argparse
import hashlib
import itertools
import os
import shutil
import tempfile
import time
from pathlib import Path
from statistics import median

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("RAY_DATA_LOG_LEVEL", "WARNING")

import common
import datasets
import numpy as np
import pyarrow
import pyarrow.parquet
import tiktoken

import trainkit.config
import trainkit.corpus

WAYS = ("ours", "nanoGPT's", "tiktoken alone")


def write_text(folder: Path, size: float) -> None:
    """Write documents of `size` bytes in all, in files of some 128 MB."""
    from pydoc_data.topics import topics

    documents = (f"{i}. {x}" for i, x in enumerate(itertools.cycle(topics.values())))
    for part, start in enumerate(range(0, int(size), 128_000_000)):
        texts, missing = [], min(128_000_000, size - start)
        while missing > 0:
            texts.append(next(documents))
            missing -= len(texts[-1])
        path = folder / f"{part:04}.parquet"
        table = pyarrow.table({"text": texts})
        pyarrow.parquet.write_table(table, path, row_group_size=2_000)


def encode_row(row: dict) -> dict:
    tokenizer = tiktoken.get_encoding("gpt2")
    ids = [*tokenizer.encode_ordinary(row["text"]), tokenizer.eot_token]
    return {"ids": ids, "len": len(ids)}


def nanogpt(documents: datasets.Dataset, path: Path) -> int:
    """Write the tokens of `documents` as nanoGPT does; return how many."""
    import prepare  # a function of __main__ would go to the processes with all of JAX

    options = {"remove_columns": ["text"], "load_from_cache_file": False}
    rows = documents.map(prepare.encode_row, num_proc=common.CORES, **options)
    total, start, pieces = int(np.sum(rows["len"], dtype=np.uint64)), 0, 1_024
    tokens = np.memmap(path, dtype=np.uint16, mode="w+", shape=(total,))
    for piece in range(pieces):
        shard = rows.shard(num_shards=pieces, index=piece, contiguous=True)
        ids = np.concatenate(shard.with_format("numpy")["ids"])
        tokens[start : start + len(ids)] = ids
        start += len(ids)
    tokens.flush()
    return total


def measure(way: str, folder: Path) -> dict:
    """The tokens, seconds, and file of one way to tokenize the text in `folder`."""
    tutorial, data = common.load_notebook(), folder / "data"
    config = trainkit.config.TrainingConfig(
        dataset=str(folder / "*.parquet"),
        data_dir=str(data),
        batch_size=1,  # for which the validation text is enough
    )
    documents = datasets.load_dataset(
        "parquet", data_files=config.dataset, split="train", cache_dir=str(folder)
    )
    places, fraction = range(len(documents)), config.val_fraction
    documents = documents.select(
        [n for n in places if not trainkit.corpus.is_val(n, fraction)]
    )
    shutil.rmtree(data, ignore_errors=True)  # of the round before
    path, tokenizer = data / "train.bin", tiktoken.get_encoding("gpt2")
    if way == "ours":
        common.start_ray("local", num_cpus=common.CORES)
    else:
        data.mkdir()
    start = time.perf_counter()
    if way == "ours":
        tokens = tutorial.prepare_dataset(config)["tokens"]["train"]
    elif way == "nanoGPT's":
        tokens = nanogpt(documents, path)
    else:
        tokens = sum(len(tokenizer.encode_ordinary(t)) + 1 for t in documents["text"])
    seconds = time.perf_counter() - start
    written = path.read_bytes() if path.exists() else b""
    digest = hashlib.sha256(written).hexdigest()
    return {"tokens": tokens, "seconds": seconds, "digest": digest}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--megabytes", type=int, nargs="+", default=[25, 1_000])
    arguments = parser.parse_args()
    table = []
    for size in arguments.megabytes:
        with tempfile.TemporaryDirectory(dir=".") as root:
            folder = Path(root).resolve()
            write_text(folder, size * 1e6)
            rows = [(way, folder) for way in WAYS]
            runs = dict(zip(WAYS, common.interleave(measure, rows, arguments.rounds)))
        if len({run["digest"] for way in WAYS[:2] for run in runs[way]}) != 1:
            raise SystemExit("The files differ, so the speeds cannot be compared")
        seconds = {way: median(run["seconds"] for run in runs[way]) for way in WAYS}
        for way in WAYS:
            speed = runs[way][0]["tokens"] / seconds[way] / 1e6
            ratio = seconds["nanoGPT's"] / seconds[way]
            table.append([f"{size:,} MB", way, f"{speed:.2f}", f"{ratio:.2f}"])
    columns = ["text", "way", "million tokens/s", "ratio to nanoGPT's"]
    common.print_table(columns, table, ["datasets", "ray", "tiktoken"])


if __name__ == "__main__":
    main()
