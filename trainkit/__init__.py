"""What the notebook README.ipynb doesn't need to show.

tokenizers    tiktoken's and Hugging Face's, by name
config        what decides a run: TrainingConfig, load_config
token_files   train.bin and val.bin, and the order of their windows
huggingface   published weights in, the trained model out
corpus        documents into token files
layers        attention's kernels, the loss in parts, scanned blocks
runs          what a launch continues, one at a time
buckets       checkpoints in a bucket
checkpoints   the model in a checkpoint
workers       what would fail, environment, how each starts
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
    os.environ.pop("JAX_PLATFORM_NAME", None)  # which would be another one
    os.environ["RAY_TRAIN_ENABLE_PRINT_PATCH"] = "0"  # or each line appears twice
    # Calls between workers don't go through an HTTP proxy.
    os.environ.setdefault("grpc_proxy", "")
    # Under `uv run`, Ray would start each worker with uv, in an environment without Ray.
    os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
    # What Ray and JAX say of each start, and a notebook needn't show; "" shows all.
    by_jax = r"JAX distributed service|JAX detected|Initialized JAX|\[Gloo\] R|preemption_sync"
    by_ray = "Reporting t|PreemptionWatcher"
    os.environ.setdefault("RAY_DEDUP_LOGS_SKIP_REGEX", f"{by_jax}|{by_ray}")
    os.environ["RAY_DATA_LOG_LEVEL"] = "WARNING"
