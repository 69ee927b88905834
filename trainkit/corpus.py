"""From documents to token files: Ray Data reads and tokenizes, and `write` keeps the order."""

import difflib
import inspect
import json
import math
import re
import time
from collections.abc import Callable
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import ray
from ray.data import Dataset
from ray.util.debug import log_once
from tqdm import tqdm

from trainkit import paths, token_files, tokenizers
from trainkit.config import TrainingConfig


def help_pages() -> list[str]:
    """The prose of Python's help pages, a paragraph a line, without code and its marks."""
    pages = []
    for page in topics.values():
        page = re.sub('["*“”]', "", page)
        paragraphs = [" ".join(part.split()) for part in re.split(r"\n\s*\n", page)]
        prose = [p for p in paragraphs if re.fullmatch(r"[A-Z].{60,}[.:]", p)]
        pages.append("\n".join(p for p in prose if "::=" not in p and ">>>" not in p))
    return [page for page in pages if page]


def builtin(downloads: str) -> datasets.DatasetDict:
    """Python's help pages: nine tenths to train on, and one to validate with."""
    pages = datasets.Dataset.from_dict({"text": help_pages()})
    return pages.train_test_split(test_size=0.1, seed=2357)


def tinystories(downloads: str) -> list[datasets.Dataset]:
    """The first 1.25 of 2.1 million stories for children: about 270 million tokens."""
    name, splits = "roneneldan/TinyStories", ["train[:1250000]", "validation"]
    return datasets.load_dataset(name, split=splits, cache_dir=downloads)


def openwebtext(downloads: str) -> datasets.DatasetDict:
    """Eight million web pages, 9 billion tokens, split as nanoGPT splits them."""
    pages = datasets.load_dataset(
        "Skylion007/openwebtext", split="train", cache_dir=downloads
    )
    return pages.train_test_split(test_size=0.0005, seed=2357)


def documents(config: TrainingConfig, dataset: Callable) -> list[Dataset]:
    """The two datasets that `dataset(downloads)` gives, of Ray or of Hugging Face's library.

    `downloads` is a folder beside `config.data_dir`, which all nodes see.

    Raises:
        ValueError: it gives something else; while they are read, a row has no string in the
            column `text`.
    """

    def check(row: dict) -> dict[str, str]:
        if not isinstance(row.get("text"), str):
            raise ValueError(f"expected a string in a column text, found {row!r:.200}")
        return {"text": row["text"]}

    made = dataset(f"{config.data_dir}-downloads")
    return [_to_ray(part).map(check) for part in _two_parts(config.dataset, made)]


def write(config: TrainingConfig, dataset: Callable, tokenize: Callable) -> dict:
    """Make `config.data_dir` of documents, in their order; return its manifest.

    If `data_dir` has tokens that these functions made, they are used again.

    Args:
        dataset: as for `documents`.
        tokenize: `tokenize({"text": ...}, config)` returns `{"tokens": ...}`, the bytes of
            numbers of `config.token_dtype`. Ray Data maps it over the documents.

    Raises:
        FileExistsError: the tokens were made in another way, or there are other files.
        ValueError: as `documents` and `token_files.check`, or one part has no documents, or
            the source of a function can't be compared with that of the next time.
    """
    made_from = _describe(config, dataset, tokenize)
    if existing := _existing(config, made_from):
        return existing
    by = f"{dataset.__name__} and {tokenize.__name__}"
    manifest: dict[str, Any] = {"made": f"{time.strftime('%Y-%m-%d %H:%M')} by {by}"}
    manifest["made_from"] = made_from
    parts = documents(config, dataset)
    try:
        with paths.new_folder(config.data_dir) as folder:
            train, val = (p.map(tokenize, fn_kwargs={"config": config}) for p in parts)
            # Of val's documents; in train, those that are there, too.
            hashes: set[int] = set()
            in_val = _append(folder / "val.bin", val, config.token_dtype, hashes.add)
            repeated: set[int] = set()

            def note(document: int) -> None:
                if document in hashes:
                    repeated.add(document)
                    _refuse_repeated(len(repeated), len(hashes))

            in_train = _append(folder / "train.bin", train, config.token_dtype, note)
            for key in in_train:
                manifest[key] = {"train": in_train[key], "val": in_val[key]}
            if not all(manifest["documents"].values()):
                raise ValueError(f"dataset: an empty part in {manifest['documents']}")
            if repeated:
                print(f"{_said(len(repeated), len(hashes))}.")
            (folder / "manifest.json").write_text(json.dumps(manifest, indent=1))
    except OSError:
        if existing := _existing(config, made_from):  # another process was faster
            return existing
        raise
    token_files.check(config, manifest)
    return manifest


_PARTS = "two datasets, of Ray Data or of Hugging Face's library, to train and to validate with"


def _two_parts(name: str, made: object) -> list[Dataset | datasets.Dataset]:
    """What a dataset's function has returned: the part to train with is the first.

    Raises:
        ValueError: it is something else.
    """
    found = type(made).__name__
    if isinstance(made, dict):  # of splits, such as a DatasetDict
        found = f"{found} with {sorted(map(str, made))}"
        others = {"validation", "val", "test"} & made.keys()
        if "train" in made and len(made) == 2 and others:
            made = [made["train"], made[others.pop()]]
    if isinstance(made, list | tuple):
        kinds = [type(part).__name__ for part in made]
        found = f"{type(made).__name__} of {len(made)}, first {kinds[:2]}"
        if len(made) == 2 and all(
            isinstance(part, Dataset | datasets.Dataset) for part in made
        ):
            for part in made:
                # Ray would have to read to know its columns.
                columns = getattr(part, "column_names", ["text"])
                if "text" not in columns:
                    words = f"dataset: {name} has {columns}, and no column text"
                    raise ValueError(words)
            return [*made]
    raise ValueError(
        f"dataset: {name} returned {found}. Expected {_PARTS}; of splits by name, train and "
        "one of validation, val, and test"
    )


# A source that shuffles anew each time it is read gives train all but the fraction f that val
# takes, so 1 - f of val's documents, half of them or more. Texts that repeat documents stay
# below: "over 4% of the validation set of standard datasets" is in train, too (Lee et al. 2022,
# "Deduplicating training data makes language models better", with near duplicates).
_MOST_REPEATED = 0.25


def _refuse_repeated(repeated: int, documents: int) -> None:
    if repeated > _MOST_REPEATED * documents:
        raise ValueError(
            f"dataset: {_said(repeated, documents)}, at least. A source that shuffles anew "
            "each time it is read gives each part other documents: seed it. If the texts "
            "repeat, split by a hash, which keeps equal ones together"
        )


def _said(repeated: int, documents: int) -> str:
    return f"{repeated:,} of {documents:,} different documents in val are in train, too"


def _to_ray(part: Dataset | datasets.Dataset) -> Dataset:
    """The column `text` of a dataset of Hugging Face's library, in order.

    Each task reads its rows from the library's cache, which all nodes must see;
    `ray.data.from_huggingface` would copy them through this process's memory.
    """
    if isinstance(part, Dataset):
        return part
    if part.format["type"] == "custom":
        raise ValueError(
            "dataset: with_transform and set_transform would have no effect, because documents "
            "are read by rows of Arrow. Use map"
        )
    part = part.select_columns("text").with_format("arrow")
    shared = ray.put(part)  # of what is in files, a description

    def read(numbers: pa.Table) -> pa.Table:
        return ray.get(shared).select(numbers["id"].to_pylist())[:]

    each = part.data.nbytes / max(part.data.num_rows, 1)  # bytes
    tasks = min(math.ceil(len(part) * each / 2**23), len(part)) or 1
    numbers = ray.data.range(len(part), override_num_blocks=tasks)
    return numbers.map_batches(read, batch_size=None, batch_format="pyarrow")


def _existing(config: TrainingConfig, made_from: list[str]) -> dict | None:
    """The manifest of the tokens in `config.data_dir`; None if they are still to be made."""
    folder = Path(config.data_dir)
    names = {path.name for path in folder.glob("*")}
    if not names:
        return None
    if not {"train.bin", "val.bin"} <= names:
        raise FileExistsError(
            f"data_dir: {folder} has {sorted(names)[:5]}, and not train.bin and val.bin. "
            "Expected these, or no files: choose a new folder, such as one in there"
        )
    if "manifest.json" not in names:
        tokens = token_files.check(config)
        print(
            f"{folder} has no manifest: {tokens} tokens, taken for {config.tokenizer}'s"
        )
        return {"tokens": tokens}
    manifest = json.loads((folder / "manifest.json").read_text())
    was, now = manifest["made_from"], made_from
    if (
        "made" not in manifest
    ):  # before December 2026, sources were written in another way
        was, now = was[:3], now[:3]
    if was != now:
        lines = difflib.unified_diff(was, now, "was", "is", lineterm="", n=1)
        raise FileExistsError(
            f"data_dir: {folder} holds tokens that were made in another way. Give the "
            "dataset's function another name, choose another data_dir, or delete that "
            "folder:\n" + "\n".join(lines)
        )
    token_files.check(config, manifest)
    made = manifest.get("made", "by an earlier version")
    print(f"{folder} is used again: {manifest['tokens']} tokens, made {made}")
    return manifest


def _append(path: Path, tokenized: Dataset, dtype: str, note: Callable) -> dict:
    """Write the tokens of documents to a file, and `note` each one's hash; what is in it."""
    tokenized.context.enable_progress_bars = False
    log_once(
        "ray_data_progress_manager_disabled"
    )  # or Ray would say that it shows none
    tokenized.context.execution_options.preserve_order = True
    found = {"documents": 0, "tokens": 0, "largest_id": 0}
    with path.open("wb") as file, tqdm(desc=path.name, unit="doc") as bar:
        for rows in tokenized.iter_batches(batch_size=None, batch_format="pyarrow"):
            documents = rows["tokens"].to_pylist()  # type: ignore[union-attr] # of a table
            if not all(isinstance(document, bytes) for document in documents):
                kind = type(documents[0]).__name__
                raise ValueError(f"tokenize: expected bytes as tokens, found {kind}")
            for document in documents:
                note(hash(document))
            ids = np.frombuffer(b"".join(documents), dtype)
            file.write(ids.data)
            found["documents"] += len(rows)
            found["tokens"] += len(ids)
            found["largest_id"] = max(found["largest_id"], int(ids.max()))
            bar.update(len(rows))
    return found


def _describe(config: TrainingConfig, *functions: Callable) -> list[str]:
    """What decides the tokens, but for the text itself, in lines."""
    lines = [
        f"dataset: {config.dataset}",
        f"tokenizer: {tokenizers.identity(config.tokenizer)}",
        f"dtype: {config.token_dtype}",
    ]
    for function in functions:
        lines += _source(function).splitlines()
    return lines


def _source(function: Callable) -> str:
    """The source of a function, as Python has it.

    Raises:
        ValueError: it isn't all that decides what the function does, or Python has none.
    """
    try:
        source = inspect.getsource(function)
    except (OSError, TypeError):  # a partial, an object, a cell that begins with %%time
        source = ""
    is_lambda = getattr(function, "__name__", "") == "<lambda>"
    if not source or is_lambda or getattr(function, "__closure__", None):
        raise ValueError(
            f"{function!r:.200} can't be compared with what made the tokens: give it a name "
            "with def, in a cell that begins with nothing else, and outside of functions"
        )
    return source
