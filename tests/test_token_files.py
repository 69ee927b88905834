"""Token files: what is refused, and the order of their windows."""

import dataclasses
import errno
import hashlib
import io
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import ray
from samples import shuffled_in_plain_integers

import trainkit.token_files
from trainkit.config import TrainingConfig

ROOT = Path(__file__).resolve().parent.parent


def test_half_of_the_files_stops_at_once(small, write_bins):
    config = write_bins(small())
    (Path(config.data_dir) / "val.bin").unlink()
    with pytest.raises(FileExistsError, match="not both train.bin and val.bin"):
        trainkit.token_files.existing(config, {})


def test_a_mounted_disk_is_refused(small, monkeypatch):
    """It couldn't be replaced by the finished folder."""
    config = small()
    assert trainkit.token_files.existing(config, {}) is None
    Path(config.data_dir).mkdir()
    assert trainkit.token_files.existing(config, {}) is None
    monkeypatch.setattr(Path, "is_mount", lambda self: True)
    with pytest.raises(ValueError, match="mounted disk; choose a folder in it"):
        trainkit.token_files.existing(config, {})


def test_other_tokens_are_left_alone(small):
    config, source = small(), {"dataset": "builtin", "files": 2}
    with trainkit.token_files.new_folder(config) as folder:
        written = trainkit.token_files.write_manifest(folder, source, 7, {"train": 8})
    assert trainkit.token_files.existing(config, source) == written
    without_files = {"dataset": "builtin"}
    assert trainkit.token_files.existing(config, without_files) == written
    for other in ({"dataset": "other"}, {"split_seed": 1}, source | {"files": 3}):
        with pytest.raises(FileExistsError, match="data_dir: .*Choose another"):
            trainkit.token_files.existing(config, other)


def partial_folders(config) -> list[Path]:
    return list(Path(config.data_dir).parent.glob("*.partial*"))


@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
def test_a_folder_appears_whole_or_not_at_all(small, error):
    config = small()
    folder = Path(config.data_dir)
    with pytest.raises(error):
        with trainkit.token_files.new_folder(config) as new:
            (new / "train.bin").touch()
            assert [new] == partial_folders(config) and not folder.exists()
            raise error
    assert not partial_folders(config) and not folder.exists()
    killed = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"],
                            capture_output=True, text=True).stdout.strip()  # fmt: skip
    for process in (killed, os.getpid()):  # a container may give it out again
        left = new.with_name(new.name.replace(str(os.getpid()), str(process)))
        left.mkdir()
        (left / "val.bin").touch()
    other_host = new.with_name(f"{new.name.replace(str(os.getpid()), '')}2-{killed}")
    other_host.mkdir()
    with trainkit.token_files.new_folder(config) as new:
        (new / "train.bin").touch()
    assert [path.name for path in folder.iterdir()] == ["train.bin"]
    assert partial_folders(config) == [other_host]


PREPARE = """
import json, pathlib, sys, time
import trainkit.config, trainkit.token_files
me, other, settings = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
config = trainkit.config.TrainingConfig(**settings)
with trainkit.token_files.new_folder(config) as folder:
    (folder / "train.bin").write_bytes(me.encode())
    (pathlib.Path(config.data_dir).parent / me).touch()
    while not (pathlib.Path(config.data_dir).parent / other).exists():
        time.sleep(0.02)
    (folder / "val.bin").write_bytes(me.encode())
    trainkit.token_files.write_manifest(folder, {"by": me}, 1, {})
"""


def test_two_processes_prepare_the_same_folder(small):
    """At the same time: both succeed, and the files of one of them are there."""
    config = small()
    settings = json.dumps(dataclasses.asdict(config))
    Path(config.data_dir).parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-c", PREPARE]
    both = [
        subprocess.Popen([*command, *names, settings], cwd=ROOT)
        for names in (("a", "b"), ("b", "a"))
    ]
    assert [process.wait(60) for process in both] == [0, 0]
    folder = Path(config.data_dir)
    by = json.loads((folder / "manifest.json").read_text())["source"]["by"]
    assert {(folder / f"{k}.bin").read_text() for k in ("train", "val")} == {by}
    assert not partial_folders(config)


def llm_c(ids, magic=20240520) -> bytes:
    header = np.zeros(256, np.int32)
    header[:3] = magic, 1, len(ids)
    return header.tobytes() + ids.tobytes()


def llm_c_of_llama(ids) -> bytes:
    return llm_c(ids, 20240801)


def numpys(ids) -> bytes:
    np.save(file := io.BytesIO(), ids)
    return file.getvalue()


@pytest.mark.parametrize(
    "encode, words",
    [
        (lambda ids: ids.astype(np.uint32).tobytes(), "four bytes for each token"),
        (lambda ids: (ids + np.uint32(2**16)).tobytes(), "four bytes for each token"),
        (llm_c, "llm.c: leave out its first 1,024 bytes"),
        (llm_c_of_llama, "llm.c: leave out its first 1,024 bytes"),
        (numpys, "numpy.save: write the array with tofile"),
    ],
)
def test_other_formats_are_told_apart(small, write_bins, encode, words):
    config = write_bins(small(vocab_size=50_257))
    trainkit.token_files.check(config)
    ids = np.random.default_rng(0).integers(0, 50_257, 4_000, np.uint16)
    path = trainkit.token_files.path_of(config, "val")
    path.write_bytes(encode(ids))
    with pytest.raises(ValueError, match=f"{path}: expected .*uint16.*{words}"):
        trainkit.token_files.check(config)


@pytest.mark.parametrize(
    "contents, words",
    [
        (None, "does not exist"),
        (b"", "has 0 bytes"),
        (b"123", "has 3 bytes"),
        (b"1234" * 8, "has 32 bytes.*expected 2 for .*block_size"),  # 16 tokens
    ],
)
def test_unusable_files(small, write_bins, contents, words):
    config = write_bins(small())
    path = Path(config.data_dir) / "train.bin"
    path.unlink() if contents is None else path.write_bytes(contents)
    with pytest.raises((FileNotFoundError, ValueError), match=f"train.bin.*{words}"):
        trainkit.token_files.check(config)


def test_token_beyond_the_vocabulary(small, write_bins):
    config = write_bins(small())
    np.full(400, 600, np.uint16).tofile(Path(config.data_dir) / "val.bin")
    with pytest.raises(
        ValueError, match="val.bin may hold token ids up to 600.*vocab_size is 521"
    ):
        trainkit.token_files.check(config)


def test_own_files_need_not_be_read_to_be_checked(small, write_bins):
    config = write_bins(small(vocab_size=50_257))
    np.full(400, 60_000, np.uint16).tofile(Path(config.data_dir) / "val.bin")
    with pytest.raises(ValueError, match="ids up to 60000"):
        trainkit.token_files.check(config)
    (Path(config.data_dir) / "manifest.json").touch()
    trainkit.token_files.check(config)
    with pytest.raises(ValueError, match="ids up to 50256, but vocab_size is 50256"):
        trainkit.token_files.check(dataclasses.replace(config, vocab_size=50_256))


def test_too_few_validation_windows(small, write_bins):
    config = write_bins(small(eval_steps=99))
    with pytest.raises(ValueError, match="25 windows.*396. Set one of these lower"):
        trainkit.token_files.check(config)


@pytest.mark.parametrize(
    "tokens, windows", [(17, 1), (32, 1), (33, 2), (48, 2), (49, 3), (50, 3)]
)
def test_a_window_needs_a_token_after_its_last(small, tokens, windows):
    """Of 16 tokens and the one that follows: 48 tokens are two windows, and 49 three."""
    config = small(eval_steps=1, batch_size=1)
    folder = Path(config.data_dir)
    folder.mkdir(parents=True)
    for split in ("train", "val"):
        np.arange(100, 100 + tokens, dtype=np.uint16).tofile(folder / f"{split}.bin")
    assert trainkit.token_files.count_windows(config, "val") == windows
    trainkit.token_files.check(config)
    last = trainkit.token_files.read(config, "val", np.array([windows - 1, 0]))
    assert last[:, 0].tolist() == [84 + 16 * windows, 100]
    assert last[0].tolist() == list(range(84 + 16 * windows, 101 + 16 * windows))


def test_exactly_enough_validation_windows(small, write_bins):
    """Three batches of four windows need 12, and so 193 tokens."""
    config = write_bins(small(eval_steps=3), val_tokens=193)
    trainkit.token_files.check(config)
    config = write_bins(config, val_tokens=192)
    with pytest.raises(ValueError, match="has 11 windows, .* asks for 12"):
        trainkit.token_files.check(config)


def test_a_file_that_ends_too_soon(small, write_bins):
    config = write_bins(small())
    last = trainkit.token_files.count_windows(config, "train")
    assert trainkit.token_files.read(config, "train", np.array([0, last - 1])).any()
    with pytest.raises(OSError, match=f"train.bin ended.* in window {last}"):
        trainkit.token_files.read(config, "train", np.array([0, last]))


@pytest.mark.parametrize("size", [1, 2, 3, 17, 1000, 4096, 4097])
def test_shuffle_is_a_permutation(size):
    index = np.arange(size)
    orders = [
        trainkit.token_files.shuffle_index(index, size, np.full(size, key))
        for key in range(3)
    ]
    for order in orders:
        assert sorted(order) == list(range(size))
    if size > 16:
        assert (orders[0] != orders[1]).any() and (orders[1] != orders[2]).any()


def test_mix_is_splitmix64():
    """The generator adds its gamma and mixes; its first numbers from the seed 1234567 are
    published with the reference, and in Rosetta Code."""
    gamma = 0x9E3779B97F4A7C15
    states = np.array([1234567 + n * gamma for n in (1, 2, 3)], object) % 2**64
    assert trainkit.token_files.mix(states.astype(np.uint64)).tolist() == [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
    ]


@pytest.mark.parametrize("size", [1, 2, 5, 16, 17, 300])
def test_order_of_windows_never_changes(size):
    """Runs that began with an older version go on in the same order."""
    index, keys = np.arange(size), (0, 1, 1337 * 2**32 + 5)
    for key in keys:
        found = trainkit.token_files.shuffle_index(index, size, np.full(size, key))
        expected = [shuffled_in_plain_integers(i, size, key) for i in range(size)]
        assert found.dtype == np.int64 and found.tolist() == expected


def test_shuffle_looks_random():
    """Neighbors end up far apart, and displacement has no bias, at OpenWebText's size."""
    size, key = 8_823_810, np.zeros(20_000, np.int64)
    order = trainkit.token_files.shuffle_index(np.arange(20_000), size, key)
    assert len(set(order.tolist())) == len(order)
    assert abs(order.mean() / size - 0.5) < 0.01
    gaps = np.abs(np.diff(order)) / size
    assert abs(gaps.mean() - 1 / 3) < 0.01  # two uniform draws differ by 1/3 on average


@pytest.mark.parametrize("first_step, at_once", [(0, 8), (7, 8), (0, 9), (19, 1)])
def test_stretches_are_the_steps_of_a_run(small, monkeypatch, first_step, at_once):
    config = small()  # 20 steps of 4 windows
    monkeypatch.setattr(trainkit.token_files, "WINDOWS_IN_RANGE", at_once)
    steps = range(first_step, config.max_steps)
    found = list(trainkit.token_files.cut_steps(config, steps))
    assert [step for steps in found for step in steps] == list(range(first_step, 20))
    assert all(len(steps) * config.batch_size < at_once + 4 for steps in found)


def test_data_dir_may_be_a_link(small, tmp_path):
    """What is written goes where the link leads."""
    (tmp_path / "disk").mkdir()
    config = small(data_dir=str(tmp_path / "link"))
    Path(config.data_dir).symlink_to(tmp_path / "disk")
    assert trainkit.token_files.existing(config, {}) is None
    with trainkit.token_files.new_folder(config) as folder:
        (folder / "train.bin").touch()
    assert (tmp_path / "disk/train.bin").exists() and Path(config.data_dir).is_symlink()


def test_data_dir_that_cannot_be_made_is_refused_at_once(small, tmp_path):
    (tmp_path / "file").touch()
    config = small(data_dir=str(tmp_path / "file/data"))
    with pytest.raises(PermissionError, match="data_dir: .*file is a file. Choose"):
        trainkit.token_files.existing(config, {})


def test_vocabulary_that_is_not_there_and_cannot_be_fetched(tmp_path):
    """In a process of its own: tiktoken keeps what it has read."""
    result = subprocess.run(
        [sys.executable, "-c", "import trainkit.tokenizers as t; t.load('gpt2')"],
        cwd=ROOT,
        env=os.environ
        | {"TIKTOKEN_CACHE_DIR": str(tmp_path), "HTTPS_PROXY": "http://127.0.0.1:9"},
        capture_output=True,
        text=True,
    )
    (line,) = [x for x in result.stderr.splitlines() if x.startswith("ConnectionError")]
    assert (
        "the vocabulary of gpt2 is not on this machine" in line
        and "TIKTOKEN_CACHE_DIR" in line
    )
    assert "ci/offline_vocabulary.py" in line


@pytest.mark.parametrize(
    "fraction, places",
    [(0.5, [0, 2, 4, 6, 8]), (0.3, [0, 3, 6, 10]), (0.0005, [0, 2_000])],
)
def test_documents_for_validation_are_evenly_spread(fraction, places):
    found = [n for n in range(4_000) if trainkit.token_files.is_val(n, fraction)]
    assert found[: len(places)] == places
    assert len(found) == pytest.approx(4_000 * fraction, abs=1)


@pytest.mark.parametrize(
    "rows, steps, sizes",
    [
        (4, 3, [3]),
        (4, 256, [128, 128]),
        (512, 3, [1] * 3),
        (600, 2, [1, 1]),
        (1, 513, [512, 1]),
    ],
)
def test_a_task_reads_whole_steps(rows, steps, sizes):
    """Of 512 windows, or of one step, if it has more."""
    numbers = np.arange(rows * steps).reshape(steps, rows)
    parts = trainkit.token_files.parts_of(numbers)
    assert [len(part) for part in parts] == sizes
    np.testing.assert_array_equal(np.concatenate(parts), numbers)


def test_a_stretch_has_a_hundred_thousand_windows():
    """131,072 in batches of 480 are 273.1 steps."""
    steps = trainkit.token_files.cut_steps(TrainingConfig(), range(7, 600_000))
    assert next(steps) == range(7, 281) and next(steps).start == 281


@pytest.mark.parametrize("ray_runs, actor", [(False, None), (True, None), (True, "a1")])
def test_rows_in_order_and_one_cpu_for_a_worker(monkeypatch, ray_runs, actor):
    options = SimpleNamespace(preserve_order=False, resource_limits="all")
    context = SimpleNamespace(execution_options=options, enable_progress_bars=True)
    this = SimpleNamespace(get_actor_id=lambda: actor)
    monkeypatch.setattr(ray, "is_initialized", lambda: ray_runs)
    monkeypatch.setattr(ray, "get_runtime_context", lambda: this)
    trainkit.token_files.read_in_order(context)
    assert options.preserve_order and not context.enable_progress_bars
    if actor:
        assert options.resource_limits.cpu == 1
    else:
        assert options.resource_limits == "all"


def test_which_processes_run(monkeypatch):
    running = trainkit.token_files.is_running
    ended = subprocess.Popen(["true"])
    ended.wait()
    assert running(os.getpid()) and running(str(os.getpid()))
    assert not running(ended.pid) and not running(str(ended.pid))
    assert running("2-17")  # of another host

    def denied(process, number):
        assert number == 0  # which only asks
        raise PermissionError

    monkeypatch.setattr(trainkit.token_files.os, "kill", denied)
    assert running(1)  # another user's


class Documents:
    """A dataset of tokenized documents, in batches of (split, tokens)."""

    context = None

    def __init__(self, *batches, error=None):
        self.batches, self.error = batches, error

    def iter_batches(self, batch_size):
        for batch in self.batches:
            splits, documents = zip(*batch)
            tokens = [np.array(ids, np.uint16).tobytes() for ids in documents]
            yield {"split": splits, "tokens": tokens}
        if self.error:
            raise self.error


@pytest.fixture
def write(small, monkeypatch):
    """Writes documents into the data_dir of a small configuration; returns both."""
    monkeypatch.setattr(trainkit.token_files, "read_in_order", lambda context: None)

    def write(*batches, error=None, **changes):
        config = small(**changes)
        source = {"dataset": "mine"}
        documents = Documents(*batches, error=error)
        return config, trainkit.token_files.write(config, documents, source)

    return write


def tokens_in(config) -> list[list[int]]:
    paths = [trainkit.token_files.path_of(config, split) for split in ("train", "val")]
    return [np.fromfile(path, np.uint16).tolist() for path in paths]


def test_documents_go_where_their_split_says(write):
    batches = [("val", [1, 2]), ("train", [3])], [("train", [4, 5, 6])]
    config, manifest = write(*batches)
    assert tokens_in(config) == [[3, 4, 5, 6], [1, 2]]
    assert manifest == {
        "source": {"dataset": "mine"},
        "documents": 3,
        "tokens": {"train": 4, "val": 2},
    }
    text = (Path(config.data_dir) / "manifest.json").read_text()
    assert json.loads(text) == manifest
    assert trainkit.token_files.existing(config, {"dataset": "mine"}) == manifest


def test_documents_without_a_split_are_spread(write):
    """Half of them are for validation: the first, the third, and the fifth."""
    config, manifest = write([("", [n]) for n in range(1, 7)], val_fraction=0.5)
    assert tokens_in(config) == [[2, 4, 6], [1, 3, 5]]
    assert manifest["tokens"] == {"train": 3, "val": 3}


@pytest.mark.parametrize("split", ["train", "val"])
def test_a_split_without_documents_is_refused(write, split):
    with pytest.raises(
        ValueError, match="val_fraction: 0.25 of 3 documents leaves none"
    ):
        write([(split, [1])] * 3, val_fraction=0.25)


@pytest.mark.parametrize(
    "number, kind, words",
    [
        (errno.ENOSPC, OSError, "data_dir: the disk of .* has no room"),
        (errno.EIO, OSError, "broken cable"),
    ],
)
def test_a_disk_that_is_full_says_what_helps(write, small, number, kind, words):
    documents = [("train", [1]), ("val", [2])]
    with pytest.raises(kind, match=words) as error:
        write(documents, error=OSError(number, "broken cable"))
    assert error.value.errno == number
    assert not Path(small().data_dir).exists() and not partial_folders(small())


def test_what_a_task_of_ours_says_is_said(write):
    """Ray gives the task's error as text."""

    def task_error(text):
        return ray.exceptions.RayTaskError("read", f"Traceback\n{text}\n", Exception())

    said = task_error("ConnectionError: tokenizer: no vocabulary here")
    with pytest.raises(ConnectionError, match="^tokenizer: no vocabulary here$"):
        write([("train", [1])], error=said)
    with pytest.raises(ray.exceptions.RayTaskError, match="KeyError: 'x'"):
        write([("train", [1])], error=task_error("KeyError: 'x'"))


def test_the_digest_of_a_file_is_that_of_earlier_runs(tmp_path):
    """Manifests keep it: BLAKE2b, 8 bytes, of the size in decimal and the contents."""
    (tmp_path / "a").write_bytes(b"abc")
    expected = hashlib.blake2b(b"3abc", digest_size=8).hexdigest()
    assert trainkit.token_files.file_digest(tmp_path / "a") == expected


@pytest.mark.parametrize("size", [0, 1, 2**16, 2**27])
def test_digest_sees_the_beginning_the_end_and_the_size(tmp_path, size):
    path = tmp_path / "file"

    def digest(place=None, size=size):
        with path.open("wb") as file:
            file.truncate(size)
            if place is not None:
                file.seek(place)
                file.write(b"x")
        return trainkit.token_files.file_digest(path)

    places = {0, size - 1} if size else set()
    digests = [digest(), digest(size=size + 1), *map(digest, sorted(places))]
    assert len(set(digests)) == len(digests) and digest() == digests[0]
