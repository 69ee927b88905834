"""How fast the train step is, in variants, and beside other people's.

    python benchmarks/train_step.py [cpu | gpu | tpu] [--original README.md] [--rounds 2]

Trains GPT-2 124M on one device with random tokens: the notebook's step with changes of its
configuration; the step of the tutorial that this one replaces, if `--original` names its
README.md; and Hugging Face's GPT-2 in PyTorch with the same loss, optimizer, and batch.
Every row has a process of its own in each round, and shows the median of the rounds. Speed
is that of the median step, without the first two; the time to compile is what the first step
takes longer. Peak memory is the device's, and on CPU the whole process's.
"""

import argparse
import os
import re
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import numpy as np
from common import (
    ROOT,
    for_one_device,
    interleave,
    load_notebook,
    memory_of,
    print_table,
    random_windows,
)
from notebook_module import initial_state

import trainkit.config
import trainkit.sharding

CPU = {
    "platform": "cpu",
    "compute_dtype": "float32",
    "block_size": 256,
    "batch_size": 2,
}
CONFIGS = {"gpu": "gpt2-124m.yaml", "tpu": "gpt2-124m-tpu-v6e.yaml"}
VARIANTS = [  # changes of the configuration; those that it already has are left out
    {"attention": "xla"},
    {"scan_layers": True},
    {"loss_chunks": 1},
    {"loss_chunks": 8},
    {"micro_batches": 2},  # of a batch that is twice as large
]
STEPS = {"cpu": 6, "gpu": 40, "tpu": 40}  # in each process


def make_config(platform: str, changes: dict):
    """The platform's configuration with `changes`, cut to what one device does at once."""
    if platform == "cpu":
        config = trainkit.config.TrainingConfig(**CPU)
    else:
        config = trainkit.config.load_config(ROOT / "configs" / CONFIGS[platform])
    return for_one_device(config, changes)


def variants(platform: str) -> list[dict]:
    """Those of VARIANTS that change the configuration."""
    config = make_config(platform, {})
    return [v for v in VARIANTS if all(getattr(config, k) != x for k, x in v.items())]


def our_step(tutorial, config) -> Callable:
    """The notebook's step, fed from the device's memory."""
    import jax

    mesh = trainkit.sharding.make_mesh(config, jax.devices()[:1])
    jax.set_mesh(mesh)
    state = initial_state(tutorial, config, mesh)
    windows = jax.device_put(random_windows(config))

    def step():
        nonlocal state
        state, _ = tutorial.train_step(state, windows, config)
        jax.block_until_ready(state)

    return step


def original_step(tutorial, config, path: str) -> Callable:
    """The original's step in GPT-2's size, its default; its dropout is 0.1."""
    import jax
    import optax
    from flax import nnx

    nnx.use_eager_sharding(False)  # its annotations need a mesh otherwise
    names = {"os": os, "np": np}
    for block in re.findall(r"```python\n(.*?)```", Path(path).read_text(), re.DOTALL):
        if re.search(
            "import flax.nnx|class (TrainingConfig|GPT2)|def train_step", block
        ):
            exec(block, names)
    names["dtype"] = jax.numpy.dtype(config.compute_dtype)
    settings = names["TrainingConfig"](seqlen=config.block_size)
    model = names["create_model"](rngs=nnx.Rngs(params=0, dropout=1), config=settings)
    rate = optax.cosine_decay_schedule(settings.init_learning_rate, settings.max_steps)
    adamw = optax.adamw(rate, weight_decay=settings.weight_decay)
    optimizer = nnx.Optimizer(model, adamw, wrt=nnx.Param)
    metrics, windows = nnx.metrics.Average("loss"), random_windows(config)
    batch = jax.device_put(
        (windows[:, :-1].astype("int32"), windows[:, 1:].astype("int32"))
    )

    def step():
        loss = names["train_step"](model, optimizer, metrics, batch)
        jax.block_until_ready((loss, nnx.state(model)))

    return step


def pytorch_step(tutorial, config, compiled: bool) -> Callable:
    """Hugging Face's GPT-2 with the notebook's loss and optimizer, in PyTorch."""
    import torch
    import transformers

    import trainkit.huggingface

    device = "cuda" if config.platform == "gpu" else "cpu"
    settings = trainkit.huggingface.their_config(config)
    model = transformers.GPT2LMHeadModel(settings).to(device).train()
    optimizer = torch.optim.AdamW(
        model.parameters(),
        config.learning_rate,
        (config.beta1, config.beta2),
        weight_decay=config.weight_decay,
        fused=True,
    )
    windows = torch.from_numpy(random_windows(config).astype(np.int64)).to(device)
    bfloat16 = config.compute_dtype == "bfloat16"
    forward = torch.compile(model) if compiled else model

    def step():
        with torch.autocast(device, torch.bfloat16, enabled=bfloat16):
            logits = forward(windows[:, :-1], use_cache=False).logits
        losses = torch.nn.functional.cross_entropy(
            logits.float().flatten(0, 1), windows[:, 1:].flatten()
        )
        losses.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.grad_clip)
        optimizer.step()
        optimizer.zero_grad()
        if device == "cuda":
            torch.cuda.synchronize()

    return step


def measure(platform: str, make_step: Callable, changes: dict, *arguments):
    """Tokens/s, bytes of memory, and seconds to compile; or why they can't be measured."""
    tutorial = load_notebook()
    try:
        config = make_config(platform, changes)
        step = make_step(tutorial, config, *arguments)
        times = [time.perf_counter()]
        for _ in range(STEPS[platform]):
            step()
            times.append(time.perf_counter())
        if make_step is pytorch_step and platform == "gpu":
            import torch

            memory = torch.cuda.max_memory_allocated()
        else:
            import jax

            memory, _ = memory_of(jax.devices()[0])
    except Exception as error:  # an absent package, or too little memory
        return f"not measured: {str(error).splitlines()[0]:.80}"
    seconds = np.diff(times)
    step_s = np.median(seconds[2:])
    speed = config.batch_size * config.block_size / step_s
    return speed, memory, seconds[0] - step_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("platform", nargs="?", default="cpu", choices=list(STEPS))
    parser.add_argument("--original", help="README.md of the original tutorial")
    parser.add_argument("--rounds", type=int, default=2)
    platform, original, rounds = vars(parser.parse_args()).values()
    os.environ["JAX_PLATFORMS"] = {"gpu": "cuda"}.get(platform, platform)
    os.environ["TORCHINDUCTOR_FORCE_DISABLE_CACHES"] = "1"  # compile in every round
    rows = {"ours": (our_step, {})}
    for changes in variants(platform):
        ((key, value),) = changes.items()
        rows[f"ours, {key}: {value}"] = our_step, changes
    if original:
        rows["the original tutorial"] = original_step, {}, original
    if platform != "tpu":
        rows["Hugging Face in PyTorch, eager"] = pytorch_step, {}, False
        rows["Hugging Face in PyTorch, compiled"] = pytorch_step, {}, True
    table, ours = [], None
    runs = interleave(measure, [(platform, *row) for row in rows.values()], rounds)
    for name, found in zip(rows, runs):
        if errors := [run for run in found if isinstance(run, str)]:
            table.append([name, errors[0], *"---"])
            continue
        speed, memory, compile_s = (median(values) for values in zip(*found))
        ours = speed if name == "ours" else ours
        row = [name, f"{speed:,.0f}", f"{speed / ours:.2f}" if ours else "-"]
        table.append([*row, f"{memory / 2**30:.1f} GiB", f"{compile_s:.0f} s"])
    header = "step|tokens/s|ratio to ours|peak memory|time to compile"
    print_table(header.split("|"), table, ["jax", "flax", "torch", "transformers"])


if __name__ == "__main__":
    main()
