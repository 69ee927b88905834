"""Step 2: the folder of token files, what is refused, and the order of their windows."""

import dataclasses
import gzip
import hashlib
import os
import socket
import subprocess
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import ray.data
from accidents import wait_for
from samples import shuffled_in_plain_integers, without_a_cluster

from trainkit import sharding, token_files, tokenizers


def test_other_files_are_left_alone(small, monkeypatch):
    """And a mounted disk, which the finished folder couldn't replace."""
    config = small()
    folder = Path(config.data_dir)
    assert not token_files.are_there(config)
    folder.mkdir()
    assert not token_files.are_there(config)
    for file in ("train.bin", "notes"):
        (folder / file).touch()
        with pytest.raises(FileExistsError, match="not both train.bin and val.bin"):
            token_files.are_there(config)
    monkeypatch.setattr(Path, "is_mount", lambda self: True)
    with pytest.raises(ValueError, match="mounted disk; choose a folder in it"):
        token_files.are_there(small(data_dir=f"{folder}/new"))


@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
def test_a_folder_appears_whole_or_not_at_all(small, tmp_path, error):
    """Where a link leads, if `data_dir` is one; leftovers of killed processes go."""
    folder, config = tmp_path / "disk", small(data_dir=f"{tmp_path}/link")
    folder.mkdir()
    Path(config.data_dir).symlink_to("disk")

    def left_after_an_error() -> list[Path]:
        with pytest.raises(error), token_files.new_folder(config.data_dir) as new:
            (new / "train.bin").touch()
            assert new.parent == tmp_path and not [*folder.iterdir()]
            raise error
        return [*tmp_path.glob("*.partial*")]

    assert not left_after_an_error() and not [*folder.iterdir()]
    ended = subprocess.Popen(["true"])
    ended.wait()
    prefix, host = "disk.partial-", socket.gethostname()
    # Processes that have ended, of which one had this one's number, as in a container, and
    # of another host, long ago; such as run, and of another host a moment ago.
    gone = {f"{host}-{ended.pid}", f"{host}-{os.getpid()}", "other-2"}
    stay = {f"{host}-{os.getppid()}", f"{host}-1", f"other-{ended.pid}"}
    for owner in gone | stay:
        (tmp_path / f"{prefix}{owner}").mkdir()
        (tmp_path / f"{prefix}{owner}/val.bin").touch()
    for path in ("other-2", "other-2/val.bin"):
        os.utime(tmp_path / f"{prefix}{path}", times=(0, 0))
    left = {path.name.removeprefix(prefix) for path in left_after_an_error()}
    assert left == stay
    with token_files.new_folder(config.data_dir) as new:
        (new / "train.bin").touch()
    assert [path.name for path in folder.iterdir()] == ["train.bin"]
    assert Path(config.data_dir).is_symlink()


def test_two_processes_prepare_the_same_folder(tmp_path, monkeypatch):
    """At the same time: both succeed, and the files of the first to finish are there."""
    folder, names = tmp_path / "new/data", ("train.bin", "val.bin", "manifest.json")
    with token_files.new_folder(folder) as last:
        monkeypatch.setattr(os, "getpid", os.getppid)  # another one, which runs, too
        with token_files.new_folder(folder) as first:
            for name in names:
                (first / name).write_text("first")
        for name in names:
            (last / name).write_text("last")
    assert [path.read_text() for path in folder.iterdir()] == ["first"] * 3
    assert [path.name for path in folder.parent.iterdir()] == ["data"]


IDS = np.random.default_rng(0).integers(0, 50_257, 4_000, np.uint16)
BARE = IDS.tobytes()
LLM_C = [[magic, 1, 4_000, *[0] * 253] for magic in (20240520, 20240801)]
OLD, NEW = (np.array(header, np.int32).tobytes() + BARE for header in LLM_C)
OTHER = "bin: expected .*uint16.*"


@pytest.mark.parametrize(
    "name, data, words",
    [
        ("val.bin", IDS.astype(np.uint32), OTHER + "four or more bytes a token"),
        ("val.bin", IDS + np.uint32(2**16), OTHER + "four or more bytes a token"),
        ("val.bin", OLD, OTHER + "leave out its first 1,024 bytes"),
        ("val.bin", NEW, OTHER + "llm.c's"),
        ("val.bin", b"\x93NUMPY\x01\0v\0" + BARE, OTHER + "numpy.save: write the a"),
        ("val.bin", b"PK\x03\x04" + BARE, OTHER + "an archive of zip"),
        ("val.bin", gzip.compress(BARE)[:4_000], OTHER + "an archive of zip or gzip"),
        ("val.bin", b"A text, and more of it.\n" * 99, OTHER + "text: set dataset to it"),
        ("meta.pkl", b"", OTHER + "another program, which left meta.pkl"),  # nanoGPT's
        ("train.idx", b"", OTHER + "tokens of another program"),  # Megatron's
        ("train.bin", IDS[:16], "has 32 bytes; expected 2 for each .*than block_size .16"),
        ("train.bin", bytes(999), "has 999 bytes; expected 2 for each token"),
        ("val.bin", IDS[:128], "has 7 windows, .* asks for 8. Set one of these lower"),
        ("val.bin", IDS + np.uint16(9_000), "val.bin may hold .* up to 59.* is 50257"),
        ("train.bin", np.full(400, 50_257, np.uint16), "train.bin may hold .* up to 50257"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_other_formats_are_told_apart(small, write_bins, name, data, words):
    """And files that are too short, or have the tokens of another vocabulary."""
    config = write_bins(small(vocab_size=50_257), val_tokens=129)  # 8 windows
    token_files.check(config)
    (Path(config.data_dir) / name).write_bytes(data)
    with pytest.raises(ValueError, match=words):
        token_files.check(config)


def test_characters_are_no_tokens_of_gpt2(small, write_bins):
    """65 of them, even without their meta.pkl; with a manifest, the files aren't read."""
    letters = write_bins(small(vocab_size=65))
    gpt2 = dataclasses.replace(letters, vocab_size=50_257)
    assert token_files.check(letters)["tokens"] == {"train": 2001, "val": 401}
    with pytest.raises(ValueError, match="ids up to 64, but vocab_size is 50257"):
        token_files.check(gpt2)
    np.full(400, 60_000, np.uint16).tofile(token_files.path_of(gpt2, "val"))
    (Path(gpt2.data_dir) / "manifest.json").touch()
    token_files.check(gpt2)
    with pytest.raises(ValueError, match="ids up to 50256, but vocab_size is 50256"):
        token_files.check(dataclasses.replace(gpt2, vocab_size=50_256))


def test_what_tokens_are_taken_for(tutorial, small, write_bins, capsys, monkeypatch):
    """They need no text, so the dataset isn't looked for."""
    config = write_bins(small(vocab_size=50_257, dataset="nobody/no-such-dataset"))
    ids = tokenizers.load("gpt2").encode_ordinary("Some words. " * 99)
    np.array(ids, np.uint16).tofile(token_files.path_of(config, "val"))
    assert "already in" in tutorial.prepare_dataset(config)["source"]
    assert token_files.open_tokens(config, "val").tolist() == ids
    said = capsys.readouterr().out
    assert "no manifest" in said and "gpt2; the last file begins with 'Some w" in said
    monkeypatch.setattr(tokenizers, "load", {}.__getitem__)  # no network
    token_files.check(config)
    assert "KeyError" in capsys.readouterr().out


@pytest.mark.parametrize("tokens, windows", [(17, 1), (32, 1), (33, 2), (48, 2)])
def test_a_window_needs_a_token_after_its_last(small, write_bins, tokens, windows):
    """Of 16 tokens and the one that follows: 32 tokens are a window, and 33 two."""
    config = write_bins(small(eval_steps=1, batch_size=1), tokens, tokens)
    assert token_files.count_windows(config, "val") == windows
    token_files.check(config)
    whole = token_files.open_tokens(config, "val")
    found = token_files.read(config, "val", np.array([windows - 1, 0]))
    np.testing.assert_array_equal(found, [whole[16 * windows - 16 :][:17], whole[:17]])
    with pytest.raises(OSError, match=f"val.bin ended.* in window {windows}"):
        token_files.read(config, "val", np.array([0, windows]))


def test_what_is_damaged_is_named(small, write_bins):
    folder = Path(write_bins(small()).data_dir)
    for text, found in (
        ('{"source": ', "JSONDecodeError"),
        ("[]", "TypeError"),
        ('{"tokens": {}}', "KeyError"),
        ('{"source": {}, "tokens": {"val": 402}}', "val.bin has 802 bytes, not 804"),
    ):
        (folder / "manifest.json").write_text(text)
        words = f"manifest.json or what it describes is damaged .*{found}.* Delete"
        with pytest.raises(ValueError, match=words):
            token_files.read_manifest(folder)


@pytest.mark.parametrize("size", [1, 2, 5, 16, 17, 1_025, 8_823_810])
def test_order_of_windows_never_changes(size):
    """It is a permutation; runs that began with an older version go on in the same order."""
    index = np.arange(min(size, 1_025))
    for key in (0, 1, 1337 * 2**32 + 5):
        found = token_files.shuffle_index(index, size, np.full(len(index), key))
        expected = [shuffled_in_plain_integers(int(i), size, key) for i in index]
        assert found.dtype == np.int64 and found.tolist() == expected
        assert len({*expected}) == len(index) and max(expected) < size


def test_a_list_has_a_hundred_thousand_windows(small, write_bins):
    """131,072 are those of 273.1 batches of 480; a worker has some rows of more batches.

    A task reads 512 windows at most, or a step, if that has more.
    """
    config, rows = write_bins(small(batch_size=480)), np.arange(3, 483, 2) % 480
    for own, places, size in ((None, np.arange(480), 274), (rows, rows, 547)):
        steps = range(7, 600_000)
        lists = token_files.window_indices(config, "train", steps, own)
        first, second = next(lists), next(lists)
        steps_of_a_task = {len(part) for part in first[:-1]}
        assert steps_of_a_task == {512 // len(places)} and sum(map(len, first)) == size
        steps = range(7 + size, 7 + 2 * size)
        expected = token_files.windows_of(config, "train", steps)
        np.testing.assert_array_equal(np.concatenate(second), expected[:, places])
    large = dataclasses.replace(config, batch_size=600)
    (parts,) = token_files.window_indices(large, "val", range(2))
    np.testing.assert_array_equal(parts[0], [np.arange(600) % 25])  # not shuffled


def test_digest_sees_the_beginning_the_end_and_the_size(tmp_path, monkeypatch):
    """Manifests keep it: BLAKE2b, 8 bytes, of the size in decimal and the contents."""
    path = tmp_path / "file"
    path.write_bytes(b"abc")
    expected = hashlib.blake2b(b"3abc", digest_size=8).hexdigest()
    assert token_files.file_digest(path) == expected

    monkeypatch.setattr(token_files, "SAMPLE", 2**8)
    for size in (2, 2**8, 2**19):
        zeros, found = bytes(size), []
        first, last = b"x" + zeros[1:], zeros[1:] + b"x"
        for contents in (zeros, zeros + b"\0", first, last, zeros):
            path.write_bytes(contents)
            found.append(token_files.file_digest(path))
        assert len({*found}) == 4 and found[0] == found[-1]


def test_each_window_once_an_epoch(tutorial, cluster, small, write_bins, monkeypatch):
    """In order though the first part comes last, in a process that has set nothing."""
    monkeypatch.setattr(token_files, "WINDOWS_AT_ONCE", 50)
    config = write_bins(small(max_steps=63))
    expected = token_files.read(config, "train", np.arange(125))
    (numbers,) = token_files.window_indices(config, "train", range(63))
    first, others = numbers[0][0, 0], len(numbers) - 1
    read_part = token_files.read
    (notes := Path(config.data_dir) / "notes").touch()

    def slow_read(config, split, part):
        for _ in range(1_200):
            if part[0, 0] != first or len(notes.read_text().split()) == others:
                break
            time.sleep(0.05)
        with notes.open("a") as file:
            print(part[0, 0], file=file)
        return read_part(config, split, part)

    slow = SimpleNamespace(read=slow_read)  # it travels with the function, by value
    monkeypatch.setattr(tutorial, "token_files", slow)
    assert not ray.data.DataContext.get_current().execution_options.preserve_order
    rows = tutorial.make_token_dataset(config, "train", numbers).take_all()
    assert notes.read_text().split()[others:] == [str(first)] and others > 3
    assert np.array_equal([row["indices"] for row in rows], np.concatenate(numbers))
    found = np.concatenate([row["tokens"] for row in rows])
    assert found.dtype == np.uint16 and found.shape == (252, config.block_size + 1)
    epochs = [found[:125], found[125:250]]
    for epoch in epochs:
        assert sorted(map(bytes, epoch)) == sorted(map(bytes, expected))
    assert (epochs[0] != expected).any() and (epochs[0] != epochs[1]).any()


def test_the_next_part_is_read_while_this_one_trains(
    tutorial, cluster, small, write_bins, tmp_path, monkeypatch
):
    """From a store that takes 1.6 s for a part, of which there are twenty."""
    monkeypatch.setattr(token_files, "WINDOWS_AT_ONCE", 8)
    config, notes = write_bins(small(max_steps=40)), tmp_path / "notes"
    (numbers,) = token_files.window_indices(config, "train", range(40))
    read_part = token_files.read

    def slow_read(config, split, part):
        time.sleep(0.2 * part.size)
        with notes.open("a") as file:
            file.write("part\n")
        return read_part(config, split, part)

    monkeypatch.setattr(tutorial, "token_files", SimpleNamespace(read=slow_read))
    dataset = tutorial.make_token_dataset(config, "train", numbers)
    batches = iter(dataset.iter_batches(batch_size=1, prefetch_batches=2))
    next(batches)
    read = notes.read_text().count("part")  # and one is under way on each of four CPUs
    assert read < 16
    wait_for(lambda: notes.read_text().count("part") > read + 4, what="other parts")


def test_a_long_run_reads_in_parts(tutorial, small, write_bins, monkeypatch):
    """Three datasets, one after the other, give what one gives."""
    without_a_cluster(monkeypatch)
    config, steps, found = write_bins(small()), range(2, 11), []
    mesh = sharding.make_mesh(config)
    for most in (2**17, 4 * 4):
        monkeypatch.setattr(token_files, "WINDOWS_IN_RANGE", most)
        lists = [*token_files.window_indices(config, "train", steps)]
        found.append([*tutorial.read_batches(config, mesh, "train", steps)])
    assert [sum(map(len, numbers)) for numbers in lists] == [4, 4, 1]
    np.testing.assert_array_equal(*found, strict=True)
