"""The tools that the notebook README.ipynb calls; each module does what its name says.

checks       which configurations are refused, and why
pretrained   where published weights lie, and which shape they have
config       what decides a run: TrainingConfig, load_config
corpus       documents: from the hub, from files, or built in
tokens       train.bin and val.bin, and the order of their windows
devices      the mesh of all devices, and batches on it
memory       what a step needs of it, and what to do when it runs out
layers       attention kernels, scanned blocks
loss         logits and cross-entropy, in parts
storage      storage that fails for a moment
records      which checkpoints a run has, and whether it may go on
checkpoints  save, restore, refuse
watch        shared storage, divergence, the watchdog
workers      resources, environment, the right GPUs, joining
run_log      metrics.jsonl, TensorBoard, MFU, profile
generate     text, with a cache
weights      published weights in, under Hugging Face's names
huggingface  the trained model out

Imports point one way, from the lower modules of this list to the upper ones. Nothing here
imports the notebook: what needs the model takes it as an argument.
"""

import sys

if " " in sys.executable:
    raise ImportError(
        "Ray can't start workers with a Python whose path holds a space, found "
        f"{sys.executable!r}. Move it, or the folder with its virtual environment."
    )
if sys.platform not in ("linux", "darwin"):
    raise ImportError(
        f"trainkit runs on Linux and macOS, found {sys.platform!r}. On Windows, use WSL 2."
    )
