"""The documents that a run learns from: on the Hugging Face hub, in files, or built in.

Files, of this machine or in an object store, are read by Ray Data, where they are tokenized,
in the order of their paths, and may be more than any machine holds; every so many documents,
one is for validation. A dataset of the hub and the built-in text are read by the datasets
library and divided as nanoGPT divides them.
"""

import errno
import functools
import hashlib
import io
import itertools
import json
import math
import os
import re
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from pydoc_data.topics import topics

import datasets
import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet
import ray.data
from fsspec.implementations.local import LocalFileSystem
from tqdm import tqdm

from trainkit import token_files, tokenizers

FORMATS = {
    ".txt": "UTF-8 text",
    ".json": "a list of JSON objects, or one in each line",
    ".jsonl": "a JSON object in each line",
    ".parquet": "Parquet",
}
CODECS = {".gz": "gzip", ".zst": "zstd"}
HUB = "hub:"  # before a folder that has the form of a dataset of the hub
SPLIT_SEED = 2357  # nanoGPT's
LARGEST = 2**30  # characters of a document, whose tokens take ten times the memory
TASK = 2**23  # bytes of text that a task reads, about


def existing(config, tokenize: Callable) -> dict | None:
    """The manifest of the token files that are already in `config.data_dir`, if any.

    Args:
        tokenize: what `prepare_dataset` maps documents with: a function of rows, which have
            `text` and `split`, and the configuration, to rows of `split` and `tokens`.

    Raises:
        FileExistsError: the folder holds tokens of another source, or other files.
        ValueError: the files can't be trained on, as `token_files.check` says.
    """
    folder = Path(config.data_dir)
    if not token_files.are_there(config):
        return None
    if not (folder / "manifest.json").exists():
        return token_files.check(config)
    manifest = token_files.read_manifest(folder)
    was = manifest["source"]  # what an older version didn't note can't be compared
    now = describe(config, tokenize, manifest.get("first documents", []))
    try:
        now |= versions(*find_files(config.dataset)[:2])
    except (ConnectionError, FileNotFoundError) as error:
        print(f"{error}. The tokens in {folder} are used as they are.")
    if others := [key for key in now if key in was and was[key] != now[key]]:
        differing = [f"{key} was {was[key]!r}, and is {now[key]!r}" for key in others]
        raise FileExistsError(
            f"data_dir: {folder} holds tokens of another source: {'; '.join(differing)}. "
            "Choose another data_dir, or delete that folder."
        )
    token_files.check(config)
    return manifest


def describe(config, tokenize: Callable, first: list[str]) -> dict:
    """What the tokens of `config` are made from and how, but for what the files contain.

    Args:
        first: the first documents, by whose tokens `tokenize` is known, too.
    """
    keys = ("dataset", "dataset_config", "text_column", "max_documents", "val_fraction")
    hashed = hashlib.blake2b(digest_size=8)
    for text in (*tokenizers.SAMPLES, *first):
        rows = {"text": np.array([text], object), "split": np.array([""])}
        try:
            found = [bytes(document) for document in tokenize(rows, config)["tokens"]]
        except Exception as error:  # it may know fewer characters than `SAMPLES` have
            found = type(error).__name__
        hashed.update(repr(found).encode())
    return {key: getattr(config, key) for key in keys} | {
        "tokenizer_identity": tokenizers.identity(config.tokenizer),
        "what tokenize does": hashed.hexdigest(),
        "dtype": config.token_dtype,
    }


def read(config) -> ray.data.Dataset:
    """The documents, in order: rows of `text` and `split`, "train" or "val".

    Of files, `split` is empty, since the document's place decides, as `is_val` says; with a
    file's last document, `split` says how many it had.

    Raises:
        FileNotFoundError, ConnectionError, ValueError: there are none, or not as text. What
            is wrong in a file, the task says that reads it.
    """
    column = config.text_column
    if in_files(config.dataset):
        if config.dataset_config:
            raise ValueError("dataset_config: only a dataset of the hub has one")
        system, files, left_out = find_files(config.dataset)
        if left_out:
            names = ", ".join(left_out[:3])
            print(f"dataset: left out, as names with . or _: {len(left_out)}, {names}")

        def read_files(rows: dict[str, np.ndarray]) -> Iterator[pa.Table]:
            for file in rows["item"]:
                texts, count = texts_in(system, file, column), 0
                after = [*itertools.islice(texts, 100)]
                while part := after:
                    after = [*itertools.islice(texts, 100)]
                    count, split = count + len(part), [""] * len(part)
                    if not after:
                        split[-1] = f"{count} documents in {file}"
                    yield pa.table({"text": part, "split": split})

        blocks = min(math.ceil(sum(files.values()) / TASK) or 1, len(files))
        names = ray.data.from_items([*files], override_num_blocks=blocks)
        # With another number of CPUs, the tasks that tokenize a file are others, and many.
        found = names.map_batches(read_files, batch_size=None, num_cpus=0.5)
        found.context.target_max_block_size = TASK
        return found.limit(config.max_documents) if config.max_documents else found
    load.cache_clear()  # a folder may have changed
    parts = load(config)
    documents = datasets.concatenate_datasets([*parts.values()])
    shared, names = ray.put(documents), [*parts]  # of files, a description
    n_first = len(parts[names[0]])

    def fetch(rows: dict[str, np.ndarray]) -> pa.Table:
        texts = ray.get(shared)[rows["id"][0] : rows["id"][-1] + 1][column]
        split = np.where(rows["id"] < n_first, names[0], names[-1])
        return pa.table({"text": texts, "split": split.tolist()})

    blocks = min(math.ceil(documents.data.nbytes / TASK) or 1, len(documents))
    numbers = ray.data.range(len(documents), override_num_blocks=blocks)
    return numbers.map_batches(fetch, batch_size=None)


def texts_in(system, path: str, column: str) -> Iterator[str]:
    """The documents in a file, in order.

    Raises:
        ValueError: with the place, what was found there, and what was expected.
    """
    (kind, codec), count = kind_of(path), 0
    try:
        with system.open(path, "rb") as file:
            for row in rows_in(pa.input_stream(file, codec), kind, column):
                if not isinstance(row, dict):
                    raise TypeError(f"found {row!r:.60}")
                if not isinstance(text := row.get(column), str):
                    raise TypeError(f"found {text!r:.60}, in the columns {[*row]}")
                text.encode()  # or it is none
                if len(text) > LARGEST:
                    raise ValueError(f"it has more than {LARGEST:,} characters; cut it")
                yield text
                count += 1
        if not count and "json" in kind:
            raise ValueError("it is empty")
    except Exception as error:  # a store's may be of any kind
        said = str(error) or repr(error)
        where = f", with text in the column {column!r}, which text_column names"
        raise ValueError(
            f"dataset: {path} can't be read after {count} documents: {said:.300}. "
            f"Expected {FORMATS[kind]}{where * (kind != '.txt')}. Mend it, leave it out, or, "
            "if it is the disk or the store that gave no more of it, try again"
        ) from error


def rows_in(file: pa.NativeFile, kind: str, column: str) -> Iterator[dict]:
    """The rows of a file: a text file is one, and of Parquet, only that column is read."""
    if kind == ".txt":
        yield {column: file.read().decode("utf-8-sig")}
    elif kind == ".parquet":
        parquet = pyarrow.parquet.ParquetFile(file)
        columns = [column] if column in parquet.schema_arrow.names else None
        for batch in parquet.iter_batches(1_000, columns=columns):
            yield from batch.to_pylist()
    else:
        lines = io.BufferedReader(file, 2**20)
        if lines.peek(64).decode("utf-8-sig", "ignore").lstrip()[:1] == "[":
            yield from json.loads(lines.read())
        else:
            yield from map(json.loads, filter(bytes.strip, lines))


def in_files(name: str) -> bool:
    """Whether a dataset is in files; other names, but for "builtin", are of the hub."""
    if name == "builtin" or name.startswith(HUB):
        return False
    is_path = re.search(r"[*?\[]|^\.{0,2}/|://", name) or kind_of(name)[0] in FORMATS
    return bool(is_path) or os.path.exists(name)


class LinksFollowed(LocalFileSystem):
    """The files of this machine; a link is what it leads to."""

    def info(self, path, **options) -> dict:
        """As of the file or folder; a link to a folder that it lies in stays one."""
        found = super().info(path, **options)
        place = found["name"]
        if os.path.isfile(place):
            found["type"] = "file"
        elif os.path.isdir(place):
            inside = os.path.realpath(os.path.dirname(place)) + "/"
            if not inside.startswith(os.path.realpath(place) + "/"):
                found["type"] = "directory"
        return found


def find_files(name: str) -> tuple[fsspec.AbstractFileSystem, dict, list[str]]:
    """The files of that name: one, those that match a pattern, or all that a folder has.

    Of a name of the hub, they are those of the folder, if it is one.

    Returns:
        Their file system, their sizes by path, sorted, and what is left out: files that begin
        with . or _, or lie in such folders below the one that is named, as `_SUCCESS`.

    Raises:
        ConnectionError, FileNotFoundError, ValueError: there are none that can be read.
    """
    system, path = LocalFileSystem(), os.path.abspath(name)
    if not in_files(name):
        paths = Path(name.removeprefix(HUB)).rglob("[!.]*")
        return system, {str(path): 0 for path in sorted(paths) if path.is_file()}, []
    try:
        if "://" in name:
            system, path = fsspec.core.url_to_fs(name)
        if isinstance(system, LocalFileSystem):
            system = LinksFollowed()
        system.invalidate_cache()
        above = path
        if system.isfile(path):  # whatever else the name matches
            found = {path: system.info(path)}
        elif system.isdir(path):
            found = system.find(path, detail=True)
        else:
            above = re.split(r"[*?\[]", path)[0].rpartition("/")[0]
            found = system.glob(path, detail=True)
    except Exception as error:  # of many kinds
        raise ConnectionError(
            f"dataset: cannot list {name} ({error!r:.300}). Check the address and, on every "
            "node, the credentials and the package for such addresses"
        ) from error
    found = {file: info for file, info in found.items() if info["type"] != "directory"}
    hidden = [f for f in found if re.search(r"/[._]", f.removeprefix(above))]
    files = {f: found[f].get("size") or 0 for f in sorted({*found} - {*hidden})}
    if not files:
        raise FileNotFoundError(f"dataset: no file matches {name}")
    for file in files:
        if found[file]["type"] != "file" or re.search(r"[\ud800-\udfff]", file):
            raise ValueError(
                f"dataset: {name} names {file!r}, which can't be read: a link that leads "
                "nowhere or back, no file, or a name that isn't UTF-8. Mend it, or move it"
            )
    kinds = {kind_of(file)[0]: file for file in files}
    if len(kinds) > 1 or kinds.keys() - FORMATS.keys():
        raise ValueError(
            f"dataset: {name} names files that end in {', '.join(sorted(kinds))}, such as "
            f"{', '.join(kinds.values())}; expected one of {', '.join(FORMATS)}, or one of "
            "these and .gz or .zst. End the pattern in it, as in books/*.txt"
        )
    return system, files, hidden


def kind_of(file: str) -> tuple[str, str | None]:
    """How a file's name ends and what it is compressed by; an address may have a query."""
    if file.startswith(("http://", "https://")):
        file = file.partition("?")[0]
    path = Path(file)
    codec = CODECS.get(path.suffix)
    return Path(path.stem if codec else file).suffix.lower(), codec


@functools.lru_cache(1)  # `write` asks for what `read` has loaded
def load(config) -> dict[str, datasets.Dataset]:
    """The documents of the hub or, built in, Python's help pages: "train" and "val".

    A dataset that has no split named "validation" is divided as nanoGPT divides it, unless it
    has too few documents for that: these are left to `write`, under the name "".

    Raises:
        ConnectionError, ValueError: there are none, or not as text.
    """
    if config.dataset == "builtin":
        splits = [datasets.Dataset.from_dict({"text": help_pages()})]
    else:
        splits = load_from_hub(config)
    column, parts = config.text_column, []
    for documents in splits:
        kind = getattr(documents.features.get(column), "dtype", None)
        strings = kind in ("string", "large_string")
        if not strings or documents.data.column(column).null_count:
            raise ValueError(
                f"text_column: expected a column {column!r} of strings, without gaps, in "
                f"{config.dataset}, found {documents.features}"
            )
        documents = documents.select_columns([column])
        parts.append(documents.take(config.max_documents or len(documents)))
    if len(parts) == 1:
        (documents,), fraction = parts, config.val_fraction
        if math.ceil(fraction * len(documents)) >= len(documents):
            return {"": documents}
        parts = documents.train_test_split(fraction, seed=SPLIT_SEED).values()
    return dict(zip(("train", "val"), parts))


def help_pages() -> list[str]:
    """The prose of Python's help pages, a paragraph a line, without code and its marks."""
    pages = []
    for page in topics.values():
        page = re.sub('["*“”]', "", page)
        paragraphs = [" ".join(part.split()) for part in re.split(r"\n\s*\n", page)]
        prose = [p for p in paragraphs if re.fullmatch(r"[A-Z].{60,}[.:]", p)]
        pages.append("\n".join(p for p in prose if "::=" not in p and ">>>" not in p))
    return [page for page in pages if page]


def load_from_hub(config) -> list[datasets.Dataset]:
    """A dataset of the Hugging Face hub, or of a folder in that form: "train", "validation".

    With `max_documents`, no more is downloaded than the files in which these stand.

    Raises:
        ConnectionError: with what is wrong, and what else to do.
    """
    name, most = config.dataset.removeprefix(HUB), config.max_documents
    cache = f"{config.data_dir}-download"  # which every node sees
    options = {"name": config.dataset_config, "streaming": bool(most)}
    try:
        if re.search(r"[*?\[\]]", name):
            raise ValueError("the datasets library takes such a name for a pattern")
        names = datasets.get_dataset_split_names(name, config.dataset_config)
        if "train" not in names:
            raise ValueError(f"it has the splits {names}, and none is named 'train'")
        parts = []
        for split in [s for s in ("train", "validation") if s in names]:
            found = datasets.load_dataset(name, split=split, cache_dir=cache, **options)
            if most:  # `found.take` would open the next file, too
                rows = functools.partial(itertools.islice, found, most)
                found = datasets.Dataset.from_generator(
                    rows, features=found.features, cache_dir=cache
                )
            parts.append(found)
    except Exception as error:  # of many kinds
        raise ConnectionError(
            f"dataset: cannot load {name!r} from the Hugging Face hub ({error}). Check "
            "the name, dataset_config, and the network, set `dataset` to local .txt, "
            ".jsonl, or .parquet files, or put a train.bin and a val.bin in "
            f"{config.data_dir}."
        ) from error
    return parts


def versions(system: fsspec.AbstractFileSystem, files: Iterable[str]) -> dict:
    """How many files there are, and what tells them from others; nothing if there are none."""
    local = isinstance(system, LocalFileSystem)
    version = token_files.file_digest if local else system.ukey
    contents = [str(version(file)) for file in files]
    digest = zlib.crc32("".join(contents).encode())
    return {"files": len(contents), "digest": digest} if contents else {}


def write(config, tokenized: ray.data.Dataset, tokenize: Callable) -> dict:
    """Make `config.data_dir` of tokenized documents, in order; return its manifest.

    Args:
        tokenized: rows of `split`, as `read` gives it, and `tokens`, a document's tokens as
            the bytes of numbers of `config.token_dtype`.
        tokenize: the function that made them, as `existing` takes it.

    Raises:
        OSError: the disk is full.
        ValueError: one of the splits has no documents, a document of a file is missing, the
            tokenizer changes texts, or as `token_files.check` says.
    """
    column, (system, files, _) = config.text_column, find_files(config.dataset)
    source = versions(system, files)
    if in_files(config.dataset):
        texts = itertools.chain(*(texts_in(system, file, column) for file in files))
    else:
        files, texts = {}, next(iter(load(config).values()))[column]
    first = [text[:1_000] for text in itertools.islice(texts, 100)]
    tokenizers.check(tokenizers.load(config.tokenizer), first, config.tokenizer)
    source |= describe(config, tokenize, first) | {"tokenizer": config.tokenizer}
    with token_files.new_folder(config.data_dir) as folder:
        try:
            found = write_tokens(config, folder, tokenized, [*files])
        except OSError as error:
            if error.errno == errno.ENOSPC:
                error.strerror = (
                    f"data_dir: the disk of {folder.parent} has no room for the tokens. "
                    "Make some, or set data_dir to another disk"
                )
            raise
        manifest = {"source": source} | found | {"first documents": first}
        (folder / "manifest.json").write_text(json.dumps(manifest, indent=2))
    token_files.check(config)
    return manifest


def write_tokens(
    config, folder: Path, tokenized: ray.data.Dataset, names: list[str]
) -> dict:
    """Write train.bin and val.bin; return what is in them: documents, tokens, files.

    Of a single document, the end is for validation.

    Args:
        names: the files that the documents are from; none, of another dataset.
    """
    size, fraction = np.dtype(config.token_dtype).itemsize, config.val_fraction
    files, documents, since, names_left = {}, 0, 0, iter(names)
    with (
        (folder / "train.bin").open("wb") as train,
        (folder / "val.bin").open("wb") as val,
        tqdm(desc=folder.parent.name, unit="doc") as bar,
    ):
        for place, tokens in documents_in(tokenized):
            since += 1
            if " documents in " in place:
                count, _, file = place.partition(" documents in ")
                if int(count) != since or file not in names_left:
                    raise ValueError(
                        f"dataset: {file} has {count} documents, and tokenize gave {since} "
                        "for it. It must give a row for each, and files must stay the same"
                    )
                files[file], since = since, 0
            if place not in ("train", "val"):
                place = "val" if is_val(documents, fraction) else "train"
            (val if place == "val" else train).write(tokens)
            documents += 1
            bar.update()
        if documents == 1 and not train.tell():
            n = len(tokens) // size
            cut = size * (n - math.ceil(fraction * n))
            val.seek(0)
            val.truncate()
            train.write(tokens[:cut])
            val.write(tokens[cut:])
        tokens = {"train": train.tell() // size, "val": val.tell() // size}
    if not all(tokens.values()):
        lacking = "train on; set it lower"
        if tokens["train"]:
            lacking = "validate with; set it higher"
        raise ValueError(
            f"val_fraction: {fraction} of {documents} documents leaves none to {lacking}, or "
            "bring more documents"
        )
    absent = [file for file in names if file not in files]
    if config.max_documents:  # which may end within a file
        files |= {file: since for file in absent[: bool(since)]}
    elif lost := [file for file in absent if since or kind_of(file)[0] != ".parquet"]:
        raise ValueError(f"dataset: of {lost[0]}, no document arrived, or not all")
    return {"documents": documents, "tokens": tokens, "files": files}


def documents_in(tokenized: ray.data.Dataset) -> Iterator[tuple[str, bytes]]:
    """The split and the tokens of each document, in order however the tasks finish.

    Raises:
        ValueError, ConnectionError: what a task of ours found wrong.
    """
    tokenized.context.enable_progress_bars = False
    tokenized.context.execution_options.preserve_order = True
    try:
        for rows in tokenized.iter_batches(batch_size=None):
            yield from zip(rows["split"], rows["tokens"])
    except ray.exceptions.RayTaskError as error:  # which has the task's error as text
        for kind in (ValueError, ConnectionError):  # raised on purpose
            ours = rf"{kind.__name__}: ((?:dataset|tokenizer): .*)"
            if found := re.search(ours, str(error)):
                raise kind(found[1]) from error
        raise


def is_val(place: int, fraction: float) -> bool:
    """Whether the document at that place, from 0, is for validation.

    These are the first and others, evenly spread: of n documents, `fraction` of n, rounded up.
    """
    # Rounded, because 25 * 0.28 is a little more than 7.
    before, after = (round(n * fraction, 9) for n in (place, place + 1))
    return math.ceil(after) > math.ceil(before)
