"""Tokens and tokenizers to try things with, and a few steps of training in this process."""

from pathlib import Path

import numpy as np
import tokenizers

END = "<|endoftext|>"


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


def byte_pairs(path: Path, texts: list[str], size: int = 300) -> tokenizers.Tokenizer:
    """A tokenizer of byte pairs that is trained here; its first token ends a text."""
    found = tokenizers.Tokenizer(tokenizers.models.BPE())
    found.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    found.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=[END],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    found.train_from_iterator(texts * 20, trainer)
    path.parent.mkdir(parents=True, exist_ok=True)
    found.save(str(path))
    return found
