"""What the notebook README.ipynb doesn't need to show.

tokenizers    tiktoken's and Hugging Face's, by name
config        what decides a run: TrainingConfig, load_config
token_files   train.bin and val.bin, and the order of their windows
huggingface   published weights in, the trained model out
corpus        documents into token files
layers        attention's kernels, the loss in parts, scanned blocks
checkpoints   one launch at a time, the recipe's check, and buckets
workers       environment, the right GPUs, how each starts
sources       the source of the notebook's functions, which names a run
run_log       metrics.jsonl, progress, divergence, a watchdog
generate      text from a model
"""

import os
import sys


def set_up_driver() -> None:
    """Prepare this process, before JAX and Ray are imported, to start or join a cluster.

    Raises:
        RuntimeError: JAX was imported before, and may have claimed this machine's devices.
    """
    if "jax" in sys.modules and os.environ.get("JAX_PLATFORMS") != "cpu":
        raise RuntimeError("jax is imported already: restart the kernel, run all cells")
    os.environ["JAX_PLATFORMS"] = "cpu"  # JAX claims every device that it sees
    # Calls between workers don't go through an HTTP proxy.
    os.environ.setdefault("grpc_proxy", "")
    # Under `uv run`, Ray would start each worker with uv, in an environment without Ray.
    os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
    # What Ray and JAX say of each start, and a notebook needn't show; "" shows all.
    by_jax = r"JAX distributed service|JAX detected|Initialized JAX|\[Gloo\] R|preemption_sync"
    by_ray = "Requesting resources|Attempting to start|Reporting t|PreemptionWatcher"
    os.environ.setdefault("RAY_DEDUP_LOGS_SKIP_REGEX", f"{by_jax}|{by_ray}")
    os.environ["RAY_DATA_LOG_LEVEL"] = "WARNING"
    os.environ["RAY_TRAIN_ENABLE_PRINT_PATCH"] = "0"  # or each line appears twice
    os.environ["RAY_TRAIN_HEALTH_CHECK_INTERVAL_S"] = "0.5"  # to notice a dead worker
