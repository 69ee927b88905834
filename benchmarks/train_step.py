"""How fast the train step is, beside other people's.

    python benchmarks/train_step.py [configs/gpt2-124m.yaml] [--original ORIGINAL.md]

Trains GPT-2 124M with random tokens on the devices that JAX finds, with as many windows at
once as the configuration says; without one, 2 windows of 256 tokens in float32 on the CPU.
Beside it: the step of the tutorial that this one replaces, if `--original` names its Markdown,
and on a CPU, Hugging Face's GPT-2 in PyTorch with the same loss, optimizer, and batch. Each
row shows the median of the rounds, and a round the median step, without the first two. MFU,
model FLOPs utilization, is the share of the peak in the device's data sheet.
"""

import argparse
import dataclasses
import os
import re
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import common
import jax
import numpy as np
import optax
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec
from ray.train import ScalingConfig

from trainkit import launch, run_log
from trainkit.config import TrainingConfig
from trainkit.config_files import load_config

ON_CPU = TrainingConfig(compute_dtype="float32", block_size=256, device_batch_size=2)


def random_windows(config: TrainingConfig) -> np.ndarray:
    """A batch of random tokens, uint16 [B, T + 1]."""
    shape = (config.batch_size, config.block_size + 1)
    return np.random.default_rng(0).integers(0, config.vocab_size, shape, np.uint16)


def our_step(config: TrainingConfig) -> Callable:
    """The notebook's step, fed from the devices' memory."""
    tutorial = common.load_notebook()
    mesh = tutorial.create_mesh(config)
    jax.set_mesh(mesh)
    state = tutorial.first_state(config, tutorial.abstract_state(config, mesh))
    batch = NamedSharding(mesh, PartitionSpec(("data", "fsdp")))
    windows = jax.device_put(random_windows(config), batch)

    def step():
        nonlocal state
        state, _ = tutorial.train_step(state, windows, config)
        jax.block_until_ready(state)

    return step


def original_step(config: TrainingConfig, path: str) -> Callable:
    """The original's step in GPT-2's size, its default; its dropout is 0.1."""
    nnx.use_eager_sharding(False)  # its annotations need a mesh otherwise
    names = {"os": os, "np": np}
    parts = "import flax.nnx|class (TrainingConfig|GPT2)|def train_step"
    for block in re.findall(r"```python\n(.*?)```", Path(path).read_text(), re.DOTALL):
        if re.search(parts, block):
            exec(block, names)
    names["dtype"] = jax.numpy.dtype(config.compute_dtype)
    settings = names["TrainingConfig"](seqlen=config.block_size)
    model = names["create_model"](rngs=nnx.Rngs(params=0, dropout=1), config=settings)
    rate = optax.cosine_decay_schedule(settings.init_learning_rate, settings.max_steps)
    adamw = optax.adamw(rate, weight_decay=settings.weight_decay)
    optimizer = nnx.Optimizer(model, adamw, wrt=nnx.Param)
    metrics = nnx.metrics.Average("loss")
    windows = random_windows(config).astype("int32")
    batch = jax.device_put((windows[:, :-1], windows[:, 1:]))

    def step():
        loss = names["train_step"](model, optimizer, metrics, batch)
        jax.block_until_ready((loss, nnx.state(model)))

    return step


def pytorch_step(config: TrainingConfig, compiled: bool) -> Callable:
    """Hugging Face's GPT-2 with the notebook's loss and optimizer, in float32 on the CPU."""
    import torch
    import transformers

    settings = transformers.GPT2Config(  # its defaults are GPT-2 124M's
        n_positions=config.block_size, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0
    )
    model = transformers.GPT2LMHeadModel(settings).train()
    betas, decay = (config.beta1, config.beta2), config.weight_decay
    optimizer = torch.optim.AdamW(
        model.parameters(), config.learning_rate, betas, weight_decay=decay, fused=True
    )
    windows = torch.from_numpy(random_windows(config).astype(np.int64))
    forward = torch.compile(model) if compiled else model

    def step():
        logits = forward(windows[:, :-1], use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), windows[:, 1:].flatten()
        )
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.grad_clip)
        optimizer.step()
        optimizer.zero_grad()

    return step


def measure(path: str | None, steps: int, make_step: Callable, *arguments) -> tuple:
    """Tokens/s, MFU or 0 where it has no meaning, and the devices' name."""
    config = load_config(path, "storage") if path else ON_CPU
    count = jax.device_count() if make_step is our_step else 1
    config = dataclasses.replace(config, batch_size=count * config.device_batch_size)
    step = make_step(config, *arguments)
    times = [time.perf_counter()]
    for _ in range(steps):
        step()
        times.append(time.perf_counter())
    speed = config.batch_size * config.block_size / np.median(np.diff(times)[2:])
    kind = jax.devices()[0].device_kind
    tutorial = common.load_notebook()
    model = jax.eval_shape(lambda: tutorial.create_model(config))
    arrays = {f"model.{name}": x for name, x in tutorial.named(model).items()}
    flops = run_log.flops_per_token(config, arrays)
    mfu = speed * flops / (run_log.peak_flops(kind) or np.inf) / count
    return float(speed), mfu, f"{count} x {kind}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("config", nargs="?")
    parser.add_argument("--original", help="the original tutorial's Markdown")
    parser.add_argument("--rounds", type=int, default=2)
    options = parser.parse_args()
    rows = {"ours": (our_step,)}
    if options.original:
        rows["the original tutorial"] = original_step, options.original
    if options.config:  # each process starts with a worker's environment
        config = load_config(options.config, "storage")
        scaling = ScalingConfig(**config.scaling)
        for name, value in launch.environment(config, scaling).items():
            os.environ[name] = os.path.expandvars(value)
    else:
        os.environ["JAX_PLATFORMS"] = "cpu"
        os.environ["TORCHINDUCTOR_FORCE_DISABLE_CACHES"] = "1"  # compile in each round
        rows["Hugging Face in PyTorch, eager"] = pytorch_step, False
        rows["Hugging Face in PyTorch, compiled"] = pytorch_step, True
    steps = 40 if options.config else 6
    calls = [(options.config, steps, *row) for row in rows.values()]
    table = []
    ours = None
    for name, runs in zip(rows, common.interleave(measure, calls, options.rounds)):
        speed, mfu = (median(run[i] for run in runs) for i in (0, 1))
        ours = ours or speed
        share = f"{mfu:.1%}" if mfu else "-"
        table.append([name, runs[0][2], f"{speed:,.0f}", f"{speed / ours:.2f}", share])
    columns = ["step", "device", "tokens/s", "ratio to ours", "MFU"]
    others = [] if options.config else ["torch", "transformers"]
    common.print_table(columns, table, ["jax", "flax", *others])


if __name__ == "__main__":
    main()
