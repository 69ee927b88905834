"""Step 2: each window once an epoch, in the same order every time, for every worker."""

import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import ray.data
from accidents import wait_for
from samples import without_a_cluster

import trainkit.sharding
import trainkit.token_files


def slow_reading(monkeypatch, tutorial, wait, notes) -> None:
    """Let windows wait in their store; the first number of each part is noted."""
    read_part = trainkit.token_files.read
    notes.touch()

    def slow_read(config, split, numbers):
        wait(numbers)
        with notes.open("a") as file:
            print(numbers[0, 0], file=file)
        return read_part(config, split, numbers)

    slow = SimpleNamespace(read=slow_read)  # it travels with the function, by value
    monkeypatch.setattr(tutorial, "token_files", slow)


def test_each_window_once_an_epoch(
    tutorial, cluster, small, write_bins, tmp_path, monkeypatch
):
    """In order though the first part comes last, in a process that has set nothing."""
    monkeypatch.setattr(trainkit.token_files, "WINDOWS_AT_ONCE", 50)
    config, notes = write_bins(small(max_steps=63)), tmp_path / "notes"
    tokens = np.fromfile(Path(config.data_dir) / "train.bin", np.uint16)
    windows = (len(tokens) - 1) // config.block_size
    (numbers,) = trainkit.token_files.window_numbers(config, "train", range(63))
    first, others = numbers[0][0, 0], len(numbers) - 1

    def wait(part):
        for _ in range(1_200):
            if part[0, 0] != first or len(notes.read_text().split()) == others:
                break
            time.sleep(0.05)

    slow_reading(monkeypatch, tutorial, wait, notes)
    assert not ray.data.DataContext.get_current().execution_options.preserve_order
    rows = tutorial.make_token_dataset(config, "train", numbers).take_all()
    assert notes.read_text().split()[others:] == [str(first)] and others > 3
    np.testing.assert_array_equal(
        [row["numbers"] for row in rows], np.concatenate(numbers)
    )
    found = np.concatenate([row["tokens"] for row in rows])
    assert found.dtype == np.uint16 and found.shape == (252, config.block_size + 1)
    expected = np.stack([tokens[i * 16 : i * 16 + 17] for i in range(windows)])
    epochs = [found[:windows], found[windows : 2 * windows]]
    for epoch in epochs:
        assert sorted(map(bytes, epoch)) == sorted(map(bytes, expected))
    assert (epochs[0] != expected).any() and (epochs[0] != epochs[1]).any()


def test_the_next_part_is_read_while_this_one_trains(
    tutorial, cluster, small, write_bins, tmp_path, monkeypatch
):
    """A store that takes 1.6 s for a part, of which there are twenty."""
    monkeypatch.setattr(trainkit.token_files, "WINDOWS_AT_ONCE", 8)
    config, notes = write_bins(small(max_steps=40)), tmp_path / "notes"
    (numbers,) = trainkit.token_files.window_numbers(config, "train", range(40))
    slow_reading(monkeypatch, tutorial, lambda part: time.sleep(0.2 * part.size), notes)
    dataset = tutorial.make_token_dataset(config, "train", numbers)
    batches = iter(dataset.iter_batches(batch_size=1, prefetch_batches=2))
    next(batches)
    read = len(notes.read_text().split())  # and on each of four CPUs, one is under way
    assert read < 16

    def another():
        return len(notes.read_text().split()) > read + 4

    wait_for(another, what="a part that no step has asked for")


def test_a_long_run_reads_its_windows_in_parts(
    tutorial, small, write_bins, monkeypatch
):
    """Three datasets, one after the other, give what one gives."""
    without_a_cluster(monkeypatch)
    config = write_bins(small())
    mesh = trainkit.sharding.make_mesh(config)

    def batches():
        return list(tutorial.read_batches(config, mesh, "train", range(2, 11)))

    whole = batches()
    monkeypatch.setattr(trainkit.token_files, "WINDOWS_IN_RANGE", 4 * 4)
    made, make = [], tutorial.make_token_dataset
    monkeypatch.setattr(
        tutorial, "make_token_dataset", lambda *a: made.append(a[2]) or make(*a)
    )
    parts = batches()
    assert [sum(map(len, numbers)) for numbers in made] == [4, 4, 1]
    np.testing.assert_array_equal(parts, whole, strict=True)
