"""Other ways to write parts of the notebook's train step, to measure beside its own.

Each function changes the notebook's module, or a module of trainkit that it calls, before
anything is compiled.
"""

from functools import partial

import jax
import jax.numpy as jnp
import optax
from flax import nnx

import trainkit.config
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


def one_product_for_qkv(tutorial) -> None:
    """One product of a wider matrix for query, key, and value, and then cut it."""

    def project(linear, x, n_head):
        B, T, _ = x.shape
        qkv = linear(x).reshape(B, T, 3, n_head, -1)
        return jnp.unstack(qkv, axis=2)

    trainkit.layers.project_to_heads = project


def gelu_differentiated_by_jax(tutorial) -> None:
    """What GELU's backward pass needs is kept, where it would be computed again."""
    trainkit.layers.gelu = partial(nnx.gelu, approximate=True)


def loss_differentiated_by_jax(tutorial) -> None:
    """The backward pass gets the loss's gradients from what the forward pass kept.

    Of one chunk that is its logits. With more, nothing is kept, and the backward pass
    computes the logits again.
    """

    def cross_entropy(table, features, targets, vocab_size, chunks=1):
        def mean(chunk):
            features, targets = chunk
            logits = trainkit.layers.score_tokens(table, features, vocab_size)
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
