"""Compile the notebook's train step for a TPU slice, without a TPU.

    python benchmarks/tpu_compile.py configs/gpt2-124m-tpu-v6e.yaml [--slices 2]
        [--json] [key=value ...]

libtpu brings the TPU compiler; `pip install libtpu` and any machine will do. Prints what
the program needs on each chip: memory, arithmetic, communication, and the time to compile.
"""

import argparse
import collections
import dataclasses
import json
import os
from pathlib import Path

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["TPU_SKIP_MDS_QUERY"] = "1"  # there is no metadata server to ask
os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
os.environ["ALLOW_MULTIPLE_LIBTPU_LOAD"] = "1"  # others may compile at the same time

import common
from jax.experimental import topologies
from program import collectives, parse

import trainkit.config
import trainkit.sharding


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("config")
    parser.add_argument("changes", nargs="*", help="key=value, on top of the file")
    parser.add_argument("--slices", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_intermixed_args()
    tutorial = common.load_notebook()
    changes = common.parse_changes(arguments.changes)
    config = trainkit.config.load_config(arguments.config, **changes)
    workers = config.worker_range[1] * arguments.slices
    config = dataclasses.replace(config, num_workers=workers)
    generation = config.accelerator_type.removeprefix("TPU-").lower()
    topology = topologies.get_topology_desc(
        platform="tpu",
        topology_name=f"{generation}:{config.topology}",
        num_slices=arguments.slices,
    )
    mesh = trainkit.sharding.make_mesh(config, topology.devices)
    compiled, *seconds = common.compile_step(tutorial, config, mesh)
    text = compiled.as_text()
    report = {
        "config": Path(arguments.config).stem,
        "devices": len(topology.devices),
        **common.describe_program(tutorial, config, compiled, *seconds),
        "tflops": round(compiled.cost_analysis()["flops"] / 1e12, 2),
        "collectives": collections.Counter(c["kind"] for c in collectives(parse(text))),
        "kernels": text.count("tpu_custom_call"),
    }
    print(json.dumps(report, indent=None if arguments.json else 1))


if __name__ == "__main__":
    main()
