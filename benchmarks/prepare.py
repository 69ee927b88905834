"""How fast text becomes tokens, beside nanoGPT's way of doing it.

    python benchmarks/prepare.py [--rounds 3]
    python benchmarks/prepare.py --driver 0.1 1 10 [--writer]

Tokenizes Python's help pages, repeated, each with a number in front, with the notebook's
`prepare_dataset`; with nanoGPT's two loops, written anew here: one `encode_ordinary` a row
with `datasets.map`, then a memory map filled in 1,024 pieces; and with tiktoken alone,
which writes nothing. Each measurement has a process of its own. The notebook's way reads the
files, and the others start from the same documents, memory-mapped. Memory is the peak of what
the processes together could not give back: not the pages of files that they map. Linux only.

With `--driver`, so many GB of the same text are prepared, and the driver alone is watched: the
memory that is its own, before and at most, and the seconds that its processor works. With
`--writer`, the same tokens are then written again, from rows that are tokenized already: what
the one writer, the driver, could keep up with.
"""

import argparse
import dataclasses
import hashlib
import itertools
import math
import os
import shutil
import tempfile
import threading
import time
from functools import partial
from pathlib import Path
from statistics import median

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("RAY_DATA_LOG_LEVEL", "WARNING")

import datasets
import numpy as np
import psutil
import pyarrow
import pyarrow.parquet
import ray.data
import tiktoken
from common import (
    CORES,
    in_own_process,
    interleave,
    load_notebook,
    print_table,
    start_ray,
)

import trainkit.config
import trainkit.corpus
import trainkit.token_files

WRITERS = ("ours", "nanoGPT's")
SIZES = {"25 MB": 25 * 10**6, "1 GB": 10**9}  # of text


def write_text(folder: Path, size: float) -> None:
    """Write documents of `size` bytes in all, in files of some 128 MB."""
    from pydoc_data.topics import topics

    documents = (f"{i}. {x}" for i, x in enumerate(itertools.cycle(topics.values())))
    for part in range(math.ceil(size / 128e6)):
        texts, missing = [], min(128e6, size - part * 128e6)
        while missing > 0:
            texts.append(next(documents))
            missing -= len(texts[-1])
        table = pyarrow.table({"text": texts})
        pyarrow.parquet.write_table(
            table, folder / f"{part:04}.parquet", row_group_size=2_000
        )


class Memory(threading.Thread):
    """Watches the memory of this process and its descendants; `peak` is in bytes."""

    def __init__(self, descendants: bool = True):
        super().__init__(daemon=True)
        self.peak, self.me, self.descendants = 0, psutil.Process(), descendants
        self.start()

    def run(self) -> None:
        while True:
            others = self.me.children(recursive=True) if self.descendants else []
            kinds = ("Pss_Anon:", "Pss_Shmem:") if others else ("Pss_Anon:",)
            memory = sum(unevictable(process, kinds) for process in [self.me, *others])
            self.peak = max(self.peak, memory)
            time.sleep(2)  # looking at all of Ray's processes takes 0.1 s


def unevictable(process: psutil.Process, kinds=("Pss_Anon:", "Pss_Shmem:")) -> int:
    """Bytes of memory that no file backs; what is shared counts in parts."""
    try:
        lines = Path(f"/proc/{process.pid}/smaps_rollup").read_text().splitlines()[1:]
    except OSError:  # it has ended
        return 0
    sizes = {line.split()[0]: int(line.split()[1]) for line in lines}
    return 1_024 * sum(sizes[kind] for kind in kinds)


def encode_row(row: dict) -> dict:
    tokenizer = tiktoken.get_encoding("gpt2")
    ids = [*tokenizer.encode_ordinary(row["text"]), tokenizer.eot_token]
    return {"ids": ids, "len": len(ids)}


def nanogpt(documents: datasets.Dataset, path: Path) -> int:
    """Write the tokens of `documents` as nanoGPT does; return how many."""
    import prepare  # a function of __main__ would go to the processes with all of JAX

    rows = documents.map(
        prepare.encode_row,
        remove_columns=["text"],
        num_proc=CORES,
        load_from_cache_file=False,
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
    documents = datasets.load_dataset(
        "parquet", data_files=config.dataset, split="train", cache_dir=str(folder)
    )
    places, fraction = range(len(documents)), config.val_fraction
    documents = documents.select(
        [n for n in places if not trainkit.corpus.is_val(n, fraction)]
    )
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
        "digest": way in WRITERS and hashlib.sha256(path.read_bytes()).hexdigest(),
    }


def watch_driver(gigabytes: float, writer: bool, folder: Path) -> list[list[str]]:
    """Rows on what the driver takes to prepare so much text, and then to write it alone."""
    tutorial, text = load_notebook(), folder / "text"
    text.mkdir()
    write_text(text, gigabytes * 1e9)
    config = trainkit.config.TrainingConfig(
        dataset=f"{text}/*.parquet", data_dir=str(folder / "data")
    )
    start_ray("local", num_cpus=CORES)

    def watch(what: str, prepare) -> list[str]:
        before = unevictable(psutil.Process(), ("Pss_Anon:",))
        memory, start, worked = Memory(False), time.perf_counter(), time.process_time()
        tokens = sum(prepare()["tokens"].values())
        worked, seconds = time.process_time() - worked, time.perf_counter() - start
        return [
            f"{gigabytes:g} GB",
            what,
            f"{before / 1e6:.0f} MB",
            f"{memory.peak / 1e6:.0f} MB",
            f"{tokens / seconds / 1e6:.2f}",
            f"{tokens / worked / 1e6:.1f}",
        ]

    rows = [watch("all", lambda: tutorial.prepare_dataset(config))]
    if writer:
        tokenize = partial(tutorial.tokenize, config=config)
        documents = trainkit.corpus.read(config)
        tokenized = documents.map_batches(tokenize, batch_size=None)
        tokenized.write_parquet(str(folder / "tokenized"))
        again = ray.data.read_parquet(str(folder / "tokenized"))
        other = dataclasses.replace(config, data_dir=str(folder / "again"))
        rows += [
            watch(
                "writing",
                lambda: trainkit.corpus.write(other, again, tutorial.tokenize),
            )
        ]
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--driver", type=float, nargs="+", metavar="GB")
    parser.add_argument("--writer", action="store_true")
    arguments = parser.parse_args()
    rounds = arguments.rounds
    if arguments.driver:
        rows = []
        for gigabytes in arguments.driver:
            with tempfile.TemporaryDirectory(dir=".") as root:
                folder = Path(root).resolve()
                writer = arguments.writer
                rows += in_own_process(watch_driver, gigabytes, writer, folder)
        columns = "text|what|driver before|at most|million tokens/s"
        columns += "|million tokens a second of the driver's processor"
        print_table(columns.split("|"), rows, ["ray", "tiktoken"])
        return
    ways, table = [*WRITERS, "tiktoken alone"], []
    with tempfile.TemporaryDirectory(dir=".") as root:
        folders = {name: Path(root).resolve() / name for name in SIZES}
        for name, folder in folders.items():
            folder.mkdir()
            write_text(folder, SIZES[name])
        rows = [(way, folder) for folder in folders.values() for way in ways]
        runs = interleave(measure, rows, rounds)
    for name, folder in folders.items():
        results = {way: runs[rows.index((way, folder))] for way in ways}
        if len({run["digest"] for way in WRITERS for run in results[way]}) != 1:
            raise SystemExit("The files differ, so the speeds cannot be compared")
        seconds = {way: median(run["seconds"] for run in results[way]) for way in ways}
        for way in WRITERS:
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
