"""Make trainkit's two tokenizers, with Python 3.11.

    PYTHONPATH=. python ci/make_vocabulary.py

The built-in one has 2,048 tokens. It is a byte-level BPE, as GPT-2's is, trained on the help
pages that come with Python, which are the built-in dataset. With other versions of Python,
whose pages differ a little, the file stays as it is: a vocabulary is part of a run's recipe.
The other has the 65 characters of Shakespeare's plays, with nanoGPT's numbers.
"""

from string import ascii_letters

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

characters = [*sorted("\n !$&',-.3:;?" + ascii_letters), "<|endoftext|>"]
numbers = {character: number for number, character in enumerate(characters)}
tokenizer = Tokenizer(models.BPE(vocab=numbers, merges=[]))
tokenizer.decoder = decoders.Fuse()
tokenizer.add_special_tokens(["<|endoftext|>"])
tokenizer.save("trainkit/characters_tokenizer.json")
