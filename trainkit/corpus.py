"""Token files of documents, in their order; Ray Data tokenizes them."""

import difflib
import inspect
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from ray.data import Dataset
from ray.util.debug import log_once
from tqdm import tqdm

from trainkit import documents, paths, token_files, tokenization
from trainkit.config import TrainingConfig


def write(config: TrainingConfig, dataset: Callable, tokenize: Callable) -> dict:
    """Make `config.data_dir` of documents, in their order; return its manifest.

    If `data_dir` has tokens that these functions made, they are used again.

    Args:
        dataset: as for `documents.read`.
        tokenize: `tokenize({"text": ...}, config)` returns `{"tokens": ...}`, the bytes of
            numbers of `config.token_dtype`. Ray Data maps it over the documents.

    Raises:
        FileExistsError: the tokens were made in another way, or there are other files.
        ValueError: as `documents.read` and `token_files.check`, or a part has no documents, or
            train has over a quarter of val's, or a function can't be compared next time.
    """
    made_from = _describe(config, dataset, tokenize)
    if existing := _existing(config, made_from):
        return existing
    by = f"{dataset.__name__} and {tokenize.__name__}"
    manifest: dict[str, Any] = {"made": f"{time.strftime('%Y-%m-%d %H:%M')} by {by}"}
    manifest["made_from"] = made_from
    parts = documents.read(config, dataset)
    with paths.new_folder(config.data_dir) as folder:
        given = {"tokenize": tokenize, "config": config}
        train, val = (part.map(_tokenize, fn_kwargs=given) for part in parts)
        # Of val's documents; in train, those that are there, too.
        hashes: set[int] = set()
        in_val = _append(folder / "val.bin", val, config.token_dtype, hashes.add)
        repeated: set[int] = set()

        def said() -> str:
            both, val = len(repeated), len(hashes)
            return f"{both:,} of {val:,} different documents in val are in train, too"

        def note(document: int) -> None:
            if document in hashes:
                repeated.add(document)
                if len(repeated) > _MOST_REPEATED * len(hashes):
                    raise ValueError(
                        f"dataset: {said()}, at least. A source that shuffles anew each "
                        "time it is read gives each part other documents: seed it. If the "
                        "texts repeat, split by a hash, which keeps equal ones together"
                    )

        in_train = _append(folder / "train.bin", train, config.token_dtype, note)
        for key in in_train:
            manifest[key] = {"train": in_train[key], "val": in_val[key]}
        if not all(manifest["documents"].values()):
            raise ValueError(f"dataset: an empty part in {manifest['documents']}")
        if repeated:
            print(f"{said()}.")
        (folder / "manifest.json").write_text(json.dumps(manifest, indent=1))
    token_files.check(config, manifest)
    return manifest


# A source that shuffles anew each time it is read gives train all but the fraction f that val
# takes, so 1 - f of val's documents, half of them or more. Texts that repeat documents stay
# below: "over 4% of the validation set of standard datasets" is in train, too (Lee et al. 2022,
# "Deduplicating training data makes language models better", with near duplicates).
_MOST_REPEATED = 0.25


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
    was = manifest["made_from"]
    if was != made_from:
        lines = difflib.unified_diff(was, made_from, "was", "is", lineterm="", n=1)
        raise FileExistsError(
            f"data_dir: {folder} holds tokens that were made in another way. Give the "
            "dataset's function another name, choose another data_dir, or delete that "
            "folder:\n" + "\n".join(lines)
        )
    token_files.check(config, manifest)
    made = f"{manifest['tokens']} tokens, made {manifest['made']}"
    print(f"{folder} is used again: {made}")
    return manifest


def _tokenize(row: dict, **given: Any) -> dict:
    """What `tokenize` returns, and the length of the text, in bytes of UTF-8."""
    tokens = given["tokenize"](row, given["config"])
    return {**tokens, "bytes": len(row["text"].encode())}


def _append(path: Path, tokenized: Dataset, dtype: str, note: Callable) -> dict:
    """Write the tokens of documents to a file, and `note` each one's hash; what is in it."""
    tokenized.context.enable_progress_bars = False
    # Or Ray would say that it shows none.
    log_once("ray_data_progress_manager_disabled")
    tokenized.context.execution_options.preserve_order = True
    found = {"documents": 0, "bytes": 0, "tokens": 0, "largest_id": 0}
    with path.open("wb") as file, tqdm(desc=path.name, unit="doc") as bar:
        for rows in tokenized.iter_batches(batch_size=None, batch_format="pyarrow"):
            columns = rows.to_pydict()  # type: ignore[union-attr] # of a table
            texts = columns["tokens"]
            for tokens in texts:
                note(hash(tokens))
            ids = np.frombuffer(b"".join(texts), dtype)
            file.write(ids.data)
            found["documents"] += len(rows)
            found["bytes"] += sum(columns["bytes"])
            found["tokens"] += len(ids)
            found["largest_id"] = max(found["largest_id"], int(ids.max()))
            bar.update(len(rows))
    return found


def _describe(config: TrainingConfig, *functions: Callable) -> list[str]:
    """What decides the tokens, but for the text itself, in lines."""
    lines = [
        f"dataset: {config.dataset}",
        f"tokenizer: {tokenization.identity(config.tokenizer)}",
        f"dtype: {config.token_dtype}",
    ]
    for function in functions:
        lines += _source(function).splitlines()
    return lines


def _source(function: Callable) -> str:
    """The source of a function, as Python has it."""
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
