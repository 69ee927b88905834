"""Logits and cross-entropy, in parts, because they are the largest arrays of all.

In the comments, B is the batch, T the tokens of a window, D the width, V the rows of the
token embedding.
"""

import jax
import jax.numpy as jnp
import optax


def score_tokens(table: jax.Array, features: jax.Array, vocab_size: int) -> jax.Array:
    """Logits [B, T, V] from the token embeddings [V, D] and features [B, T, D].

    The rows that pad the vocabulary score minus infinity, so they can be neither predicted
    nor trained.
    """
    logits = features @ table.T.astype(features.dtype)
    return jnp.where(jnp.arange(len(table)) < vocab_size, logits, -jnp.inf)


def cross_entropy(
    table: jax.Array,
    features: jax.Array,
    targets: jax.Array,
    vocab_size: int,
    chunks: int = 1,
) -> jax.Array:
    """Mean cross-entropy in nats per token, float32, scalar.

    The windows are cut into `chunks` parts along T, and only one part's logits ever exist:
    its gradients are taken in the forward pass, as in Liger Kernel (Hsu et al. 2024), and
    the backward pass only scales them.

    Args:
        table: token embeddings, [V, D].
        features: [B, T, D].
        targets: int, [B, T].
    """

    def split(x):  # (B, T, ...) -> (chunks, B, T/chunks, ...)
        return jnp.stack(jnp.split(x, chunks, axis=1))

    return cross_entropy_of_chunks(table, split(features), split(targets), vocab_size)


@jax.custom_gradient
def cross_entropy_of_chunks(table, features, targets, vocab_size):
    """The same for features [chunks, B, T/chunks, D] and targets [chunks, B, T/chunks]."""
    chunks = len(targets)

    def chunk_loss(table, features, targets):
        logits = score_tokens(table, features, vocab_size).astype(jnp.float32)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
        return losses.mean() / chunks

    def add_chunk(total, chunk):
        loss_and_gradients = jax.value_and_grad(chunk_loss, argnums=(0, 1))
        loss, (d_table, d_features) = loss_and_gradients(table, *chunk)
        return jax.tree.map(jnp.add, total, (loss, d_table)), d_features

    zeros = jnp.zeros(()), jnp.zeros_like(table)
    (loss, d_table), d_features = jax.lax.scan(add_chunk, zeros, (features, targets))

    def backward(d_loss):
        scale = d_loss.astype(d_features.dtype)
        return d_loss * d_table, scale * d_features, None, None

    return loss, backward
