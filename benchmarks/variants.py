"""Other ways to write parts of the notebook's train step, to measure beside its own.

Each function changes the notebook's module, or a module of trainkit that it calls, before
anything is compiled.
"""

import jax
import jax.numpy as jnp
import optax
from flax import nnx

import trainkit.config
import trainkit.loss


def without_donation(tutorial) -> None:
    """The old and the new state exist at once."""
    step = tutorial.train_step.__wrapped__
    tutorial.train_step = jax.jit(step, static_argnames="config")


def vocabulary_not_padded(tutorial) -> None:
    """50,257 rows in the embedding table, a number that is no multiple of 128."""
    trainkit.config.TrainingConfig.padded_vocab_size = property(
        lambda self: self.vocab_size
    )


def separate_qkv(tutorial) -> None:
    """Three products for query, key, and value, where one of a wider matrix would do."""
    dense = nnx.LinearGeneral.__call__

    def products(self, x):
        if self.kernel.ndim == 2:
            return dense(self, x)
        kernel, bias = (p[...].astype(self.dtype) for p in (self.kernel, self.bias))
        x = x.astype(self.dtype)
        return jnp.stack([x @ kernel[:, i] + bias[i] for i in range(3)], axis=-2)

    nnx.LinearGeneral.__call__ = products


def loss_differentiated_by_jax(tutorial) -> None:
    """The backward pass gets the loss's gradients from what the forward pass kept.

    Of one chunk that is its logits. With more, nothing is kept, and the backward pass
    computes the logits again.
    """

    def cross_entropy(table, features, targets, vocab_size, chunks=1):
        def mean(chunk):
            features, targets = chunk
            logits = trainkit.loss.score_tokens(table, features, vocab_size)
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

    trainkit.loss.cross_entropy = cross_entropy
