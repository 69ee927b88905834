"""Text from a model, one token at a time, without a cache, as nanoGPT writes it.

In `transformers`, what `huggingface.export` writes has a cache.
"""

from collections.abc import Iterable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from trainkit import tokenization


def generate(
    model: nnx.Module,
    prompts: Iterable[str],
    max_new_tokens: int = 64,
    temperature: float = 0.8,
    top_k: int | None = 50,
    seed: int = 0,
) -> list[str]:
    """Each prompt with its continuation, on the first device of this process.

    Args:
        model: `model(tokens)`, int [B, S], returns logits [B, S, V]; it has a `config`.
        temperature: 0 takes the likeliest token; more makes the choice freer.
        top_k: the number of likeliest tokens to choose among; None or 0: all.

    Raises:
        ValueError: a prompt has no tokens, or too many, or there is a text for a list.
        OverflowError: the seed isn't a number of 32 bits.
    """
    if isinstance(prompts, str):
        raise ValueError(
            f"prompts: expected a list of texts, found the text {prompts!r:.80}"
        )
    config = model.config  # type: ignore[attr-defined] # create_model sets it
    device = jax.local_devices()[0]
    tokenizer = tokenization.load(config.tokenizer)
    ids = [tokenizer.encode_ordinary(prompt) for prompt in prompts]
    lengths = np.array([len(tokens) for tokens in ids], np.int32)
    room = config.block_size - max_new_tokens
    if ids and not 1 <= lengths.min() <= lengths.max() <= room:
        raise ValueError(
            f"prompts have {lengths} tokens: expected 1 or more, and at most block_size "
            f"({config.block_size}) together with max_new_tokens ({max_new_tokens})"
        )
    end = tokenizer.eot_token
    tokens = np.full((len(ids), lengths.max(initial=0) + max_new_tokens), end, np.int32)
    for row, prompt in zip(tokens, ids):
        row[: len(prompt)] = prompt
    model = jax.device_put(model, device)
    key = jax.random.key(np.uint32(seed))
    top_k = min(top_k or config.vocab_size, config.vocab_size)
    # Attention divides its work over these axes, here among one device.
    with jax.set_mesh(Mesh([[[device]]], ("data", "fsdp", "tensor"))):
        found = _continue(
            model, tokens, lengths, max_new_tokens, temperature, key, end, top_k
        )
    return [tokenizer.decode([t for t in row if t != end]) for row in found.tolist()]


@partial(jax.jit, static_argnames="top_k")
def _continue(
    model: nnx.Module,
    tokens: jax.Array,
    lengths: jax.Array,
    max_new_tokens: int,
    temperature: float,
    key: jax.Array,
    end: int,
    top_k: int,
) -> jax.Array:
    """Write into `tokens`, int32 [B, S], after each row's prompt, up to its `end` token."""
    rows = jnp.arange(len(tokens))

    def unfinished(carry: tuple) -> jax.Array:
        step, _, done = carry
        return (step < max_new_tokens) & ~done.all()

    def add_tokens(carry: tuple) -> tuple:
        step, tokens, done = carry
        places = lengths + step
        logits = model(tokens)[rows, places - 1]  # (B, V)
        best, candidates = jax.lax.top_k(logits.astype(jnp.float32), top_k)
        # The largest of logits with Gumbel noise is a draw from their softmax.
        noise = jax.random.gumbel(jax.random.fold_in(key, step), best.shape)
        choice = jnp.argmax(best + temperature * noise, axis=-1)
        new = candidates[rows, choice]
        tokens = tokens.at[rows, places].set(jnp.where(done, end, new))
        return step + 1, tokens, done | (new == end)

    start = jnp.zeros((), jnp.int32), tokens, jnp.zeros(len(tokens), bool)
    return jax.lax.while_loop(unfinished, add_tokens, start)[1]
