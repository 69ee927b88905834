"""Text from a model, one token at a time.

The keys and values of the tokens so far stay in caches, so each step costs the same, and
the whole loop is one compiled program. The model is any NNX module with a `config` that is
called as `model(tokens, caches=..., position=...)` and returns logits.
"""

import math
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import ray.train
from flax import nnx

from trainkit import checkpoints, tokenizers


def load_model(create_model: Callable, checkpoint: ray.train.Checkpoint) -> nnx.Module:
    """The model in a checkpoint, on the first device of this process.

    Args:
        create_model: makes a model of that kind for a configuration.

    Raises:
        ValueError: as `checkpoints.load_params` says.
    """

    def abstract_model(config):
        return nnx.eval_shape(partial(create_model, config))

    config, params = checkpoints.load_params(
        checkpoint, lambda config: nnx.state(abstract_model(config), nnx.Param)
    )
    model = abstract_model(config)
    nnx.update(model, params)
    return model


def generate(model: nnx.Module, prompts: list[str], **options) -> list[str]:
    """Each prompt with its continuation; `options` go to `generate_tokens`.

    Raises:
        ValueError: as `generate_tokens` says, or the model has another vocabulary.
    """
    if isinstance(prompts, str):
        raise ValueError(f"prompts: expected a list of strings, found {prompts!r:.60}")
    config = model.config
    tokenizer = tokenizers.load(config.tokenizer)
    if not tokenizers.fits(tokenizer, config.vocab_size):
        raise ValueError(
            f"vocab_size: the model has {config.vocab_size:,} tokens, and its tokenizer, "
            f"{config.tokenizer}, {tokenizer.n_vocab:,}. Encode the prompts with the tokenizer "
            "that made its tokens, call generate_tokens, and decode what that returns."
        )
    end = tokenizer.eot_token
    ids = [tokenizer.encode_ordinary(prompt) for prompt in prompts]
    tokens = generate_tokens(model, ids, end_of_text=end, **options)
    no_text = {end, *range(tokenizer.n_vocab, config.vocab_size)}
    whole = [x + [t for t in row if t not in no_text] for x, row in zip(ids, tokens)]
    starts = [len(tokenizer.decode(prompt)) for prompt in ids]
    texts = [tokenizer.decode(x)[start:] for x, start in zip(whole, starts)]
    return [prompt + text for prompt, text in zip(prompts, texts)]


def generate_tokens(
    model: nnx.Module,
    prompts: list[list[int]],
    max_new_tokens: int = 64,
    temperature: float = 0.8,
    top_k: int = 50,
    seed: int = 0,
    end_of_text: int | None = None,
) -> list[list[int]]:
    """The tokens that follow each prompt, up to and with the end-of-text token.

    Args:
        temperature: 0 takes the likeliest token; more makes the choice freer.
        top_k: the number of likeliest tokens to choose among.
        end_of_text: the token that ends an answer; None: all have `max_new_tokens`.

    Raises:
        ValueError: there is no prompt, one is empty or has an unknown token, there is no
            room, or an option is out of its range.
    """
    if not prompts:
        raise ValueError("prompts: expected at least one, found none")
    if not 0 <= temperature < math.inf:
        raise ValueError(f"temperature ({temperature}) must be 0 or a positive number")
    if top_k != int(top_k) or top_k < 1:
        raise ValueError(f"top_k ({top_k}) must be a whole number from 1 on")
    config = model.config
    room = config.block_size - max_new_tokens
    if not 1 <= room < config.block_size:
        raise ValueError(
            f"max_new_tokens ({max_new_tokens}) must be between 1 and "
            f"{config.block_size - 1}, one less than block_size"
        )
    tokens = np.zeros((len(prompts), config.block_size), np.int32)
    for i, prompt in enumerate(prompts):
        unknown = [token for token in prompt if not 0 <= token < config.vocab_size]
        if unknown or not prompt:
            raise ValueError(
                f"prompt {i}: expected token ids from 0 to {config.vocab_size - 1}, "
                f"found {unknown or 'none'}"
            )
        if len(prompt) > room:
            print(f"prompt {i}: kept the last {room} of {len(prompt)} tokens")
        tokens[i, : len(prompt[-room:])] = prompt[-room:]
    lengths = np.array([min(len(prompt), room) for prompt in prompts])
    out = decode(
        *nnx.split(model),
        tokens,
        lengths,
        lengths.max() + max_new_tokens,
        temperature,
        jax.random.key(seed),
        -1 if end_of_text is None else end_of_text,
        top_k=min(top_k, config.vocab_size),
    )
    end, answers = end_of_text, []
    for row, n in zip(np.asarray(out), lengths):
        answer = row[n : n + max_new_tokens].tolist()
        answers.append(answer[: answer.index(end) + 1] if end in answer else answer)
    return answers


@partial(jax.jit, static_argnames=("graph", "top_k"))
def decode(
    graph, weights, tokens, lengths, end, temperature, key, end_of_text, *, top_k
):
    """Continue each row of `tokens`, int32 [B, S], from its length up to `end`.

    Args:
        graph, weights: the model, as `nnx.split` divides it.
    """
    model = nnx.merge(graph, weights)
    config = model.config
    B, S = tokens.shape
    cache = jnp.zeros(
        (B, S, config.n_head, config.n_embd // config.n_head), config.compute_dtype
    )

    def unfinished(carry):
        position, _, _, done = carry
        return (position < end - 1) & ~done.all()

    def next_token(carry):
        position, tokens, caches, done = carry
        now = jax.lax.dynamic_slice_in_dim(tokens, position, 1, axis=1)  # (B, 1)
        logits = model(now, caches=caches, position=position)[:, 0]  # (B, V)
        step_key = jax.random.fold_in(key, position)
        new = sample_token(logits, temperature, step_key, top_k)
        in_prompt = position + 1 < lengths
        new = jnp.where(done, end_of_text, new)
        new = jnp.where(in_prompt, tokens[:, position + 1], new)
        done |= ~in_prompt & (new == end_of_text)
        return position + 1, tokens.at[:, position + 1].set(new), caches, done

    position = jnp.zeros((), jnp.int32)
    cache = {"key": cache, "value": cache, "position": position}
    caches = [dict(cache) for _ in range(config.n_layer)]
    start = position, tokens, caches, jnp.zeros(B, bool)
    return jax.lax.while_loop(unfinished, next_token, start)[1]


def sample_token(
    logits: jax.Array, temperature: float, key: jax.Array, top_k: int
) -> jax.Array:
    """Draw one of the `top_k` likeliest tokens for each row of [B, V], int32 [B]."""
    best, candidates = jax.lax.top_k(logits.astype(jnp.float32), top_k)  # sorted
    drawn = jax.random.categorical(key, best / jnp.maximum(temperature, 1e-6))
    choice = jnp.where(temperature > 0, drawn, 0)
    return jnp.take_along_axis(candidates, choice[:, None], axis=1)[:, 0]
