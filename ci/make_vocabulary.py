"""Make trainkit/builtin_tokenizer.json: 2,048 tokens of the built-in text.

    python ci/make_vocabulary.py

It is a byte-level BPE, as GPT-2's is, trained on the help pages that come with Python, which
are the built-in dataset. Any text can be written in it. The file is made with Python 3.11, and
stays as it is with others, whose pages differ a little: a vocabulary is part of a run's recipe.
"""

import sys
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT))
from trainkit import corpus

SIZE, END = 2_048, "<|endoftext|>"
FILE = ROOT / "trainkit/builtin_tokenizer.json"


def make_tokenizer() -> Tokenizer:
    """The tokenizer, trained on all pages."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=SIZE,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus.help_pages(), trainer)
    return tokenizer


if __name__ == "__main__":
    make_tokenizer().save(str(FILE))
