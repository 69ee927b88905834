"""Documents: the functions that give them, and what Ray Data reads of theirs."""

import math
import re
from collections.abc import Callable
from pydoc_data.topics import topics

import datasets
import pyarrow as pa
import ray
from ray.data import Dataset

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


def shakespeare(downloads: str) -> list[datasets.Dataset]:
    """A million characters of plays, cut in two where nanoGPT cuts them."""
    place = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data"
    options = {
        "data_files": f"{place}/tinyshakespeare/input.txt",
        "cache_dir": downloads,
    }
    plays = datasets.load_dataset(
        "text", split="train", sample_by="document", **options
    )
    (text,) = plays["text"]
    cut = len(text) * 9 // 10
    return [datasets.Dataset.from_dict({"text": [x]}) for x in (text[:cut], text[cut:])]


def tinystories(downloads: str) -> list[datasets.Dataset]:
    """The first 1.25 of 2.1 million stories for children: about 270 million tokens."""
    name, splits = "roneneldan/TinyStories", ["train[:1250000]", "validation"]
    return datasets.load_dataset(name, split=splits, cache_dir=downloads)


def openwebtext(downloads: str) -> datasets.DatasetDict:
    """nanoGPT's text and split: by its count, 8,013,769 web pages, 9 billion tokens."""
    pages = datasets.load_dataset(
        "Skylion007/openwebtext", split="train", cache_dir=downloads
    )
    return pages.train_test_split(test_size=0.0005, seed=2357)


def read(config: TrainingConfig, dataset: Callable) -> list[Dataset]:
    """The two datasets that `dataset(downloads)` gives, of Ray or of Hugging Face's library.

    `downloads` is a folder beside `config.data_dir`, which all nodes see. Of two splits by
    name, `train` is the first.

    Raises:
        ValueError: it gives something else.
    """
    made = dataset(f"{config.data_dir}-downloads")
    if isinstance(made, dict) and "train" in made:  # such as a DatasetDict
        made = [made[name] for name in sorted(made, key="train".__ne__)]
    kinds = Dataset | datasets.Dataset
    parts = made if isinstance(made, list | tuple) else [made]
    if len(parts) != 2 or not all(isinstance(part, kinds) for part in parts):
        found = [type(part).__name__ for part in parts[:3]]
        raise ValueError(
            f"dataset: {config.dataset} returned {found}. "
            "Expected two datasets, of Ray Data or of Hugging Face's library, to train and to "
            "validate with; of splits by name, one is train"
        )
    return [_to_ray(part) for part in parts]


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
