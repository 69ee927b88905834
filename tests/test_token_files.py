"""Token files: their folder, what is refused, and the order of their windows."""

import dataclasses
import gzip
import hashlib
import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from conftest import ROOT
from samples import shuffled_in_plain_integers

import trainkit.token_files
import trainkit.tokenizers


@pytest.mark.parametrize("files", [["train.bin"], ["val.bin", "notes"], ["manifest"]])
def test_other_files_are_left_alone(small, files):
    config = small()
    assert not trainkit.token_files.are_there(config)
    Path(config.data_dir).mkdir()
    assert not trainkit.token_files.are_there(config)
    for file in files:
        (Path(config.data_dir) / file).touch()
    with pytest.raises(FileExistsError, match="not both train.bin and val.bin"):
        trainkit.token_files.are_there(config)


def test_a_mounted_disk_is_refused(small, monkeypatch):
    """It couldn't be replaced by the finished folder."""
    monkeypatch.setattr(Path, "is_mount", lambda self: True)
    with pytest.raises(ValueError, match="mounted disk; choose a folder in it"):
        trainkit.token_files.are_there(small())


@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
def test_a_folder_appears_whole_or_not_at_all(small, tmp_path, error):
    """Where a link leads, if `data_dir` is one; leftovers of killed processes go."""
    (tmp_path / "disk").mkdir()
    config = small(data_dir=f"{tmp_path}/link")
    Path(config.data_dir).symlink_to("disk")
    folder = tmp_path / "disk"
    with pytest.raises(error):
        with trainkit.token_files.new_folder(config) as new:
            (new / "train.bin").touch()
            assert new.parent == tmp_path and not [*folder.iterdir()]
            raise error
    assert not [*tmp_path.glob("*.partial*")] and not [*folder.iterdir()]
    ended = subprocess.Popen(["true"])
    ended.wait()
    mine, host = str(os.getpid()), new.name.removesuffix(str(os.getpid()))
    for left in (f"{host}{ended.pid}", host + mine):  # a container may repeat a number
        (tmp_path / left).mkdir()
        (tmp_path / left / "val.bin").touch()
    others = {f"{host}{os.getppid()}", f"{host}1", f"{host}2-{ended.pid}"}
    for left in others:  # of processes that run, or of another host
        (tmp_path / left).mkdir()
    with trainkit.token_files.new_folder(config) as new:
        (new / "train.bin").touch()
    assert [path.name for path in folder.iterdir()] == ["train.bin"]
    assert {path.name for path in tmp_path.glob("*.partial*")} == others
    assert Path(config.data_dir).is_symlink()


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
    (folder / "manifest.json").write_text(json.dumps({"by": me}))
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
    by = json.loads((folder / "manifest.json").read_text())["by"]
    assert {(folder / f"{k}.bin").read_text() for k in ("train", "val")} == {by}
    assert not [*folder.parent.glob("*.partial*")]


def llm_c(ids, magic=20240520) -> bytes:
    return (
        np.array([magic, 1, len(ids), *[0] * 253], np.int32).tobytes() + ids.tobytes()
    )


@pytest.mark.parametrize(
    "encode, words",
    [
        (lambda ids: ids.astype(np.uint32).tobytes(), "four or more bytes a token"),
        (lambda ids: (ids + np.uint32(2**16)).tobytes(), "four or more bytes a token"),
        (lambda ids: ids.astype(np.int64).tobytes(), "four or more bytes a token"),
        (llm_c, "llm.c's: leave out its first 1,024 bytes"),
        (partial(llm_c, magic=20240801), "llm.c's: leave out its first 1,024 bytes"),
        (lambda ids: b"\x93NUMPY\x01\0v\0" + ids.tobytes(), "numpy.save: write the a"),
        (lambda ids: b"PK\x03\x04" + ids.tobytes(), "an archive of zip"),
        (lambda ids: gzip.compress(ids.tobytes()), "an archive of zip or gzip"),
        (lambda ids: b"A text, and more of it.\n" * 99, "text: set dataset to it"),
    ],
)
def test_other_formats_are_told_apart(small, write_bins, encode, words):
    config = write_bins(small(vocab_size=50_257))
    trainkit.token_files.check(config)
    ids = np.random.default_rng(0).integers(0, 50_257, 4_000, np.uint16)
    path = trainkit.token_files.path_of(config, "val")
    data = encode(ids)
    path.write_bytes(data + b"\n" * (len(data) % 2))
    with pytest.raises(ValueError, match=f"{path}: expected .*uint16.*{words}"):
        trainkit.token_files.check(config)


@pytest.mark.parametrize("other", ["meta.pkl", "train.idx"])
def test_tokens_of_another_program_are_refused(small, write_bins, other):
    """As nanoGPT's of characters, and Megatron's."""
    config = write_bins(small())
    (Path(config.data_dir) / other).touch()
    with pytest.raises(ValueError, match=f"another program, which left {other} beside"):
        trainkit.token_files.check(config)


def test_characters_are_no_tokens_of_gpt2(small, write_bins):
    """65 of them, even without their meta.pkl; tokens of one's own may be as few."""
    letters = write_bins(small(vocab_size=65))
    assert trainkit.token_files.check(letters)["tokens"] == {"train": 2001, "val": 401}
    with pytest.raises(
        ValueError, match="ids up to 64, but vocab_size is 50257.*charac"
    ):
        trainkit.token_files.check(dataclasses.replace(letters, vocab_size=50_257))


def test_what_tokens_are_taken_for_is_said(small, capsys, monkeypatch):
    config = small(vocab_size=50_257, eval_steps=1, batch_size=1)
    Path(config.data_dir).mkdir()
    for split in ("train", "val"):
        ids = trainkit.tokenizers.load("gpt2").encode_ordinary("Some words. " * 50)
        path = trainkit.token_files.path_of(config, split)
        np.array([*ids, 50_256], np.uint16).tofile(path)
    assert "already in" in trainkit.token_files.check(config)["source"]
    said = capsys.readouterr().out
    assert "no manifest" in said and "gpt2; the last file begins with 'Some w" in said
    monkeypatch.setattr(trainkit.tokenizers, "load", {}.__getitem__)  # no network
    trainkit.token_files.check(config)
    assert "KeyError" in capsys.readouterr().out


@pytest.mark.parametrize(
    "split, tokens, words",
    [
        ("train", None, "train.bin"),
        ("train", b"", "train.bin has 0 bytes"),
        ("train", b"123", "train.bin has 3 bytes"),
        ("train", [1] * 16, "has 32 bytes; expected 2 for each .*than block_size .16"),
        ("val", [600] * 400, "val.bin may hold token ids up to 600.*vocab_size is 521"),
        ("train", [521] * 400, "train.bin may hold token ids up to 521"),
        ("val", [8] * 128, "has 7 windows, .* asks for 8. Set one of these lower"),
    ],
)
def test_unusable_files(small, write_bins, split, tokens, words):
    config = write_bins(small(), val_tokens=129)  # 8 windows
    trainkit.token_files.check(config)
    path = trainkit.token_files.path_of(config, split)
    if tokens is None:
        path.unlink()
    else:
        raw = isinstance(tokens, bytes)
        path.write_bytes(tokens if raw else np.array(tokens, np.uint16).tobytes())
    with pytest.raises((FileNotFoundError, ValueError), match=words):
        trainkit.token_files.check(config)


def test_own_files_need_not_be_read_to_be_checked(small, write_bins):
    config = write_bins(small(vocab_size=50_257))
    np.full(400, 60_000, np.uint16).tofile(Path(config.data_dir) / "val.bin")
    (Path(config.data_dir) / "manifest.json").touch()
    trainkit.token_files.check(config)
    with pytest.raises(ValueError, match="ids up to 50256, but vocab_size is 50256"):
        trainkit.token_files.check(dataclasses.replace(config, vocab_size=50_256))


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


@pytest.mark.parametrize(
    "text, found",
    [
        ("", "JSONDecodeError"),
        ('{"source": ', "JSONDecodeError"),
        ("[]", "TypeError"),
        ('{"tokens": {}}', "KeyError"),
        ('{"source": {}, "tokens": {"val": 402}}', "val.bin has 802 bytes, not 804"),
    ],
)
def test_what_is_damaged_is_named(small, write_bins, text, found):
    folder = Path(write_bins(small()).data_dir)
    (folder / "manifest.json").write_text(text)
    words = f"manifest.json or what it describes is damaged .*{found}.* Delete"
    with pytest.raises(ValueError, match=words):
        trainkit.token_files.read_manifest(folder)


def test_a_file_that_ends_too_soon(small, write_bins):
    config = write_bins(small())
    last = trainkit.token_files.count_windows(config, "train")
    assert trainkit.token_files.read(config, "train", np.array([0, last - 1])).any()
    with pytest.raises(OSError, match=f"train.bin ended.* in window {last}"):
        trainkit.token_files.read(config, "train", np.array([0, last]))


@pytest.mark.parametrize("size", [1, 2, 5, 16, 17, 1_025, 8_823_810])
def test_order_of_windows_never_changes(size):
    """It is a permutation; runs that began with an older version go on in the same order."""
    index = np.arange(min(size, 1_025))
    for key in (0, 1, 1337 * 2**32 + 5):
        keys = np.full(len(index), key)
        found = trainkit.token_files.shuffle_index(index, size, keys)
        expected = [shuffled_in_plain_integers(int(i), size, key) for i in index]
        assert found.dtype == np.int64 and found.tolist() == expected
        assert len({*expected}) == len(index) and max(expected) < size


@pytest.mark.parametrize("first_step, at_once", [(0, 8), (7, 8), (0, 9), (19, 1)])
def test_lists_of_windows_are_the_steps_of_a_run(
    small, monkeypatch, first_step, at_once, write_bins
):
    config = write_bins(small())  # 20 steps of 4 windows
    monkeypatch.setattr(trainkit.token_files, "WINDOWS_IN_RANGE", at_once)
    steps = range(first_step, config.max_steps)
    found = list(trainkit.token_files.window_numbers(config, "train", steps))
    expected = trainkit.token_files.windows_of(config, "train", steps)
    np.testing.assert_array_equal(np.concatenate(sum(found, [])), expected)
    assert all(sum(map(len, part)) * config.batch_size < at_once + 4 for part in found)


@pytest.mark.parametrize(
    "rows, steps, sizes",
    [
        (4, 3, [3]),
        (4, 256, [128, 128]),
        (512, 3, [1] * 3),
        (600, 2, [1] * 2),
        (1, 513, [512, 1]),
    ],
)
def test_a_task_reads_whole_steps(small, write_bins, rows, steps, sizes):
    """Of 512 windows, or of one step, if it has more."""
    config = write_bins(small(batch_size=rows, eval_steps=1))
    (parts,) = trainkit.token_files.window_numbers(config, "train", range(steps))
    assert [part.shape for part in parts] == [(size, rows) for size in sizes]


def test_a_list_has_a_hundred_thousand_windows(small, write_bins):
    """131,072 in batches of 480 are 273.1 steps; a worker has some rows of each."""
    config, rows = write_bins(small(batch_size=480)), np.array([3, 5])
    steps = range(7, 600_000)
    lists = trainkit.token_files.window_numbers(config, "train", steps, rows)
    (first, second) = (np.concatenate(next(lists)) for _ in range(2))
    assert first.shape == (274, 2) and first.dtype == np.int64
    expected = trainkit.token_files.windows_of(config, "train", range(281, 555))
    np.testing.assert_array_equal(second, expected[:, rows])


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
