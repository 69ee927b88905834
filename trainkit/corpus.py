"""The documents that a run learns from: on the Hugging Face hub, in files, or built in.

A dataset of the hub, files of this machine, and the built-in text are read by the datasets
library and divided as nanoGPT divides them. Files that a URL names are read by Ray Data, where
they are tokenized, and may be more than any machine holds; every so many documents, one is for
validation.
"""

import glob
import itertools
import json
import math
import os
import re
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from pydoc_data.topics import topics

import datasets
import fsspec
import numpy as np
import pyarrow.parquet
import ray.data

from trainkit import fingerprints, tokenizers

FILE_FORMATS = {
    ".txt": ("text", {"sample_by": "document", "encoding": "utf-8-sig"}),  # one a file
    ".json": ("json", {}),
    ".jsonl": ("json", {}),
    ".parquet": ("parquet", {}),
}
SPLIT_SEED = 2357  # nanoGPT's


def read(config) -> ray.data.Dataset:
    """The documents, in order: rows of `text` and `split`, "train" or "val".

    Of files that a URL names, `split` is empty: the document's place decides, as
    `token_files.is_val` says.

    Raises:
        FileNotFoundError, ConnectionError, ValueError: there are none, or not as text.
    """
    if "://" in config.dataset:
        return read_url(config)
    parts = split(load(config), config)
    documents = datasets.concatenate_datasets([parts["train"], parts["val"]])
    n_train, shared = len(parts["train"]), ray.put(documents)  # of files, a description

    def fetch(rows: dict[str, np.ndarray]) -> dict:
        first, last = int(rows["id"][0]), int(rows["id"][-1])
        texts = ray.get(shared)[first : last + 1]["text"]
        return {"text": texts, "split": np.where(rows["id"] < n_train, "train", "val")}

    blocks = count_blocks(documents)
    numbers = ray.data.range(len(documents), override_num_blocks=blocks)
    return numbers.map_batches(fetch, batch_size=None)


def read_url(config) -> ray.data.Dataset:
    """The same for files in an object store, on the hub (hf://), or of a machine (file://)."""
    system, files = find_remote(config)
    suffix, column = suffix_of(files[0]), config.text_column
    if suffix == ".parquet":
        found = ray.data.read_parquet(files, filesystem=system)
        if column in found.schema().names:
            found = found.select_columns([column])  # and read no others
    elif suffix == ".txt":
        column, options = "bytes", {"filesystem": system, "include_paths": True}
        found = ray.data.read_binary_files(files, **options)
    else:
        found = ray.data.read_json(files, filesystem=system)

    def check_texts(rows: pyarrow.Table) -> dict:
        if column not in rows.column_names:
            raise ValueError(
                f"text_column: {config.dataset} has the columns {rows.column_names}, and "
                f"none named {column!r}"
            )
        texts = rows[column].to_pylist()
        if suffix == ".txt":
            texts = list(map(decode, texts, rows["path"].to_pylist()))
        if not all(isinstance(text, str) for text in texts):
            raise ValueError(
                f"dataset: the column {column!r} of {config.dataset} holds "
                f"{rows[column].type}, or documents without text; expected strings"
            )
        return {"text": texts, "split": [""] * len(texts)}

    documents = found.map_batches(check_texts, batch_size=None, batch_format="pyarrow")
    return documents.limit(config.max_documents) if config.max_documents else documents


def decode(content: bytes, path: str) -> str:
    """The text of a file."""
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"dataset: {path} is no UTF-8 text at byte {error.start}; expected plain text"
        ) from error


def find_remote(config) -> tuple[fsspec.AbstractFileSystem, list[str]]:
    """The files that a URL names, in order: a pattern of them, or all in a folder.

    Raises:
        ConnectionError, FileNotFoundError, ValueError: there are none that can be read.
    """
    url = config.dataset
    try:
        system, path = fsspec.core.url_to_fs(url)
        system.invalidate_cache()
        found = system.find(path) if system.isdir(path) else system.glob(path)
    except ImportError as error:
        raise ConnectionError(f"dataset: {url} needs a package: {error}") from error
    except Exception as error:  # of many kinds
        raise ConnectionError(
            f"dataset: cannot list {url} ({error!r:.300}). Check the address and, on every "
            "node, the credentials"
        ) from error
    files = sorted(file for file in found if suffix_of(file) in FILE_FORMATS)
    if not files:
        raise FileNotFoundError(
            f"dataset: no file matches {url} that ends in {', '.join(FILE_FORMATS)}, or in "
            "one of these and .gz or .zst"
        )
    if len(kinds := {suffix_of(file) for file in files}) > 1:
        raise ValueError(
            f"dataset: {url} matches files of several kinds: {sorted(kinds)}"
        )
    return system, files


def suffix_of(file: str) -> str:
    """How a file's name ends, less what says that it is compressed."""
    return Path(file.removesuffix(".gz").removesuffix(".zst")).suffix


def load(config) -> dict[str, datasets.Dataset]:
    """The documents of `config.dataset`, in a column named `text`, by split.

    There is one split, "train"; a dataset of the hub may have a "validation", too.
    "builtin" is text that every Python installation carries, the help pages of the
    language.

    Raises:
        FileNotFoundError, ConnectionError, ValueError: there are none, or not as text.
    """
    name = config.dataset
    files = find_files(config)
    folder = Path(name)
    if name == "builtin":
        splits = {"train": datasets.Dataset.from_dict({"text": [*topics.values()]})}
    elif folder.is_dir() and any(folder.rglob("*.parquet")):
        splits = load_from_hub(config)
    elif folder.is_dir():
        raise ValueError(
            f"dataset: {name} is a folder; name the files in it, as in {name}/*.txt"
        )
    elif files or Path(name).suffix in FILE_FORMATS or re.search(r"[*?\[]|^/", name):
        splits = {"train": load_files(files, config)}
    else:
        splits = load_from_hub(config)
    most, parts = config.max_documents, {}
    for name, documents in splits.items():
        check(documents, config)
        documents = documents.select_columns([config.text_column])
        if config.text_column != "text":
            documents = documents.rename_column(config.text_column, "text")
        parts[name] = documents.take(min(most or len(documents), len(documents)))
    return parts


def check(documents: datasets.Dataset, config) -> None:
    """Refuse documents without a column of text."""
    column = config.text_column
    if column not in documents.column_names:
        raise ValueError(
            f"dataset: {config.dataset} has the columns {documents.column_names}, but "
            f"training needs one named {column!r}; text_column names another"
        )
    feature = documents.features[column]
    kind = getattr(feature, "dtype", f"values of several types, as {feature}")
    if kind not in ("string", "large_string"):
        raise ValueError(
            f"dataset: the column {column!r} of {config.dataset} holds {kind}, expected strings"
        )
    if empty := documents.data.column(column).null_count:
        raise ValueError(f"dataset: {empty} documents in {config.dataset} have no text")


def find_files(config) -> list[str]:
    """The files that `config.dataset` names, if it doesn't name a dataset of the hub.

    A file of exactly that name comes before a pattern.
    """
    if os.path.isfile(config.dataset):
        return [config.dataset]
    return sorted(filter(os.path.isfile, glob.glob(config.dataset, recursive=True)))


def cache(config) -> str:
    """Where the datasets library keeps what it has read, so that every node sees it."""
    return f"{config.data_dir}-download"


def load_files(files: list[str], config) -> datasets.Dataset:
    """The documents in files that this machine sees."""
    suffix = Path(config.dataset).suffix
    if not files:
        raise FileNotFoundError(f"dataset: no file matches {config.dataset}")
    if suffix not in FILE_FORMATS:
        raise ValueError(
            f"dataset: {files[0]} is not one of {', '.join(FILE_FORMATS)}; end the "
            f"pattern {config.dataset} in one of these"
        )
    builder, options = FILE_FORMATS[suffix]
    options = options | {"split": "train", "cache_dir": cache(config)}
    try:
        # `datasets` takes these names for patterns again.
        names = list(map(glob.escape, files))
        return datasets.load_dataset(builder, data_files=names, **options)
    except Exception as error:
        cause = error.__cause__ or error
        reason = (
            first_unreadable(files) or f"{config.dataset} can't be read: {cause!r:.300}"
        )
        raise ValueError(f"dataset: {reason}") from error


def first_unreadable(files: list[str]) -> str | None:
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
        if not text.strip() and not file.endswith(".txt"):
            return f"{file} is empty; expected documents, or leave it out"
        if file.endswith(".json"):
            try:
                rows = json.loads(text)
            except json.JSONDecodeError as error:
                if text.lstrip()[:1] != "[":
                    continue  # an object in each line, perhaps
                return f"{file}: expected a list of JSON objects, found {error}"
            if not rows or not all(isinstance(row, dict) for row in [*rows]):
                return f"{file}: expected a list of JSON objects, found {text!s:.60}"
        if file.endswith(".jsonl"):
            for number, line in enumerate(text.splitlines(), 1):
                try:
                    json.loads(line or "{}")
                except json.JSONDecodeError as error:
                    return (
                        f"{file}, line {number}: expected a JSON object, found {error}"
                    )
    return None


def load_from_hub(config) -> dict[str, datasets.Dataset]:
    """The splits of a dataset of the Hugging Face hub, or of a folder in that form.

    With `max_documents`, no more is downloaded than the files in which these stand.

    Raises:
        ConnectionError: with what else to do.
    """
    name, most = config.dataset, config.max_documents
    try:
        names = datasets.get_dataset_split_names(name)
        used = [split for split in ("train", "validation") if split in names]
        parts = {
            split: datasets.load_dataset(
                name,
                split=split,
                **({"streaming": True} if most else {"cache_dir": cache(config)}),
            )
            for split in used
        }
        if most:
            parts = {
                split: datasets.Dataset.from_generator(
                    iter_rows,
                    gen_kwargs={"stream": stream, "most": most},
                    features=stream.features,
                    cache_dir=cache(config),
                )
                for split, stream in parts.items()
            }
    except Exception as error:  # of many kinds
        raise ConnectionError(
            f"dataset: cannot load {name!r} from the Hugging Face hub ({error}). Check "
            "the name and the network, set `dataset` to local .txt, .jsonl, or .parquet "
            f"files, or put a train.bin and a val.bin in {config.data_dir}."
        ) from error
    if "train" not in parts:
        raise ValueError(
            f"dataset: {name} has the splits {names}, but training needs one named 'train'"
        )
    return parts


def iter_rows(stream: datasets.IterableDataset, most: int) -> Iterator[dict]:
    """The first rows of a stream. (`stream.take` would open the next file, too.)"""
    return itertools.islice(stream, most)


def split(splits: dict[str, datasets.Dataset], config) -> dict[str, datasets.Dataset]:
    """The documents to train on, "train", and to validate with, "val".

    A dataset that has no split named "validation" is divided as nanoGPT divides it.

    Raises:
        ValueError: there are too few.
    """
    documents = splits["train"]
    if "validation" in splits:
        return {"train": documents, "val": splits["validation"]}
    if len(documents) < 2:
        raise ValueError(
            f"dataset: {config.dataset} has {len(documents)} document(s), but a training "
            "and a validation document are needed"
        )
    if math.ceil(config.val_fraction * len(documents)) >= len(documents):
        raise ValueError(
            f"val_fraction: {config.val_fraction} of {len(documents)} documents leaves none "
            "to train on; set it lower, or bring more documents"
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


def describe(config, tokenize: Callable) -> dict:
    """What the tokens of `config` are made from, and by which code, to know them by."""
    found = {
        "dataset": config.dataset,
        "tokenizer": config.tokenizer,
        "dtype": config.token_dtype,
        "val_fraction": config.val_fraction,
        "split_seed": SPLIT_SEED,
        "code": fingerprints.of_code(tokenize),
    }
    if config.max_documents:
        found["max_documents"] = config.max_documents
    if os.path.exists(config.tokenizer):
        file = tokenizers.find_file(config.tokenizer)
        found["tokenizer_digest"] = fingerprints.of_file(file)
    if config.text_column != "text":
        found["text_column"] = config.text_column
    if "://" in config.dataset:
        try:
            system, files = find_remote(config)
        except (ConnectionError, FileNotFoundError) as error:
            if not (Path(config.data_dir) / "manifest.json").exists():
                raise
            print(f"{error}. The tokens in {config.data_dir} are used as they are.")
            return found
        versions = "".join(map(str, map(system.ukey, files)))  # sizes, times, and so on
        contents = zlib.crc32(versions.encode())
        return found | {"files": len(files), "digest": contents, "names": files}
    files = find_files(config) or glob.glob(
        f"{glob.escape(config.dataset)}/**/*.parquet", recursive=True
    )
    if files:  # your own, which may change
        files = sorted(files)
        contents = zlib.crc32("".join(map(fingerprints.of_file, files)).encode())
        found |= {
            "files": len(files),
            "bytes": sum(map(os.path.getsize, files)),
            "digest": contents,
            "names": files,
        }
    return found
