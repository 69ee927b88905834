"""What the notebook README.ipynb doesn't need to show.

paths              that mean the same on all machines; folders that are whole or not there
config             what decides a run: TrainingConfig
tokenization       tiktoken's and Hugging Face's tokenizers, by name
documents          the texts: datasets' functions, and what Ray Data reads of theirs
corpus             documents into token files
token_files        train.bin and val.bin, and the order of their windows
huggingface        published weights in, the trained model out
s3                 checkpoints in s3://, which Orbax can't write
checkpoint_reader  what `save` has written: found, compared, and loaded
config_files       a configuration from a YAML file, with what that leaves to others
ops                the grid of devices, attention's kernels, the loss in parts, scanned blocks
accumulation       the mean of a loss or its gradients over a batch in micro-batches
recipe             what a run goes on with must be what it was
run_lock           one launch at a time, and none once a run has diverged
dry_run            the model and its loss, traced as on so many devices
launch             before workers start: what would fail on them, and what they get
workers            how each worker starts
run_log            metrics.jsonl, progress, divergence, a watchdog
generate           text from a model
"""

import atexit
import gc
import os
import sys

_NOT_SHOWN = (  # what Ray and JAX say of each start, and a notebook needn't show
    "Initialized JAX",
    "JAX detected",
    "JAX distributed service",
    "PreemptionWatcher",
    "Reporting training result",
    "preemption_sync",
    r"\[Gloo\] Rank",
    r"worker \d+ of \d+: process",
)


def set_up_driver() -> None:
    """Prepare this process, before JAX and Ray are imported, to start or join a cluster.

    Raises:
        RuntimeError: JAX was imported before, and may have claimed this machine's devices.
    """
    if "jax" in sys.modules and os.environ.get("JAX_PLATFORMS") != "cpu":
        raise RuntimeError("jax is imported already: restart the kernel, run all cells")
    os.environ["JAX_PLATFORMS"] = "cpu"  # JAX claims every device that it sees
    os.environ.pop("JAX_PLATFORM_NAME", None)  # which would be another one
    os.environ["RAY_TRAIN_ENABLE_PRINT_PATCH"] = "0"  # or each line appears twice
    # Calls between workers don't go through an HTTP proxy.
    os.environ.setdefault("grpc_proxy", "")
    # Under `uv run`, Ray would start each worker with uv, in an environment without Ray.
    os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
    # "" shows all.
    os.environ.setdefault("RAY_DEDUP_LOGS_SKIP_REGEX", "|".join(_NOT_SHOWN))
    os.environ["RAY_DATA_LOG_LEVEL"] = "WARNING"
    atexit.register(_close_bars)


def _close_bars() -> None:
    """Close those of killed workers, or Python 3.13 crashes (tqdm issue 1687)."""
    if "tqdm" not in sys.modules:
        return
    for each in gc.get_objects():
        if issubclass(type(each), sys.modules["tqdm"].tqdm):
            each.close()
