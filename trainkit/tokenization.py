"""Tokenizers by name: tiktoken's encodings, and those of Hugging Face's tokenizers library.

Each has `encode_ordinary`, `decode`, `n_vocab`, and `eot_token`, as tiktoken's have. Ray
Data's tasks import this module, so it imports neither JAX nor Flax nor Orbax.
"""

import functools
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

import tiktoken
import tokenizers

_ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>")  # which end a text
_SETTINGS = "tokenizer_config.json"  # beside a tokenizer.json


class HuggingFaceTokenizer:
    """A tokenizer.json, under the names that tiktoken gives things.

    Its tokens are the library's, but for truncation, padding, a frame around each text, and
    special tokens that a text spells, which are text. The token that ends a text is the
    `eos_token` of the tokenizer_config.json beside it or, without that, one of `_ENDS`.

    Raises:
        ValueError: the file can't be read, or no token ends a text.
    """

    def __init__(self, path: Path):
        self.path = path
        try:
            self.tokenizer = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # of no other class, and without the file's name
            raise ValueError(
                f"tokenizer: {path} is no tokenizer.json: {error}"
            ) from error
        self.tokenizer.no_truncation()
        self.tokenizer.no_padding()
        self.tokenizer.encode_special_tokens = True  # in a text, they are text
        self.n_vocab = max(self.tokenizer.get_vocab().values()) + 1
        settings = path.with_name(_SETTINGS)
        found = json.loads(settings.read_text()) if settings.exists() else {}
        end = found.get("eos_token")
        ends = [end["content"] if isinstance(end, dict) else end] if end else _ENDS
        known = [end for end in ends if self.tokenizer.token_to_id(end) is not None]
        if not known:
            raise ValueError(
                f"tokenizer: {path} has none of {', '.join(ends)} to end a text. Name the "
                f"token that does as eos_token in {settings}"
            )
        self.tokenizer.add_special_tokens(known[:1])  # also if its file doesn't say so
        self.eot_token = self.tokenizer.get_vocab()[known[0]]

    def encode_ordinary(self, text: str) -> list[int]:
        """The tokens of a text, with none before or after it.

        Raises:
            ValueError: they stand for another text, such as one without its spaces or its
                unknown characters, or one of them ends a text.
        """
        ids = self.tokenizer.encode(text, add_special_tokens=False).ids
        if self.decode(ids) != text or self.eot_token in ids:
            raise ValueError(
                f"tokenizer: {self.path} changes or ends the text {text!r:.200}"
            )
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """The text of some tokens."""
        return self.tokenizer.decode(ids, skip_special_tokens=False)


def load(name: str) -> tiktoken.Encoding | HuggingFaceTokenizer:
    """The tokenizer of that name, which is downloaded once, unless it is here.

    Args:
        name: an encoding of tiktoken, such as "gpt2"; "builtin", that of the smoke run;
            "characters", those of Shakespeare's plays; a tokenizer.json, a folder with one, or
            a model on the Hugging Face hub.

    Raises:
        FileNotFoundError: there is no tokenizer.json.
        ValueError: as `HuggingFaceTokenizer`.
    """
    if name in tiktoken.list_encoding_names():
        return tiktoken.get_encoding(name)
    path = Path(name)
    if name in ("builtin", "characters"):  # made by ci/make_vocabulary.py
        path = Path(__file__).with_name(f"{name}_tokenizer.json")
    elif not path.is_absolute():
        path = _download(name)
    if path.is_dir():
        path /= "tokenizer.json"
    if not path.exists():
        raise FileNotFoundError(
            f"tokenizer: {path} isn't there. Of a vocab.json and a merges.txt, transformers "
            f"makes it: AutoTokenizer.from_pretrained({name!r}).save_pretrained(FOLDER)"
        )
    settings = path.with_name(_SETTINGS)
    changed = [x.stat().st_mtime_ns for x in (path, settings) if x.exists()]
    return _open(path, *changed)


def identity(name: str) -> str:
    """What tells a tokenizer from others."""
    tokenizer = load(name)
    if isinstance(tokenizer, tiktoken.Encoding):
        return f"{name} of tiktoken"
    digest = hashlib.sha256(tokenizer.path.read_bytes()).hexdigest()
    return f"tokenizer.json, SHA-256 {digest}, {tokenizer.eot_token} ends a text"


@functools.cache
def _download(name: str) -> Path:
    """The folder with the tokenizer of a model on the hub."""
    from huggingface_hub import snapshot_download  # slow, and needed here only

    files = ["tokenizer.json", _SETTINGS]
    try:
        return Path(snapshot_download(name, allow_patterns=files))
    except Exception as error:
        error.add_note(
            f"tokenizer: {name} is no file here, and was looked for on the hub."
        )
        raise


@functools.lru_cache(8)
def _open(path: Path, *changed_ns: int) -> HuggingFaceTokenizer:
    """The tokenizer in a file, as it and its settings were when they last changed."""
    return HuggingFaceTokenizer(path)
