"""How fast Ray Data hands windows of tokens to one worker.

    python benchmarks/loader.py [--original README.md]

Reads 10^5 to 10^7 windows from files of 10 MB to 20 GB, through one iterator, as the
training loop does. Each row has a process and a Ray cluster of its own. It reads one batch
of a run of one step, for which Ray starts its worker processes, and then all: the speed is
that from their first batch to the last, and memory is what the process's own has grown by
from before them to the end. The files are sparse and take no space on disk.
`--original` names the README.md of the tutorial that this one replaces, for a ratio.
"""

import argparse
import dataclasses
import os
import tempfile
import time
from pathlib import Path
from statistics import median

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("RAY_DATA_LOG_LEVEL", "WARNING")

import psutil
import ray
from common import (
    CORES,
    interleave,
    load_notebook,
    original_code,
    print_table,
    start_ray,
)

import trainkit.config
import trainkit.token_files

FILES = {"10 MB": 10**7, "200 MB": 2 * 10**8, "20 GB": 2 * 10**10}  # bytes
SHORT = [(10**5, "200 MB")]  # read in seconds, so three times
LONG = [(10**6, "10 MB"), (10**6, "200 MB"), (10**6, "20 GB"), (10**7, "200 MB")]


def own_memory() -> int:
    """Bytes that this process shares with no other, so without Ray's object store."""
    memory = psutil.Process().memory_info()
    return memory.rss - memory.shared


def our_batches(tutorial, config):
    """The windows of a whole run, read as the training loop reads them."""
    steps = range(config.max_steps)
    for numbers in trainkit.token_files.window_numbers(config, "train", steps):
        dataset = tutorial.make_token_dataset(config, "train", numbers)
        yield from dataset.iter_batches(batch_size=1, prefetch_batches=2)


def measure(original: str | None, windows: int, folder: Path) -> tuple[float, ...]:
    """Tokens/s, seconds to a fresh cluster's and to a warm one's first batch, growth."""
    tutorial = load_notebook()
    config = trainkit.config.TrainingConfig(data_dir=str(folder))
    size = config.batch_size
    start_ray("local", num_cpus=CORES)
    ray.data.DataContext.get_current().enable_progress_bars = False

    def read(steps: int):
        if not original:
            return our_batches(tutorial, dataclasses.replace(config, max_steps=steps))
        code = original_code(original, "def make_bin_xy_dataset")
        dataset = code["make_bin_xy_dataset"](
            str(folder / "train.bin"), config.block_size, num_sequences=steps * size
        )
        return iter(dataset.iter_batches(batch_size=size, prefetch_batches=2))

    def seconds_to_first(batches) -> float:
        start = time.perf_counter()
        next(batches)
        return time.perf_counter() - start

    fresh = seconds_to_first(read(1))
    memory, batches = own_memory(), read(windows // size)
    warm, start = seconds_to_first(batches), time.perf_counter()
    tokens = sum(size * config.block_size for _ in batches)
    speed = tokens / (time.perf_counter() - start)
    return speed, fresh, warm, own_memory() - memory


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--original", help="README.md of the original tutorial")
    original = parser.parse_args().original
    short, long = ([(None, *case) for case in cases] for cases in (SHORT, LONG))
    if original:
        short += [(original, *case) for case in SHORT]
    with tempfile.TemporaryDirectory(dir=".") as root:
        folders = {name: Path(root).resolve() / name for name in FILES}
        for name, folder in folders.items():
            folder.mkdir()
            (folder / "train.bin").touch()
            os.truncate(folder / "train.bin", FILES[name])
        runs = []
        for rows, rounds in ((short, 3), (long, 1)):
            places = [(who, windows, folders[file]) for who, windows, file in rows]
            runs += zip(rows, interleave(measure, places, rounds))

    medians = {row: [median(values) for values in zip(*run)] for row, run in runs}
    base = medians[original, *SHORT[0]][0] if original else None
    table = [
        [
            "original" if who else "ours",
            f"{windows:,}",
            file,
            f"{speed / 1e6:.1f}",
            f"{speed / 1e6 / CORES:.1f}",
            f"{speed / base:.1f}" if base else "not measured",
            f"{fresh:.1f} s",
            f"{warm:.2f} s",
            f"{growth / 1e6:.0f} MB",
        ]
        for (who, windows, file), (speed, fresh, warm, growth) in medians.items()
    ]
    columns = "loader|windows|file|million tokens/s|a core|ratio to the original"
    columns += "|first batch, fresh cluster|first batch, warm|memory grown by"
    print_table(columns.split("|"), table, ["ray", "numpy"])


if __name__ == "__main__":
    main()
