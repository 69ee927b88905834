"""How fast text becomes tokens, beside nanoGPT's way of doing it.

    python benchmarks/prepare.py [--rounds 3]

Tokenizes Python's help pages, repeated, each with a number in front, with the notebook's
`prepare_dataset`; with nanoGPT's two loops, written anew here: one `encode_ordinary` a row
with `datasets.map`, then a memory map filled in 1,024 pieces; and with tiktoken alone,
which writes nothing. Each measurement has a process of its own, and all start from the
same shuffled, memory-mapped documents. Memory is the peak of what the processes together
could not give back: not the pages of files that they map. Linux only.
"""

import argparse
import hashlib
import os
import shutil
import tempfile
import threading
import time
from pathlib import Path
from statistics import median

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("RAY_DATA_LOG_LEVEL", "WARNING")

import datasets
import numpy as np
import psutil
import tiktoken
from common import CORES, interleave, load_notebook, print_table, start_ray

import trainkit.config
import trainkit.corpus

SIZES = {"25 MB": 25 * 10**6, "1 GB": 10**9}  # of text


def write_text(folder: Path, size: int) -> None:
    """Write documents of `size` bytes in all."""
    from pydoc_data.topics import topics

    texts, written = [], 0
    while written < size:
        for text in topics.values():
            texts.append(f"{len(texts)}. {text}")
            written += len(texts[-1])
    datasets.Dataset.from_dict({"text": texts}).to_parquet(folder / "text.parquet")


class Memory(threading.Thread):
    """Watches the memory of this process and its descendants; `peak` is in bytes."""

    def __init__(self):
        super().__init__(daemon=True)
        self.peak, self.me = 0, psutil.Process()
        self.start()

    def run(self) -> None:
        while True:
            processes = [self.me, *self.me.children(recursive=True)]
            self.peak = max(self.peak, sum(map(unevictable, processes)))
            time.sleep(2)  # looking at all of Ray's processes takes 0.1 s


def unevictable(process: psutil.Process) -> int:
    """Bytes of memory that no file backs; what is shared counts in parts."""
    try:
        lines = Path(f"/proc/{process.pid}/smaps_rollup").read_text().splitlines()[1:]
    except OSError:  # it has ended
        return 0
    sizes = {line.split()[0]: int(line.split()[1]) for line in lines}
    return 1_024 * (sizes["Pss_Anon:"] + sizes["Pss_Shmem:"])


def nanogpt(documents: datasets.Dataset, path: Path) -> int:
    """Write the tokens of `documents` as nanoGPT does; return how many."""
    tokenizer = tiktoken.get_encoding("gpt2")

    def tokenize(row):
        ids = [*tokenizer.encode_ordinary(row["text"]), tokenizer.eot_token]
        return {"ids": ids, "len": len(ids)}

    rows = documents.map(
        tokenize, remove_columns=["text"], num_proc=CORES, load_from_cache_file=False
    )
    total, start, pieces = int(np.sum(rows["len"], dtype=np.uint64)), 0, 1_024
    tokens = np.memmap(path, dtype=np.uint16, mode="w+", shape=(total,))
    for piece in range(pieces):
        shard = rows.shard(num_shards=pieces, index=piece, contiguous=True)
        ids = np.concatenate(shard.with_format("numpy")["ids"])
        tokens[start : start + len(ids)] = ids
        start += len(ids)
    tokens.flush()
    return total


def tiktoken_alone(texts: list[str], path: Path) -> int:
    """Encode `texts` on one core; keep nothing."""
    tokenizer = tiktoken.get_encoding("gpt2")
    return sum(len(tokenizer.encode_ordinary(text)) + 1 for text in texts)


def measure(way: str, folder: Path) -> dict:
    """The tokens, seconds, and peak memory of one way to tokenize the text."""
    tutorial = load_notebook()
    config = trainkit.config.TrainingConfig(
        dataset=str(folder / "*.parquet"), data_dir=str(folder / "data")
    )
    documents = trainkit.corpus.split(trainkit.corpus.load(config), config)["train"]
    if way == "ours":
        start_ray("local", num_cpus=CORES)

        def function(_, path):
            return tutorial.prepare_dataset(config)["tokens"]["train"]

    elif way == "nanoGPT's":
        function = nanogpt
    else:
        function, documents = tiktoken_alone, list(documents["text"])
    shutil.rmtree(config.data_dir, ignore_errors=True)  # of the round before
    path, memory = Path(config.data_dir) / "train.bin", Memory()
    if way != "ours":
        path.parent.mkdir(exist_ok=True)
    start = time.perf_counter()
    tokens = function(documents, path)
    seconds = time.perf_counter() - start
    return {
        "tokens": tokens,
        "seconds": seconds,
        "peak": memory.peak,
        "digest": hashlib.sha256(path.read_bytes()).hexdigest(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    rounds = parser.parse_args().rounds
    ways, table = ["ours", "nanoGPT's", "tiktoken alone"], []
    with tempfile.TemporaryDirectory(dir=".") as root:
        folders = {name: Path(root).resolve() / name for name in SIZES}
        for name, folder in folders.items():
            folder.mkdir()
            write_text(folder, SIZES[name])
        rows = [(way, folder) for folder in folders.values() for way in ways]
        runs = interleave(measure, rows, rounds)
    for name, folder in folders.items():
        results = {way: runs[rows.index((way, folder))] for way in ways}
        if len({run["digest"] for way in ways[:2] for run in results[way]}) != 1:
            raise SystemExit("The files differ, so the speeds cannot be compared")
        seconds = {way: median(run["seconds"] for run in results[way]) for way in ways}
        for way in ways[:2]:
            speed = results[way][0]["tokens"] / seconds[way] / 1e6
            ratio = seconds["nanoGPT's"] / seconds[way]
            share = seconds["tiktoken alone"] / CORES / seconds[way]
            peak = median(run["peak"] for run in results[way]) / 1e6
            row = [name, way, f"{speed:.2f}", f"{speed / CORES:.2f}", f"{ratio:.2f}"]
            table.append([*row, f"{share:.0%}", f"{peak:.0f} MB"])
        speed = results[way][0]["tokens"] / seconds["tiktoken alone"] / 1e6
        table.append([name, "tiktoken alone, one core", *[f"{speed:.2f}"] * 2, *"---"])
    columns = "text|way|million tokens/s|a core|ratio to nanoGPT's|tiktoken's share"
    columns = [*columns.split("|"), "peak memory"]
    print_table(columns, table, ["datasets", "ray", "tiktoken"])


if __name__ == "__main__":
    main()
