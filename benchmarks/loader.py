"""How fast one worker gets windows of tokens from Ray Data.

    python benchmarks/loader.py

Reads 10^5 windows three times, and 10^7 once, from a file of 200 MB, through the notebook's
`make_token_dataset`, with one task that reads, as a worker has. Each measurement has a process
and a Ray cluster of its own. The speed is that from the first step to the last, and memory is
what the process's own has grown by meanwhile. The file is sparse and takes no space on disk.
"""

import os
import tempfile
import time
from pathlib import Path
from statistics import median

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("RAY_DATA_LOG_LEVEL", "WARNING")

import common
import numpy as np
import psutil
import ray

from trainkit.config import TrainingConfig


def own_memory() -> int:
    """Bytes that this process shares with no other, so without Ray's object store."""
    memory = psutil.Process().memory_info()
    return memory.rss - memory.shared


def measure(windows: int, folder: Path) -> tuple[float, int]:
    """Tokens/s, and the bytes by which memory has grown."""
    tutorial = common.load_notebook()
    config = TrainingConfig(data_dir=str(folder))
    common.start_ray(num_cpus=common.CORES)
    data = ray.data.DataContext.get_current()
    data.enable_progress_bars = False
    limits = ray.data.ExecutionResources.for_limits(cpu=1, object_store_memory=2**28)
    data.execution_options.resource_limits = limits  # as `workers.start` does

    steps = range(windows // config.batch_size)
    rows = np.arange(config.batch_size)
    dataset = tutorial.make_token_dataset(config, "train", steps, rows)
    batches = iter(dataset.iter_batches(batch_size=1, prefetch_batches=2))
    next(batches)
    memory, start = own_memory(), time.perf_counter()
    tokens = sum(batch["tokens"].shape[1] * config.block_size for batch in batches)
    speed = tokens / (time.perf_counter() - start)
    return speed, own_memory() - memory


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
            row = [f"{windows:,}", f"{speed / 1e6:.1f}", f"{growth / 1e6:.0f} MB"]
            table.append(row)
    columns = ["windows", "million tokens/s", "memory grown by"]
    common.print_table(columns, table, ["ray", "numpy"])


if __name__ == "__main__":
    main()
