"""Other ways to write parts of the notebook's train step, to measure beside its own.

Each function changes the notebook's module before anything is compiled.
"""

import jax
import jax.numpy as jnp
import optax


def without_donation(tutorial) -> None:
    """The old and the new state exist at once."""
    step = tutorial.train_step.__wrapped__
    tutorial.train_step = jax.jit(step, static_argnames="config")


def vocabulary_not_padded(tutorial) -> None:
    """50,257 rows in the embedding table, a number that is no multiple of 128."""
    tutorial.TrainingConfig.padded_vocab_size = property(lambda self: self.vocab_size)


def separate_qkv(tutorial) -> None:
    """Three products for query, key, and value, where one of a wider matrix would do."""
    dense = tutorial.nnx.LinearGeneral.__call__

    def products(self, x):
        if self.kernel.ndim == 2:
            return dense(self, x)
        kernel, bias = (p[...].astype(self.dtype) for p in (self.kernel, self.bias))
        x = x.astype(self.dtype)
        return jnp.stack([x @ kernel[:, i] + bias[i] for i in range(3)], axis=-2)

    tutorial.nnx.LinearGeneral.__call__ = products


def gradients_in_the_forward_pass(tutorial) -> None:
    """The chunks' logits are computed once, and their gradients right then.

    The backward pass of a mean only multiplies them by a number. This is what fused
    cross-entropy kernels do, for instance Liger Kernel's (Hsu et al. 2024).
    """

    def cross_entropy(table, features, targets, real):
        logits = features @ table.T.astype(features.dtype)
        logits = jnp.where(jnp.arange(len(table)) < real, logits, -jnp.inf)
        logits = logits.astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()

    @jax.custom_vjp
    def chunked(table, features, targets, real):
        def one(part):
            return cross_entropy(table, *part, real)

        return jax.lax.map(one, (features, targets)).mean()

    def forward(table, features, targets, real):
        gradients = jax.value_and_grad(cross_entropy, argnums=(0, 1))

        def add(total, part):
            loss, (d_table, d_features) = gradients(table, *part, real)
            return jax.tree.map(jnp.add, total, (loss, d_table)), d_features

        zeros = jnp.zeros(()), jnp.zeros_like(table)
        (loss, d_table), d_features = jax.lax.scan(add, zeros, (features, targets))
        n = len(features)
        return loss / n, (d_table / n, d_features / n)

    def backward(gradients, g):
        d_table, d_features = gradients
        return g * d_table, g.astype(d_features.dtype) * d_features, None, None

    chunked.defvjp(forward, backward)

    def loss_fn(model, windows, rngs=None):
        windows = windows.astype(jnp.int32)
        features = model.features(windows[:, :-1], rngs=rngs)

        def split(x):
            return jnp.stack(jnp.split(x, model.config.loss_chunks, axis=1))

        parts = split(features), split(windows[:, 1:])
        return chunked(model.wte.embedding[...], *parts, model.config.vocab_size)

    tutorial.loss_fn = loss_fn
