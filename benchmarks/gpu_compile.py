"""Compile the notebook's train step for NVIDIA GPUs, without a GPU.

    pip install -r requirements-gpu.txt
    python benchmarks/gpu_compile.py configs/gpt2-124m.yaml [--gpu h200] [--gpus 8]
        [--json] [key=value ...]

XLA compiles for a GPU that it only knows by description; gpus/ has some. Prints what the
program needs on each GPU: memory, kernels, communication, and the bytes that it reads and
writes. Nothing runs. Without a GPU nothing is tuned, so a program says nothing about speed
beyond what it moves. Without `--gpus`, the configuration says how many. The flags of the
compiler are those that a worker sets (trainkit/workers.py), and then those of XLA_FLAGS, such
as --xla_dump_to=FOLDER, which keeps the program.
"""

import argparse
import importlib.metadata
import importlib.util
import json
import os
import sys
from pathlib import Path

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["CUDA_VISIBLE_DEVICES"] = "-1"
os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"  # which looks for a driver

if not any(map(importlib.util.find_spec, ("jax_cuda12_plugin", "jax_cuda13_plugin"))):
    version = importlib.metadata.version("jax")
    sys.exit(
        f"JAX's CUDA plugin brings the compiler: pip install 'jax[cuda12]=={version}'"
    )

import common
import jax
import program
from jax.experimental import topologies

import trainkit.config
import trainkit.sharding
import trainkit.workers

GPUS = Path(__file__).resolve().parent / "gpus"


def virtual_gpus(name: str, count: int) -> list:
    """`count` GPUs of one machine that exist by their description only."""
    return topologies.get_topology_desc(
        platform="cuda",
        target_config=(GPUS / f"{name}.txtpb").read_text(),
        topology=f"{max(1, count // 8)}x{min(count, 8)}x1",  # nodes of eight
    ).devices


def describe(text: str) -> dict:
    """What there is to read off a compiled program."""
    parsed = program.parse(text)
    kinds = program.bytes_by_kind(parsed)
    return {
        "moved_gb": round(sum(kinds.values()) / 1e9, 1),
        "moved_gb_by_kind": {k: round(n / 1e9, 1) for k, n in kinds.items()},
        "attention_kernels": text.count('custom_call_target="__cudnn$fmha'),
        "collectives": program.collectives(parsed),
        "scatters": program.scatters(parsed),
        "copies_gb": {
            shapes: round(n / 1e9, 2)
            for shapes, n in program.copies(parsed).items()
            if n >= 5e7
        },
        "largest": program.largest(parsed),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("config")
    parser.add_argument("changes", nargs="*", help="key=value, on top of the file")
    names = sorted(path.stem for path in GPUS.glob("*.txtpb"))
    parser.add_argument("--gpu", default="h200", choices=names)
    parser.add_argument("--gpus", type=int, help="one for each worker")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_intermixed_args()
    tutorial = common.load_notebook()
    changes = common.parse_changes(arguments.changes)
    if arguments.gpus:
        changes |= {"num_workers": arguments.gpus, "devices_per_worker": 1}
    config = trainkit.config.load_config(arguments.config, **changes)
    if config.platform != "gpu":
        sys.exit(
            f"platform: {arguments.config} has {config.platform!r}, expected 'gpu'. Add "
            "platform=gpu attention=cudnn topology=null accelerator_type=null"
        )
    settings = trainkit.workers.environment(config)
    os.environ["XLA_FLAGS"] = settings["XLA_FLAGS"]
    jax.config.update("jax_optimization_level", settings["JAX_OPTIMIZATION_LEVEL"])
    count = config.worker_range[1] * config.devices_per_worker
    mesh = trainkit.sharding.make_mesh(config, virtual_gpus(arguments.gpu, count))
    compiled, *seconds = common.compile_step(tutorial, config, mesh)
    report = {
        "config": Path(arguments.config).stem,
        "gpus": f"{count} x {arguments.gpu}",
        **common.describe_program(tutorial, config, compiled, *seconds),
        **describe(compiled.as_text()),
    }
    print(json.dumps(report, indent=None if arguments.json else 1))


if __name__ == "__main__":
    main()
