"""How fast one worker gets windows of tokens from Ray Data.

    python benchmarks/loader.py

Reads 10^6 windows, three times, from a sparse file of 200 MB, by the notebook's function, with
one task that reads, as a worker has. Each measurement has a process and a Ray cluster of its
own, and takes the speed from the first step to the last.
"""

import os
import tempfile
import time
from pathlib import Path
from statistics import median

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("RAY_DATA_LOG_LEVEL", "WARNING")

import common

from trainkit import workers
from trainkit.config import TrainingConfig


def measure(folder: Path) -> float:
    """Tokens/s of one iterator."""
    tutorial = common.load_notebook()
    config = TrainingConfig(data_dir=str(folder))
    common.start_ray(num_cpus=common.CORES)
    workers.limit_data()
    steps = range(10**6 // config.batch_size)
    batches = tutorial.read_batches(config, tutorial.create_mesh(config), steps)
    next(batches)
    start = time.perf_counter()
    tokens = sum(len(windows) * config.block_size for windows in batches)
    return tokens / (time.perf_counter() - start)


def main() -> None:
    with tempfile.TemporaryDirectory(dir=".") as root:
        folder = Path(root).resolve()
        for split in ("train", "val"):
            (folder / f"{split}.bin").touch()
            os.truncate(folder / f"{split}.bin", 200_000_000)
        (speeds,) = common.interleave(measure, [(folder,)], rounds=3)
    speed = f"{median(speeds) / 1e6:.1f}"
    common.print_table(["million tokens/s"], [[speed]], ["ray", "numpy"])


if __name__ == "__main__":
    main()
