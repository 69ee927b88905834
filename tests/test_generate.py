"""Text out: the same tokens as Hugging Face, sampling, and what is refused."""

from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from peers import make_peer, ours

import trainkit.tokenization
from trainkit.config import TrainingConfig
from trainkit.generate import generate


def test_greedy_text_equals_hugging_faces(tutorial, small, tmp_path):
    """With a cache, which theirs has; also if the layers are scanned to train.

    Each prompt is alone there, so an answer doesn't depend on the other prompts.
    """
    theirs = make_peer(tmp_path)
    model = ours(tutorial, small, tmp_path, scan_layers=True)
    tokenizer = trainkit.tokenization.load("builtin")
    end, options = tokenizer.eot_token, {"do_sample": False, "max_new_tokens": 24}
    prompts = ["The value of x", "for", "a class that has no names in it"]
    found = generate(model, iter(prompts), 24, temperature=0.0)
    for prompt, text in zip(prompts, found, strict=True):
        ids = torch.tensor([tokenizer.encode_ordinary(prompt)])
        (row,) = theirs.generate(ids, **options, eos_token_id=end, pad_token_id=end)
        expected = tokenizer.decode([t for t in row.tolist() if t != end])
        assert text == expected and text.startswith(prompt)


class NextLetter(nnx.Module):
    """These are the logits of the letters after a letter, from the next one on."""

    def __init__(self, *logits: float):
        self.config = TrainingConfig(block_size=16, vocab_size=11, tokenizer="letters")
        self.logits = nnx.Param(jnp.array(logits))

    def __call__(self, tokens):
        after = (tokens[..., None] + jnp.arange(1, 1 + self.logits[...].size)) % 11
        return jax.nn.one_hot(after, 11).swapaxes(-1, -2) @ self.logits[...]


@pytest.fixture
def answer(monkeypatch):
    """`generate` with a model after whose letters the next one is the likeliest.

    The tokens are the letters a to j, and k as the end of a text.
    """
    tokenizer = SimpleNamespace(
        eot_token=10,
        encode_ordinary=lambda text: [*map("abcdefghij".index, text)],
        decode=lambda ids: "".join("abcdefghij"[i] for i in ids),
    )
    monkeypatch.setattr("trainkit.tokenization.load", lambda name: tokenizer)
    return partial(generate, NextLetter(4.0, 3.0))


def test_an_end_ends_an_answer(answer):
    """The other rows go on, up to their own ends."""
    found = answer(["ae", "h", "c", "j"], 4, temperature=0)
    assert found == ["aefghi", "hij", "cdefg", "j"]
    assert answer([], 4) == []
    assert answer(["a"], 15, temperature=0) == ["abcdefghij"]  # all the room


def test_what_is_drawn_follows_from_the_seed(answer):
    """Any letter, in a free choice, but none beyond a vocabulary smaller than `top_k`."""
    draw = partial(answer, ["a"] * 200, 15, temperature=1e6)
    found, again, other = (draw(seed=seed) for seed in (0, 0, 2**32 - 1))
    assert found == again != other
    assert {*"".join(found)} == {*"abcdefghij"} and len({*found}) > 150


@pytest.mark.usefixtures("answer")
def test_draws_have_the_probabilities_of_a_softmax():
    """Of the three likeliest letters, which are the second, third, and fifth after a."""
    model = NextLetter(-9.0, 0.2, 0.1, -8.0, 1.0)
    found = generate(model, ["a"] * 40_000, 1, temperature=0.5, top_k=3)
    share = [found.count(text) / len(found) for text in ("ac", "ad", "af")]
    weights = np.exp(np.array([0.2, 0.1, 1.0]) / 0.5)
    np.testing.assert_allclose(share, weights / weights.sum(), atol=0.01)


@pytest.mark.parametrize(
    "prompts, seed, words",
    [
        (["a", ""], 0, r"have \[1 0\] tokens: expected 1 or more"),
        (["a" * 13], 0, r"\[13\] .*\(16\) .*max_new_tokens \(4\)"),
        (["a"], 2**32, "out of bounds for uint32"),
    ],
)
def test_what_would_go_wrong_in_silence_is_refused(answer, prompts, seed, words):
    with pytest.raises((ValueError, OverflowError), match=words):
        answer(prompts, 4, seed=seed)


def test_a_text_in_place_of_a_list_is_refused(answer):
    with pytest.raises(
        ValueError, match="prompts: expected a list of texts, found .*'ab'"
    ):
        generate(NextLetter(1.0, 0.0), "ab")


@pytest.mark.parametrize("top_k", [0, None])
def test_without_top_k_all_tokens_count(answer, top_k):
    model = NextLetter(1.0, 0.0)
    options = {"max_new_tokens": 4, "temperature": 3.0, "seed": 1}
    assert generate(model, ["a"], top_k=top_k, **options) == generate(
        model, ["a"], top_k=11, **options
    )
