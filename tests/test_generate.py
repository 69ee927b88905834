"""Text out: the same tokens as Hugging Face, sampling, and what is refused."""

import numpy as np
import pytest
import torch
from peers import ODD, make_peer, ours

import trainkit.generate


def test_greedy_text_equals_hugging_faces(tutorial, small, tmp_path):
    theirs = make_peer(ODD | {"block_size": 96}, tmp_path)
    model = ours(tutorial, small, tmp_path)
    prompts = [[1, 2, 3], [500], [7, 8, 9, 10, 11, 1000, 1001]]
    found = trainkit.generate.generate_tokens(
        model, prompts, 64, temperature=0.0, end_of_text=ODD["vocab_size"] - 1
    )
    for prompt, tokens in zip(prompts, found):
        expected = theirs.generate(
            torch.tensor([prompt]), do_sample=False, max_new_tokens=64, pad_token_id=0
        )[0, len(prompt) :]
        assert tokens == expected.tolist()


def test_sampling(tutorial, small, capsys):
    model = tutorial.create_model(small(block_size=32, vocab_size=50_257))
    draw = trainkit.generate.generate_tokens
    trainkit.generate.decode.clear_cache()
    first, second, other = (
        draw(model, [[1], [2, 3]], max_new_tokens=8, seed=s) for s in (0, 0, 1)
    )
    assert first == second != other
    assert trainkit.generate.decode._cache_size() == 1
    greedy = draw(model, [[1]], max_new_tokens=8, temperature=0.0)
    assert draw(model, [[1]], max_new_tokens=8, top_k=1) == greedy
    draw(model, [list(range(40))], max_new_tokens=8)
    assert "kept the last 24 of 40 tokens" in capsys.readouterr().out
    text = trainkit.generate.generate(model, ["Hello there"], max_new_tokens=4)[0]
    assert text.startswith("Hello there") and len(text) > len("Hello there")


def test_stops_at_end_of_text(tutorial, small):
    """A model whose only good next token is the end."""
    config = small()
    model = tutorial.create_model(config)
    end = config.vocab_size - 1
    model.ln_f.scale[...] = np.zeros(config.n_embd, np.float32)
    model.ln_f.bias[...] = model.wte.embedding[end] * 1e3
    assert (
        trainkit.generate.generate_tokens(
            model, [[1, 2], [3]], max_new_tokens=8, end_of_text=end
        )
        == [[end]] * 2
    )
    found = trainkit.generate.generate_tokens(model, [[1, 2], [3]], max_new_tokens=8)
    assert found == [[end] * 8] * 2  # no token ends it


@pytest.mark.parametrize(
    "prompts, new, words",
    [
        ([[1, 521]], 4, "prompt 0.*0 to 520.*521"),
        ([[1], [-1]], 4, "prompt 1.*-1"),
        ([[]], 4, "found none"),
        ([[1]], 16, "max_new_tokens.*15"),
    ],
)
def test_bad_prompts(tutorial, small, prompts, new, words):
    with pytest.raises(ValueError, match=words):
        trainkit.generate.generate_tokens(tutorial.create_model(small()), prompts, new)


def test_text_needs_the_vocabulary_of_the_tokenizer(tutorial, small):
    with pytest.raises(ValueError, match="521 tokens, .*50,257.*call generate_tokens"):
        trainkit.generate.generate(tutorial.create_model(small()), ["Hello"])
