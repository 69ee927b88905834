"""The documents that a run learns from: on the Hugging Face hub, in files, or built in.

A dataset of the hub and the built-in text are read by the datasets library and divided as
nanoGPT divides them. Files, of this machine or in an object store, are read by Ray Data, where
they are tokenized, and may be more than any machine holds; every so many documents, one is for
validation.
"""

import codecs
import glob
import io
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
import pyarrow as pa
import pyarrow.parquet
import ray.data
from ray.data.datasource import FileBasedDatasource

from trainkit import token_files, tokenizers

FORMATS = {
    ".txt": "UTF-8 text",
    ".json": "a list of JSON objects, or one in each line",
    ".jsonl": "a JSON object in each line",
    ".parquet": "Parquet",
}
SPLIT_SEED = 2357  # nanoGPT's


def read(config) -> ray.data.Dataset:
    """The documents, in order: rows of `text` and `split`, "train" or "val".

    Of files, `split` is empty: the document's place decides, as `token_files.is_val` says.

    Raises:
        FileNotFoundError, ConnectionError, ValueError: there are none, or not as text. What
            is wrong in a file, the task says that reads it.
    """
    if names_files(config.dataset):
        system, files = find_files(config.dataset)
        source = TextFiles(files, config.text_column, filesystem=system)
        found = ray.data.read_datasource(source)
        return found.limit(config.max_documents) if config.max_documents else found
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


class TextFiles(FileBasedDatasource):
    """Files of documents, each read as a stream, for Ray Data.

    Ray's own reader of JSON holds a whole file, and takes text that looks like a date for one.
    """

    def __init__(self, files: list[str], column: str, **options):
        super().__init__(files, **options)
        self.column = column

    def _open_input_source(self, filesystem, path, **options):
        if path.endswith(".parquet"):  # which is read from its end
            return filesystem.open_input_file(path)
        return super()._open_input_source(filesystem, path, **options)

    def _read_stream(self, file, path: str) -> Iterator[pa.Table]:
        texts = texts_in(file, path, self.column)
        while part := [*itertools.islice(texts, 100)]:
            yield pa.table({"text": part, "split": [""] * len(part)})


def texts_in(file, path: str, column: str) -> Iterator[str]:
    """The documents in a file that is open for reading.

    Raises:
        ValueError: with the place, what was found there, and what was expected.
        ConnectionError: the disk or the store gave no more of it.
    """
    suffix, count = suffix_of(path), 0
    try:
        for row in rows_in(file, suffix, column):
            if not isinstance(row, dict):
                raise TypeError(f"found {row!r:.60}")
            if not isinstance(text := row.get(column), str):
                raise TypeError(f"found {text!r:.60} in one of the columns {[*row]}")
            text.encode()  # or it is none
            yield text
            count += 1
        if not count and "json" in suffix:
            raise ValueError("it is empty")
    except Exception as error:  # a store's may be of any kind
        of_arrow = type(error) is OSError and error.errno is None  # as of a damaged .gz
        of_contents = (
            of_arrow,
            isinstance(error, TypeError | ValueError | pa.ArrowException),
        )
        if not any(of_contents):
            raise ConnectionError(
                f"dataset: {path} can't be read further after {count} documents: "
                f"{error!r:.300}. Check the disk or the store that has it, and try again"
            ) from error
        where = f"in the column {column!r}, which text_column names"
        raise ValueError(
            f"dataset: {path} can't be read after {count} documents: {error}. Expected "
            f"{FORMATS[suffix]}{'' if suffix == '.txt' else f', with text {where}'}. Mend "
            "it, or leave it out"
        ) from error


def rows_in(file, suffix: str, column: str) -> Iterator[dict]:
    """The rows of a file: a text file is one, and of Parquet, only that column is read."""
    if suffix == ".txt":
        yield {column: file.read().decode("utf-8-sig")}
    elif suffix == ".parquet":
        parquet = pyarrow.parquet.ParquetFile(file)
        columns = [column] if column in parquet.schema_arrow.names else None
        for batch in parquet.iter_batches(1_000, columns=columns):
            yield from batch.to_pylist()
    else:
        lines = io.BufferedReader(file, 2**20)
        if lines.peek(64).removeprefix(codecs.BOM_UTF8).lstrip()[:1] == b"[":
            yield from json.loads(lines.read())
        else:
            yield from map(json.loads, filter(bytes.strip, lines))


def names_files(name: str) -> bool:
    """Whether a dataset is in files; a folder here that has Parquet is as on the hub."""
    if name == "builtin" or os.path.isdir(name):
        return name != "builtin" and not any(Path(name).rglob("*.parquet"))
    is_path = re.search(r"[*?\[]|^/|://", name) or suffix_of(name) in FORMATS
    return bool(is_path) or os.path.exists(name)


def find_files(name: str) -> tuple[fsspec.AbstractFileSystem, list[str]]:
    """The files of that name, in order: one, those that match a pattern, or a folder's.

    Raises:
        ConnectionError, FileNotFoundError, ValueError: there are none that can be read.
    """
    try:
        system, path = fsspec.core.url_to_fs(name)
        system.invalidate_cache()
        if system.isfile(path):  # whatever else the name matches
            found = [path]
        else:
            search = system.find if system.isdir(path) else system.glob
            found = search(path, detail=True).items()
            found = [file for file, info in found if info["type"] == "file"]
    except Exception as error:  # of many kinds
        raise ConnectionError(
            f"dataset: cannot list {name} ({error!r:.300}). Check the address and, on every "
            "node, the credentials and the package for such addresses"
        ) from error
    start = len(os.path.commonpath(found)) if found else 0
    files = sorted(file for file in found if "/." not in file[start:])  # hidden
    if not files:
        raise FileNotFoundError(f"dataset: no file matches {name}")
    kinds = {suffix_of(file) for file in files}
    if len(kinds) > 1 or kinds - FORMATS.keys():
        raise ValueError(
            f"dataset: {name} names files that end in {', '.join(sorted(kinds))}; expected "
            f"one of {', '.join(FORMATS)}, or one of these and .gz or .zst. End the pattern "
            "in it, as in books/*.txt"
        )
    return system, files


def suffix_of(file: str) -> str:
    """How a file's name ends, less what says that it is compressed."""
    return Path(file.removesuffix(".gz").removesuffix(".zst")).suffix


def load(config) -> dict[str, datasets.Dataset]:
    """The documents of the hub or, built in, Python's help pages, in a column `text`.

    There is one split, "train"; a dataset of the hub may have a "validation", too.

    Raises:
        ConnectionError, ValueError: there are none, or not as text.
    """
    if config.dataset == "builtin":
        splits = {"train": datasets.Dataset.from_dict({"text": help_pages()})}
    else:
        splits = load_from_hub(config)
    column, most, parts = config.text_column, config.max_documents, {}
    for name, documents in splits.items():
        kind = getattr(documents.features.get(column), "dtype", None)
        if kind not in ("string", "large_string"):
            raise ValueError(
                f"text_column: expected a column {column!r} of strings in {config.dataset}, "
                f"found {documents.features}"
            )
        documents = documents.select_columns([column])
        if empty := documents.data.column(column).null_count:
            raise ValueError(
                f"dataset: {empty} documents in {config.dataset} have no text"
            )
        if column != "text":
            documents = documents.rename_column(column, "text")
        parts[name] = documents.take(min(most or len(documents), len(documents)))
    return parts


def help_pages() -> list[str]:
    """The prose of Python's help pages, a paragraph a line, without code and its marks."""
    pages = []
    for page in topics.values():
        page = re.sub('["*“”]', "", page)
        paragraphs = [" ".join(part.split()) for part in re.split(r"\n\s*\n", page)]
        prose = [p for p in paragraphs if re.fullmatch(r"[A-Z].{60,}[.:]", p)]
        pages.append("\n".join(p for p in prose if "::=" not in p and ">>>" not in p))
    return [page for page in pages if page]


def load_from_hub(config) -> dict[str, datasets.Dataset]:
    """The splits of a dataset of the Hugging Face hub, or of a folder in that form.

    With `max_documents`, no more is downloaded than the files in which these stand.

    Raises:
        ConnectionError: with what else to do.
    """
    name, most = config.dataset, config.max_documents
    cache = f"{config.data_dir}-download"  # which every node sees
    try:
        names = datasets.get_dataset_split_names(name)
        parts = {}
        for split in [s for s in ("train", "validation") if s in names]:
            if not most:
                parts[split] = datasets.load_dataset(name, split=split, cache_dir=cache)
                continue
            stream = datasets.load_dataset(name, split=split, streaming=True)
            parts[split] = datasets.Dataset.from_generator(
                iter_rows,
                gen_kwargs={"stream": stream, "most": most},
                features=stream.features,
                cache_dir=cache,
            )
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
    }
    if config.max_documents:
        found["max_documents"] = config.max_documents
    if os.path.exists(config.tokenizer):
        file = tokenizers.find_file(config.tokenizer)
        found["tokenizer_digest"] = token_files.file_digest(file)
    if config.text_column != "text":
        found["text_column"] = config.text_column
    version = token_files.file_digest
    if names_files(config.dataset):
        try:
            system, files = find_files(config.dataset)
        except (ConnectionError, FileNotFoundError) as error:
            if not (Path(config.data_dir) / "manifest.json").exists():
                raise
            print(f"{error}. The tokens in {config.data_dir} are used as they are.")
            return found
        if "://" in config.dataset:
            version = system.ukey  # sizes, times, and so on
    else:
        found["split_seed"] = SPLIT_SEED
        folder = glob.escape(config.dataset)  # if it is one
        files = sorted(glob.glob(f"{folder}/**/*.parquet", recursive=True))
    if files:  # your own, which may change
        contents = zlib.crc32("".join(map(str, map(version, files))).encode())
        found |= {"files": len(files), "digest": contents, "names": files}
    return found
