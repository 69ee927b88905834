"""Tokens to try things with, and a few steps of training in this process."""

import numpy as np


def random_tokens(config, shape, seed=0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, config.vocab_size, shape)


def windows_for(config, steps, seed=1) -> np.ndarray:
    """uint16 [steps, B, T + 1]; each token tends to follow its predecessor."""
    rng = np.random.default_rng(seed)
    shape = (steps, config.batch_size, config.block_size + 1)
    walk = np.cumsum(rng.choice([1, 2, 3], size=shape, p=[0.8, 0.1, 0.1]), axis=-1)
    return (walk % config.vocab_size).astype(np.uint16)


def run(tutorial, config, batches):
    """The state after the steps on `batches`, and their losses."""
    state, losses = tutorial.create_state(config), []
    for windows in batches:
        state, metrics = tutorial.train_step(state, windows, config)
        losses.append(float(metrics["loss"]))
    return state, losses
