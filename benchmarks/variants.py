"""Other ways to write parts of the notebook's train step, to measure beside its own.

Each function changes the notebook's module, or a module of trainkit that it calls, before
anything is compiled.
"""

import dataclasses

import jax
import jax.numpy as jnp
import optax
from flax import nnx

import trainkit.config
import trainkit.devices
import trainkit.gradients
import trainkit.layers


def without_donation(tutorial) -> None:
    """The old and the new state exist at once."""
    step = tutorial.train_step.__wrapped__
    tutorial.train_step = jax.jit(step, static_argnames="config")


def vocabulary_not_padded(tutorial) -> None:
    """50,257 rows in the embedding table, a number that is no multiple of 128."""
    trainkit.config.TrainingConfig.padded_vocab_size = property(
        lambda self: self.vocab_size
    )


def loss_differentiated_by_jax(tutorial) -> None:
    """The backward pass gets the loss's gradients from what the forward pass kept.

    Of one chunk that is its logits. With more, nothing is kept, and the backward pass
    computes the logits again.
    """

    def cross_entropy(table, features, targets, vocab_size, chunks=1):
        def mean(chunk):
            features, targets = chunk
            logits = features @ table[:vocab_size].T.astype(features.dtype)
            return optax.softmax_cross_entropy_with_integer_labels(
                logits.astype(jnp.float32), targets
            ).mean()

        if chunks == 1:
            return mean((features, targets))

        def split(x):
            return jnp.stack(jnp.split(x, chunks, axis=1))

        return jax.lax.map(
            jax.checkpoint(mean), (split(features), split(targets))
        ).mean()

    trainkit.layers.cross_entropy = cross_entropy


def recomputed(tutorial) -> None:
    """Each block keeps its input only, as `scan_layers` does, without the loop."""

    def run_blocks(blocks, x, rngs, caches=None, scan=False):
        for block in blocks:
            graph, state = nnx.split(block)

            @jax.checkpoint
            def run(x, state, graph=graph):
                return nnx.merge(graph, state)(x, rngs=rngs)

            x = run(x, state)
        return x

    trainkit.layers.run_blocks = run_blocks


def fetched_before_the_step(tutorial) -> None:
    """With `fsdp` and `scan_layers`, all parameters are fetched before the step."""
    fetch = trainkit.gradients.fetch

    def fetch_all(parts, specs, config):
        return fetch(parts, specs, dataclasses.replace(config, scan_layers=False))

    trainkit.gradients.fetch = fetch_all
