"""The documents that a run learns from: on the Hugging Face hub, in files, or built in."""

import glob
import json
import math
import os
from functools import partial
from pathlib import Path
from pydoc_data.topics import topics

import datasets
import pyarrow.parquet

FILE_FORMATS = {
    ".txt": ("text", {"sample_by": "document"}),  # one document a file
    ".json": ("json", {}),
    ".jsonl": ("json", {}),
    ".parquet": ("parquet", {}),
}
SPLIT_SEED = 2357  # nanoGPT's


def load(config) -> datasets.Dataset:
    """The documents of `config.dataset`, in a column named `text`.

    "builtin" is text that every Python installation carries, the help pages of the
    language.

    Raises:
        FileNotFoundError, ConnectionError, ValueError: there are none, or not as text.
    """
    if config.dataset == "builtin":
        return datasets.Dataset.from_dict({"text": list(topics.values())})
    files = sorted(glob.glob(config.dataset))
    suffix = Path(config.dataset).suffix
    if files and suffix not in FILE_FORMATS:
        raise ValueError(
            f"dataset: {files[0]} is not one of {', '.join(FILE_FORMATS)}; end the "
            f"pattern {config.dataset} in one of these"
        )
    if not files and suffix in FILE_FORMATS:
        raise FileNotFoundError(f"dataset: no file matches {config.dataset}")
    cache = f"{config.data_dir}-download"  # where every node sees it
    load_dataset = partial(datasets.load_dataset, split="train", cache_dir=cache)
    if files:
        builder, options = FILE_FORMATS[suffix]
        try:
            documents = load_dataset(builder, data_files=files, **options)
        except Exception as error:
            raise ValueError(f"dataset: {flaw(files) or error}") from error
    else:
        documents = load_from_hub(load_dataset, config)
    if "text" not in documents.column_names:
        raise ValueError(
            f"dataset: {config.dataset} has the columns {documents.column_names}, "
            "but training needs one named 'text'"
        )
    if documents.features["text"].dtype not in ("string", "large_string"):
        raise ValueError(
            f"dataset: the column 'text' of {config.dataset} holds "
            f"{documents.features['text'].dtype}, expected strings"
        )
    if empty := documents.data.column("text").null_count:
        raise ValueError(f"dataset: {empty} documents in {config.dataset} have no text")
    return documents


def flaw(files: list[str]) -> str | None:
    """The first of `files` that can't be read, with the place and what is wrong there."""
    for file in files:
        try:
            if file.endswith(".parquet"):
                pyarrow.parquet.read_table(file)
                continue
            text = Path(file).read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            return f"{file} is no UTF-8 text at byte {error.start}; expected plain text"
        except (OSError, pyarrow.ArrowException) as error:
            return f"{file} can't be read: {error}. Make it anew, or leave it out"
        if file.endswith(".jsonl"):
            for number, line in enumerate(text.splitlines(), 1):
                try:
                    json.loads(line or "{}")
                except json.JSONDecodeError as error:
                    return (
                        f"{file}, line {number}: expected a JSON object, found {error}"
                    )
    return None


def load_from_hub(load_dataset, config) -> datasets.Dataset:
    """A dataset of the Hugging Face hub, or an error that says what else to do."""
    try:
        return load_dataset(config.dataset)
    except (OSError, RuntimeError, ValueError) as error:
        raise ConnectionError(
            f"dataset: cannot load {config.dataset!r} from the Hugging Face hub "
            f"({error}). Check the name and the network, set `dataset` "
            "to local .txt, .jsonl, or .parquet files, or put a train.bin and a "
            f"val.bin in {config.data_dir}."
        ) from error


def split(documents: datasets.Dataset, config) -> dict[str, datasets.Dataset]:
    """The documents to train on and to validate with, divided as nanoGPT divides them.

    Raises:
        ValueError: there are too few.
    """
    if len(documents) < 2:
        raise ValueError(
            f"dataset: {config.dataset} has {len(documents)} document(s), but a training "
            "and a validation document are needed"
        )
    parts = documents.train_test_split(
        test_size=config.val_fraction, seed=SPLIT_SEED, shuffle=True
    )
    return {"train": parts["train"], "val": parts["test"]}


def count_blocks(documents: datasets.Dataset) -> int:
    """Into how many tasks to divide `documents`, so that each has some 8 MB of text."""
    table = documents.data  # of which `documents` may be a part
    size = table.nbytes * len(documents) / table.num_rows
    return max(1, min(math.ceil(size / 2**23), len(documents)))


def describe(config) -> dict:
    """What the tokens of `config` are made from, to recognize them by."""
    source = {
        "dataset": config.dataset,
        "tokenizer": "gpt2",
        "val_fraction": config.val_fraction,
        "split_seed": SPLIT_SEED,
    }
    if files := glob.glob(config.dataset):  # your own, which may change
        source |= {"files": len(files), "bytes": sum(map(os.path.getsize, files))}
    return source
