"""How fast one worker gets windows of tokens from Ray Data.

    python benchmarks/loader.py

Reads 10^5 windows three times, and 10^7 once, from a file of 200 MB, through the notebook's
`read_batches`. Each measurement has a process and a Ray cluster of its own. The speed is that
from the first batch to the last, and memory is what the process's own has grown by meanwhile.
The file is sparse and takes no space on disk.
"""

import dataclasses
import os
import tempfile
import time
from pathlib import Path
from statistics import median

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("RAY_DATA_LOG_LEVEL", "WARNING")

import common
import psutil
import ray

import trainkit.config
import trainkit.sharding


def own_memory() -> int:
    """Bytes that this process shares with no other, so without Ray's object store."""
    memory = psutil.Process().memory_info()
    return memory.rss - memory.shared


def measure(windows: int, folder: Path) -> tuple[float, int]:
    """Tokens/s, and the bytes by which memory has grown."""
    tutorial = common.load_notebook()
    config = trainkit.config.TrainingConfig(data_dir=str(folder))
    steps = windows // config.batch_size
    config = dataclasses.replace(config, max_steps=steps)
    common.start_ray("local", num_cpus=common.CORES)
    ray.data.DataContext.get_current().enable_progress_bars = False
    mesh = trainkit.sharding.make_mesh(config)
    batches = tutorial.read_batches(config, mesh, "train", range(steps))
    next(batches)
    memory, start = own_memory(), time.perf_counter()
    tokens = sum(config.batch_size * config.block_size for _ in batches)
    return tokens / (time.perf_counter() - start), own_memory() - memory


def main() -> None:
    table = []
    with tempfile.TemporaryDirectory(dir=".") as root:
        folder = Path(root).resolve()
        for split in ("train", "val"):
            (folder / f"{split}.bin").touch()
            os.truncate(folder / f"{split}.bin", 200_000_000)
        for windows, rounds in ((10**5, 3), (10**7, 1)):
            (found,) = common.interleave(measure, [(windows, folder)], rounds)
            speed, growth = (median(values) for values in zip(*found))
            row = f"{windows:,}", f"{speed / 1e6:.1f}", f"{growth / 1e6:.0f} MB"
            table.append(row)
    columns = ["windows", "million tokens/s", "memory grown by"]
    common.print_table(columns, table, ["ray", "numpy"])


if __name__ == "__main__":
    main()
