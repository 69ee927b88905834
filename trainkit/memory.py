"""What a step needs of a device's memory, by counting, and what to do when it runs out."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import ray.train

from trainkit import lease
from trainkit.config import TrainingConfig

# Arrays [B, T, D] that a block keeps for the backward pass:
WHOLE = 4  # its input, two norms' outputs, and the sum after attention
DIVIDED = 8  # by tensor: q, k, v, what attention gives, and four for what enters GELU


def parameters(config: TrainingConfig) -> int:
    """The numbers of a GPT-2, with the rows that pad its vocabulary."""
    L, D = config.n_layer, config.n_embd
    block = 12 * D**2 + 13 * D
    return (config.padded_vocab_size + config.block_size) * D + L * block + 2 * D


def count(config: TrainingConfig) -> dict[str, int]:
    """The bytes that a step needs on each device, less what XLA adds for itself.

    Kernels that keep no scores (cuDNN's, Splash) are counted as doing so; with
    `attention: xla`, a block keeps the scores of all pairs of tokens. Scanned blocks have
    their weights stacked, and the gradients of the stack.
    """
    L, D, T = config.n_layer, config.n_embd, config.block_size
    width = 4 if config.compute_dtype == "float32" else 2  # bytes of an activation
    _, fsdp, tensor = config.mesh_shape(config.worker_range[1])
    windows = config.device_windows // config.micro_batches
    token = windows * T * width  # of one number for each token
    block = (WHOLE + DIVIDED / tensor) * token * D
    if config.attention == "xla":
        block += 3 * config.n_head * T * token / tensor  # scores, masked, and softmax
    blocks = L * token * D + block if config.scan_layers else L * block
    weights = parameters(config)
    state = 12 * weights // (fsdp * tensor)  # float32: weights, and Adam's two moments
    logits = 2 * token * config.padded_vocab_size // config.loss_chunks
    return {
        "state": state,
        # In float32, and the weights to compute with.
        "gradients": (4 + (3 if config.scan_layers else 1) * width) * weights // tensor,
        "activations": round(blocks),
        "logits": logits // tensor,
    }


def first_line(config: TrainingConfig, state: Any) -> str:
    """How a batch is divided, and what each device holds of it and of `state`."""
    shards = [x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(state)]
    parts, windows = config.micro_batches, config.device_windows
    batch = windows * (config.block_size + 1) * 2  # uint16
    return (
        f"{config.batch_size * config.block_size:,} tokens a step | on each of "
        f"{jax.device_count()} devices: {windows} windows as {parts} x {windows // parts}, "
        f"state {size(sum(shards))}, batch {size(batch)}"
    )


def advice(config: TrainingConfig) -> str:
    """Up to three keys that save memory, the cheapest first, and what each saves.

    What saves less than a twentieth isn't worth a line.
    """
    needs = sum(count(config).values())
    changes = [
        {"attention": {"gpu": "cudnn", "tpu": "splash"}.get(config.platform, "xla")},
        {"device_batch_size": config.device_windows // config.micro_batches // 2},
        {"loss_chunks": 2 * config.loss_chunks},
        {"fsdp": config.mesh_shape(config.worker_range[1])[0] * config.fsdp},
        {"scan_layers": True},
    ]
    lines = []
    for change in changes:
        ((key, value),) = change.items()
        try:
            other = dataclasses.replace(config, **change)
        except ValueError:  # such as half a window, or a kernel that can't do this
            continue
        if (saved := needs - sum(count(other).values())) > needs / 20:
            lines.append(f"  {key}: {str(value).lower()} saves about {size(saved)}")
    parts = ", ".join(f"{name} {size(n)}" for name, n in count(config).items())
    lines = lines[:3] or [
        "  fsdp or tensor_parallel divide the model over more devices"
    ]
    return "\n".join(
        [
            f"A device has too little memory for this step, which needs, by counting: {parts}. "
            "What helps, at the least cost of speed first; the run then goes on where it was:",
            *lines,
        ]
    )


def size(n: float) -> str:
    """A number of bytes for people, such as 1.4 GiB."""
    units = ["B", "KiB", "MiB", "GiB", "TiB"]
    while n >= 999.5 and len(units) > 1:  # or it would be 1e+03
        n, units = n / 1024, units[1:]
    return f"{n:.3g} {units[0]}"


def explained(loop: Callable[[dict], None]) -> Callable[[dict], None]:
    """`loop`, with an error that says what to do when a device's memory runs out.

    It holds the run's lease meanwhile.
    """

    @functools.wraps(loop)
    def explained_loop(settings: dict) -> None:
        try:
            with lease.held(TrainingConfig(**settings)):
                loop(settings)
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            workers = ray.train.get_context().get_world_size()
            config = TrainingConfig(**settings | {"num_workers": workers})
            print(advice(config))  # now: Ray keeps the error until its last attempt
            raise MemoryError(advice(config)) from error

    return explained_loop
