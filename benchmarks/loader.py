"""How fast Ray Data hands windows of tokens to one worker.

    python benchmarks/loader.py [--original README.md]

Reads 10^5 to 10^7 windows from files of 10 MB to 20 GB, through one iterator, as the
training loop does. Each row has a process and a Ray cluster of its own, and gives the
speed from the first batch to the last, the time to the first batch, and how much the
process's own memory has grown by the last. The files are sparse and take no space on disk.
`--original` names the README.md of the tutorial that this one replaces, for a ratio.
"""

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("RAY_DATA_LOG_LEVEL", "WARNING")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "ci"))

import numpy as np
import psutil
import ray
from common import CORES, interleave, original_code, print_table
from notebook_module import load_notebook

FILES = {"10 MB": 10**7, "200 MB": 2 * 10**8, "20 GB": 2 * 10**10}  # bytes
SHORT = [(10**5, "200 MB")]  # read in seconds, so three times
LONG = [(10**6, "10 MB"), (10**6, "200 MB"), (10**6, "20 GB"), (10**7, "200 MB")]


def own_memory() -> int:
    """Bytes that this process shares with no other, so without Ray's object store."""
    memory = psutil.Process().memory_info()
    return memory.rss - memory.shared


def measure(original: str | None, windows: int, folder: Path) -> tuple[float, ...]:
    """Tokens/s, seconds to the first batch, and bytes of growth."""
    tutorial = load_notebook()
    steps = windows // tutorial.TrainingConfig().batch_size
    config = tutorial.TrainingConfig(data_dir=str(folder), max_steps=steps)
    size = config.batch_size
    ray.init("local", num_cpus=CORES, log_to_driver=False)
    ray.data.DataContext.get_current().enable_progress_bars = False
    memory, start = own_memory(), time.perf_counter()
    if original:
        code = original_code(original, "def make_bin_xy_dataset")
        dataset = code["make_bin_xy_dataset"](
            str(folder / "train.bin"), config.block_size, num_sequences=steps * size
        )
        batches = iter(dataset.iter_batches(batch_size=size, prefetch_batches=2))
    else:
        batches = tutorial.local_batches(config, "train", 0, np.arange(size))
    next(batches)
    first = time.perf_counter()
    tokens = sum(config.batch_size * config.block_size for _ in batches)
    speed = tokens / (time.perf_counter() - first)
    return speed, first - start, own_memory() - memory


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
            f"{first:.1f} s",
            f"{growth / 1e6:.0f} MB",
        ]
        for (who, windows, file), (speed, first, growth) in medians.items()
    ]
    columns = "loader|windows|file|million tokens/s|a core|ratio to the original"
    columns += "|first batch after|memory grown by"
    print_table(columns.split("|"), table, ["ray", "numpy"])


if __name__ == "__main__":
    main()
