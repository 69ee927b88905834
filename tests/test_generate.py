"""Text out: the same tokens as Hugging Face, sampling, and what is refused."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from peers import make_peer, ours

import trainkit.tokenizers
from trainkit.config import TrainingConfig
from trainkit.generate import generate


def test_greedy_text_equals_hugging_faces(tutorial, small, tmp_path):
    """With a cache, which theirs has; also if the layers are scanned to train.

    Each prompt is alone there, so an answer doesn't depend on the other prompts.
    """
    theirs = make_peer(tmp_path)
    model = ours(tutorial, small, tmp_path, scan_layers=True)
    tokenizer = trainkit.tokenizers.load("builtin")
    end, options = tokenizer.eot_token, {"do_sample": False, "max_new_tokens": 24}
    prompts = ["The value of x", "for", "a class that has no names in it"]
    found = generate(model, iter(prompts), 24, temperature=0.0)
    for prompt, text in zip(prompts, found, strict=True):
        ids = torch.tensor([tokenizer.encode_ordinary(prompt)])
        (row,) = theirs.generate(ids, **options, eos_token_id=end, pad_token_id=end)
        expected = tokenizer.decode([t for t in row.tolist() if t != end])
        assert text == expected and text.startswith(prompt)


class Letters:
    """A tokenizer of the letters a to j, with k as the end of a text."""

    n_vocab, eot_token = 11, 10

    def encode_ordinary(self, text):
        return [ord(letter) - ord("a") for letter in text]

    def decode(self, ids):
        return "".join(chr(ord("a") + i) for i in ids)


class NextLetter(nnx.Module):
    """After a letter, the next one is the likeliest, and the one after it the second."""

    def __init__(self, logits=(4.0, 3.0), **config):
        values = {"block_size": 16, "vocab_size": 11, "tokenizer": "letters"} | config
        self.config, self.logits = (
            TrainingConfig(**values),
            nnx.Param(jnp.array(logits)),
        )

    def __call__(self, tokens):
        after = (tokens[..., None] + jnp.arange(1, 1 + self.logits[...].size)) % 11
        return jax.nn.one_hot(after, 11).swapaxes(-1, -2) @ self.logits[...]


@pytest.fixture
def letters(monkeypatch):
    monkeypatch.setattr("trainkit.tokenizers.load", lambda name: Letters())


@pytest.mark.usefixtures("letters")
def test_an_end_ends_an_answer():
    """The other rows go on, up to their own ends."""
    likeliest = partial(generate, NextLetter(), temperature=0)
    found = likeliest(["ae", "h", "c", "j"], max_new_tokens=4)
    assert found == ["aefghi", "hij", "cdefg", "j"]
    assert likeliest([], max_new_tokens=4) == []
    assert likeliest(["a"], max_new_tokens=15) == ["abcdefghij"]  # all the room


@pytest.mark.usefixtures("letters")
def test_what_is_drawn_follows_from_the_seed():
    """Any letter, in a free choice, but none beyond a vocabulary smaller than `top_k`."""
    model = NextLetter(block_size=80)
    draw = partial(generate, model, ["a"] * 200, temperature=1e6)
    found, again, other = (draw(seed=seed) for seed in (0, 0, 2**32 - 1))
    assert found == again != other
    assert {*"".join(found)} == {*"abcdefghij"} and len({*found}) > 150


@pytest.mark.usefixtures("letters")
@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_draws_have_the_probabilities_of_a_softmax(temperature):
    """Of the three likeliest letters, which are the second, third, and fifth after a."""
    logits = np.array([-9.0, 0.2, 0.1, -8.0, 1.0])
    draw = partial(generate, NextLetter(logits), ["a"] * 40_000, max_new_tokens=1)
    letters = [text[1] for text in draw(temperature=temperature, top_k=3)]
    share = [letters.count(letter) / len(letters) for letter in "cdf"]
    weights = np.exp(logits[[1, 2, 4]] / temperature)
    np.testing.assert_allclose(share, weights / weights.sum(), atol=0.01)
    assert sum(share) == pytest.approx(1)


@pytest.mark.usefixtures("letters")
@pytest.mark.parametrize(
    "options, error, words",
    [
        ({"prompts": ["a", ""]}, ValueError, r"have \[1 0\] tokens: expected 1 to 12"),
        (
            {"prompts": ["a" * 13]},
            ValueError,
            r"\[13\] .*\(16\) .*max_new_tokens \(4\)",
        ),
        ({"seed": 2**32}, OverflowError, "out of bounds for uint32"),
        ({"seed": -1}, OverflowError, "out of bounds for uint32"),
    ],
)
def test_what_would_go_wrong_in_silence_is_refused(options, error, words):
    with pytest.raises(error, match=words):
        generate(NextLetter(), **{"prompts": ["a"], "max_new_tokens": 4} | options)
