"""What is exported, in a program that knows nothing of this tutorial."""

import pytest
from scoring import score

import trainkit.huggingface
import trainkit.tokenizers


@pytest.mark.extra
def test_an_exported_model_is_scored(tutorial, small, tmp_path):
    model = tutorial.create_model(small(vocab_size=50_257, block_size=64))
    folder = trainkit.huggingface.export(model, tmp_path / "exported")
    tokenizer = trainkit.tokenizers.load("gpt2")
    assert score(model, tokenizer, folder, tmp_path) == pytest.approx(3 / 5)
