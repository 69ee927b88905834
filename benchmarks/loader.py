"""How fast one worker gets windows of tokens from Ray Data.

    python benchmarks/loader.py [--original README.md]

Reads 10^5 windows three times, and 10^7 once, from a file of 200 MB, through the notebook's
`read_batches`. Each measurement has a process and a Ray cluster of its own. The speed is that
from the first batch to the last, and memory is what the process's own has grown by meanwhile.
The file is sparse and takes no space on disk. `--original` names the README.md of the tutorial
that this one replaces, to stand beside.
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

import common
import psutil
import ray

import trainkit.config
import trainkit.sharding

SHORT, LONG = 10**5, 10**7  # windows


def own_memory() -> int:
    """Bytes that this process shares with no other, so without Ray's object store."""
    memory = psutil.Process().memory_info()
    return memory.rss - memory.shared


def original_batches(path: str, config, windows: int):
    """The windows as the original's training loop reads them."""
    code = common.original_code(path, "def make_bin_xy_dataset")
    file = f"{config.data_dir}/train.bin"
    dataset = code["make_bin_xy_dataset"](
        file, config.block_size, num_sequences=windows
    )
    batch = {"batch_size": config.batch_size, "prefetch_batches": 2}
    return iter(dataset.iter_batches(**batch))


def measure(original: str | None, windows: int, folder: Path) -> tuple[float, int]:
    """Tokens/s, and the bytes by which memory has grown."""
    tutorial = common.load_notebook()
    config = trainkit.config.TrainingConfig(data_dir=str(folder))
    steps = windows // config.batch_size
    config = dataclasses.replace(config, max_steps=steps)
    common.start_ray("local", num_cpus=common.CORES)
    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False
    if original:
        batches = original_batches(original, config, windows)
    else:
        mesh = trainkit.sharding.make_mesh(config)
        batches = tutorial.read_batches(config, mesh, "train", range(steps))
    next(batches)
    memory, start = own_memory(), time.perf_counter()
    tokens = sum(config.batch_size * config.block_size for _ in batches)
    return tokens / (time.perf_counter() - start), own_memory() - memory


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--original", help="README.md of the original tutorial")
    original = parser.parse_args().original
    with tempfile.TemporaryDirectory(dir=".") as root:
        folder = Path(root).resolve()
        for split in ("train", "val"):
            (folder / f"{split}.bin").touch()
            os.truncate(folder / f"{split}.bin", 200_000_000)
        whose = [None, original] if original else [None]
        short = [(who, SHORT, folder) for who in whose]
        runs = [*zip(short, common.interleave(measure, short, 3))]
        long = (None, LONG, folder)
        runs += [(long, common.interleave(measure, [long], 1)[0])]
    table = []
    for (who, windows, _), found in runs:
        speed, growth = (median(values) for values in zip(*found))
        row = ["original" if who else "ours", f"{windows:,}", f"{speed / 1e6:.1f}"]
        table.append([*row, f"{growth / 1e6:.0f} MB"])
    columns = ["loader", "windows", "million tokens/s", "memory grown by"]
    common.print_table(columns, table, ["ray", "numpy"])


if __name__ == "__main__":
    main()
