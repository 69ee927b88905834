"""Compile the notebook's train step for a TPU slice, without a TPU.

    python benchmarks/tpu_compile.py configs/gpt2-124m-tpu-v6e.yaml [--slices 2]
        [--json] [--original README.md] [key=value ...]

libtpu brings the TPU compiler; `pip install libtpu` and any machine will do. Prints what
the program needs on each chip: memory, arithmetic, communication, and the time to compile.
`--original` names the README.md of the tutorial that this one replaces: its step is compiled
instead, for the same chips and as many windows.
"""

import argparse
import dataclasses
import json
import os
from functools import partial
from pathlib import Path

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["TPU_SKIP_MDS_QUERY"] = "1"  # there is no metadata server to ask
os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")

import jax
import jax.numpy as jnp
from common import (
    compile_step,
    load_notebook,
    original_training,
    parse_changes,
    timed_compile,
)
from jax.experimental import topologies
from program import count_collectives, parse

import trainkit.config
import trainkit.devices
import trainkit.states


def compile_original(path: str, config, mesh):
    """The same of the original's step, which divides a batch over all chips."""
    from flax import nnx

    create, train_step = original_training(path, config)
    graph, state = jax.eval_shape(lambda: nnx.split(create()))

    def step(state, batch):
        parts = nnx.merge(graph, state)
        loss = train_step.__wrapped__(*parts, batch)
        return nnx.state(parts), loss

    everywhere = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    divided = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    tokens = jax.ShapeDtypeStruct((config.batch_size, config.block_size), jnp.int32)
    jitted = jax.jit(step, in_shardings=(everywhere, divided), donate_argnums=0)
    return timed_compile(jitted, state, (tokens, tokens))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("config")
    parser.add_argument("changes", nargs="*", help="key=value, on top of the file")
    parser.add_argument("--slices", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--original", help="README.md of the original tutorial")
    arguments = parser.parse_intermixed_args()
    tutorial = load_notebook()
    changes = parse_changes(arguments.changes)
    config = trainkit.config.load_config(arguments.config, **changes)
    workers = config.worker_range[1] * arguments.slices
    config = dataclasses.replace(config, num_workers=workers)
    generation = config.accelerator_type.removeprefix("TPU-").lower()
    topology = topologies.get_topology_desc(
        platform="tpu",
        topology_name=f"{generation}:{config.topology}",
        num_slices=arguments.slices,
    )
    mesh = trainkit.devices.make_mesh(config, topology.devices)
    if arguments.original:
        compiling = compile_original(arguments.original, config, mesh)
    else:
        compiling = compile_step(tutorial, config, mesh)
    compiled, trace_s, compile_s = compiling
    memory, text = compiled.memory_analysis(), compiled.as_text()
    gib = partial(round, ndigits=2)
    arguments_gib = memory.argument_size_in_bytes / 2**30
    temporary_gib = memory.temp_size_in_bytes / 2**30
    report = {
        "config": Path(arguments.config).stem,
        "devices": len(topology.devices),
        "parameters": trainkit.states.count_parameters(tutorial.create_model, config),
        "windows_per_device_step": config.device_windows // config.micro_batches,
        "arguments_gib": gib(arguments_gib),
        "temporary_gib": gib(temporary_gib),
        "total_gib": gib(arguments_gib + temporary_gib),  # results take their place
        "tflops": gib(compiled.cost_analysis()["flops"] / 1e12),
        "collectives": count_collectives(parse(text)),
        "kernels": text.count("tpu_custom_call"),
        "trace_s": round(trace_s, 1),
        "compile_s": round(compile_s, 1),
    }
    if arguments.json:
        print(json.dumps(report))
    else:
        for key, value in report.items():
            print(f"{key:24} {value}")


if __name__ == "__main__":
    main()
