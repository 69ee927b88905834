"""Text out: the same tokens as Hugging Face, sampling, and what is refused."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from peers import ODD, make_peer, ours

import trainkit.generate
from trainkit.config import ModelConfig
from trainkit.generate import generate, generate_tokens, sample_token


def test_greedy_text_equals_hugging_faces(tutorial, small, tmp_path):
    """With a cache, which theirs has as well; also if the layers are scanned to train.

    Each prompt is alone there, so an answer doesn't depend on the other prompts.
    """
    theirs = make_peer(ODD | {"block_size": 48}, tmp_path)
    model = ours(tutorial, small, tmp_path, scan_layers=True)
    prompts = [[1, 2, 3], [500], [7, 8, 9, 10, 11, 1000, 1001]]
    end = ODD["vocab_size"] - 1
    found = generate_tokens(model, prompts, 32, temperature=0.0, end_of_text=end)
    for prompt, tokens in zip(prompts, found):
        options = {"do_sample": False, "max_new_tokens": 32, "pad_token_id": 0}
        (expected,) = theirs.generate(torch.tensor([prompt]), **options).tolist()
        assert prompt + tokens == expected


class NextToken(nnx.Module):
    """After token t, t + 1 is the likeliest, and t + 2 the second."""

    def __init__(self, **config):
        shape = {"block_size": 16, "vocab_size": 11, "n_layer": 2, "n_head": 1}
        shape |= {"n_embd": 4, "compute_dtype": "float32"}
        self.config = ModelConfig(**shape | config)
        self.weight = nnx.Param(jnp.zeros(()))

    def __call__(self, tokens, caches, position):
        after = (tokens[..., None] + jnp.array([1, 2])) % self.config.vocab_size
        one_hot = jax.nn.one_hot(after, self.config.vocab_size)
        return jnp.einsum("btkv,k->btv", one_hot, jnp.array([4.0, 3.0]))


continue_next = partial(generate_tokens, NextToken(), max_new_tokens=4, temperature=0)


def test_an_end_ends_an_answer_and_none_inside_a_prompt():
    """The other rows go on, up to their own ends."""
    prompts = [[5, 7], [7], [3, 9, 1], [7, 6]]
    found = continue_next(prompts, end_of_text=7)
    assert found == [[8, 9, 10, 0], [8, 9, 10, 0], [2, 3, 4, 5], [7]]
    assert continue_next([[4]], end_of_text=8) == [[5, 6, 7, 8]]


def test_prompts_keep_as_much_as_there_is_room_for(capsys):
    """12 tokens before 4 new ones."""
    longest = [*range(11), 0]
    assert continue_next([longest]) == [[1, 2, 3, 4]]
    assert not capsys.readouterr().out
    assert continue_next([[5, *longest], [3]]) == [[1, 2, 3, 4], [4, 5, 6, 7]]
    said = capsys.readouterr().out
    assert said == "prompt 0: kept the last 12 of 13 tokens\n"
    most = continue_next([[1]], max_new_tokens=15)  # with room for one token
    assert most == [[n % 11 for n in range(2, 17)]]


def test_what_is_drawn_follows_from_the_seed():
    """Any token, in a free choice, but none beyond a vocabulary smaller than `top_k`."""
    draw = partial(
        generate_tokens, NextToken(block_size=80), [[1]] * 8, temperature=1e6
    )
    trainkit.generate.decode.clear_cache()
    found, again, other = (draw(seed=seed) for seed in (0, 0, 1))
    assert found == again != other
    assert {*sum(found, [])} == {*range(11)} and len({*map(tuple, found)}) == 8
    assert len({*np.diff(found[0]) % 11}) > 5  # draws differ from place to place
    assert trainkit.generate.decode._cache_size() == 1


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_draws_have_the_probabilities_of_a_softmax(temperature):
    """Of the three likeliest tokens, which stand at 4, 1, and 2."""
    logits = np.array([-9.0, 0.2, 0.1, -8.0, 1.0], np.float32)
    many = jnp.broadcast_to(logits, (40_000, 5))
    found = sample_token(many, temperature, jax.random.key(0), 3)
    weights = np.exp(logits[[1, 2, 4]].astype(float) / temperature)
    share = np.bincount(found, minlength=5) / 40_000
    assert found.dtype == jnp.int32 and found.shape == (40_000,)
    assert share[0] == share[3] == 0
    np.testing.assert_allclose(share[[1, 2, 4]], weights / weights.sum(), atol=0.01)


def test_no_temperature_takes_the_likeliest_and_the_first_of_equals():
    logits = jax.random.normal(jax.random.key(0), (500, 7)).at[0].set(3.0)
    for temperature in (0, 1e-9):
        found = sample_token(logits, temperature, jax.random.key(1), 5)
        np.testing.assert_array_equal(found[1:], np.argmax(logits[1:], axis=-1))
        assert temperature or found[0] == 0


def test_text_ends_before_the_end_of_text(monkeypatch):
    """And begins as the prompt does."""

    class Letters:  # as in SentencePiece, a text's first word has no space before it
        n_vocab, eot_token = 11, 10

        def encode_ordinary(self, text):
            return [ord(letter) - ord("a") for letter in text]

        def decode(self, ids):
            return " ".join(chr(ord("a") + i) for i in ids)

    monkeypatch.setattr(trainkit.generate.tokenizers, "load", lambda name: Letters())
    write = partial(generate, NextToken(tokenizer="letters"), temperature=0)
    assert write(["e", "b"], max_new_tokens=6) == ["e f g h i j", "b c d e f g h"]


def test_text_needs_the_vocabulary_of_the_tokenizer():
    for size in (521, 50_256, 50_300, 50_432):
        words = f"has {size:,} tokens, and .* 50,257.* call generate_tokens"
        with pytest.raises(ValueError, match=words):
            generate(NextToken(vocab_size=size), ["Hello"])
    with pytest.raises(ValueError, match="prompts: expected a list .* found 'A class'"):
        generate(NextToken(), "A class")


def test_padding_of_a_vocabulary_is_no_text(tutorial, small):
    """As nanoGPT's configurations have it; here, the model writes nothing else."""
    model = tutorial.create_model(small(vocab_size=50_304, n_layer=1))
    table = model.wte.embedding
    table[...] = table[...].at[50_257:].multiply(1_000)
    assert generate(model, ["A"], max_new_tokens=5) == ["A"]


@pytest.mark.parametrize(
    "options, words",
    [
        ({"prompts": [[1, 11]]}, "prompt 0.*0 to 10.*11"),
        ({"prompts": [[1], [-1]]}, "prompt 1.*-1"),
        ({"prompts": [[]]}, "found none"),
        ({"prompts": []}, "prompts: expected at least one"),
        ({"temperature": float("inf")}, "temperature"),
        ({"temperature": float("nan")}, r"temperature \(nan\)"),
        ({"temperature": -1}, r"temperature \(-1\)"),
        ({"top_k": 0}, r"top_k \(0\)"),
        ({"top_k": 1.5}, r"top_k \(1.5\)"),
        ({"max_new_tokens": 0}, r"max_new_tokens \(0\) must be between 1 and 15,"),
        ({"max_new_tokens": 16}, "max_new_tokens"),
    ],
)
def test_what_is_out_of_its_range_is_refused(options, words):
    with pytest.raises(ValueError, match=words):
        continue_next(**{"prompts": [[1]]} | options)
