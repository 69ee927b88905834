"""Logits and cross-entropy, in parts, because they are the largest arrays of all.

In the comments, B is the batch, T the tokens of a window, D the width, V the rows of the
token embedding.
"""

import jax
import jax.numpy as jnp


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

    rows = table.astype(features.dtype)

    def add_chunk(total, chunk):
        loss, d_table, d_features = loss_and_gradients(
            rows, *chunk, vocab_size, targets.size
        )
        return jax.tree.map(jnp.add, total, (loss, d_table)), d_features

    zeros = jnp.zeros(()), jnp.zeros_like(table)
    (loss, d_table), d_features = jax.lax.scan(add_chunk, zeros, (features, targets))

    def backward(d_loss):
        scale = d_loss.astype(d_features.dtype)
        return d_loss * d_table, scale * d_features, None, None

    return loss, backward


def loss_and_gradients(table, features, targets, vocab_size, n_targets):
    """The summed loss over `n_targets`, and its gradients by `table` and `features`.

    The gradient of a token's loss by its logits is softmax minus one-hot. Comparing with
    the target needs no scatter, and like the logits, this is an array of the compute type:
    float32 numbers exist only on their way through the sums.
    """
    logits = score_tokens(table, features, vocab_size)  # (B, T, V)
    exact = logits.astype(jnp.float32)
    log_sum = jax.nn.logsumexp(exact, axis=-1, keepdims=True)
    is_target = jnp.arange(len(table)) == targets[..., None]
    loss = jnp.sum(log_sum) - jnp.sum(exact, where=is_target)

    d_logits = (jnp.exp(exact - log_sum) - is_target) / n_targets
    d_logits = d_logits.astype(features.dtype)
    d_table = jnp.einsum(
        "btv,btd->vd", d_logits, features, preferred_element_type=jnp.float32
    )
    return loss / n_targets, d_table, d_logits @ table
