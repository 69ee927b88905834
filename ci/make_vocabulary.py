"""Make trainkit/builtin_tokenizer.json, 2,048 tokens of the built-in text, with Python 3.11.

    PYTHONPATH=. python ci/make_vocabulary.py

It is a byte-level BPE, as GPT-2's is, trained on the help pages that come with Python, which
are the built-in dataset. With other versions of Python, whose pages differ a little, the file
stays as it is: a vocabulary is part of a run's recipe.
"""

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from trainkit import documents

tokenizer = Tokenizer(models.BPE())
tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
tokenizer.decoder = decoders.ByteLevel()
trainer = trainers.BpeTrainer(
    vocab_size=2_048,
    special_tokens=["<|endoftext|>"],
    initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
)
tokenizer.train_from_iterator(documents.help_pages(), trainer)
tokenizer.save("trainkit/builtin_tokenizer.json")
