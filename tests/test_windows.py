"""Step 3: each window once an epoch, in the same order every time, for every worker."""

import time
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest
import ray.data
from accidents import batches_of
from samples import without_a_cluster

import trainkit.sharding
import trainkit.token_files


def slow_reading(monkeypatch, tutorial, seconds, notes):
    """A store that takes so long for windows; the time of each part is noted."""
    read_part = trainkit.token_files.read

    def slow_read(config, split, numbers):
        time.sleep(seconds(numbers))
        with notes.open("a") as file:
            print(time.time(), file=file)
        return read_part(config, split, numbers)

    slow = SimpleNamespace(read=slow_read)  # it travels with the function, by value
    monkeypatch.setattr(tutorial, "token_files", slow)


def test_each_window_once_an_epoch(
    tutorial, cluster, small, write_bins, tmp_path, monkeypatch
):
    """In order however the tasks finish, in a process that has set nothing for Ray Data."""
    monkeypatch.setattr(trainkit.token_files, "WINDOWS_AT_ONCE", 50)
    config = write_bins(small(max_steps=63))
    tokens = np.fromfile(Path(config.data_dir) / "train.bin", np.uint16)
    windows = (len(tokens) - 1) // config.block_size
    (numbers,) = trainkit.token_files.window_numbers(config, "train", range(63))
    first = numbers[0][0, 0]
    slow_reading(
        monkeypatch, tutorial, lambda n: 2 * (first == n[0, 0]), tmp_path / "notes"
    )
    assert not ray.data.DataContext.get_current().execution_options.preserve_order
    rows = tutorial.make_token_dataset(config, "train", numbers).take_all()
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
    """A store that takes 0.1 s for a window: 160 of them, of which four make a step."""
    monkeypatch.setattr(trainkit.token_files, "WINDOWS_AT_ONCE", 8)
    config, notes = write_bins(small(max_steps=40)), tmp_path / "notes"
    (numbers,) = trainkit.token_files.window_numbers(config, "train", range(40))
    slow_reading(monkeypatch, tutorial, lambda n: 0.1 * n.size, notes)
    dataset = tutorial.make_token_dataset(config, "train", numbers)
    start = time.time()
    batches = iter(dataset.iter_batches(batch_size=1, prefetch_batches=2))
    next(batches)
    first = time.time() - start
    time.sleep(3)  # a step
    read_by_now = len(notes.read_text().split())
    assert first < 8 and 2 <= read_by_now < 20, (first, read_by_now)


@pytest.fixture
def batches(tutorial, small, write_bins, monkeypatch):
    """A function that gives a run's batches, read in this process."""
    without_a_cluster(monkeypatch)
    config = write_bins(small(max_steps=11))
    mesh = trainkit.sharding.make_mesh(config)
    return lambda first_step=0: batches_of(tutorial, config, mesh, "train", first_step)


def test_a_long_run_reads_its_windows_in_parts(tutorial, batches, monkeypatch):
    """Three datasets, one after the other, give what one gives."""
    whole = list(batches(2))
    monkeypatch.setattr(trainkit.token_files, "WINDOWS_IN_RANGE", 4 * 4)
    made, make = [], tutorial.make_token_dataset
    monkeypatch.setattr(
        tutorial, "make_token_dataset", lambda *a: made.append(a[2]) or make(*a)
    )
    parts = list(batches(2))
    assert [sum(map(len, numbers)) for numbers in made] == [4, 4, 1]
    np.testing.assert_array_equal(parts, whole, strict=True)


def test_the_next_batch_is_on_the_device_before_it_is_needed(batches, monkeypatch):
    put, make = [], jax.make_array_from_process_local_data
    monkeypatch.setattr(
        jax,
        "make_array_from_process_local_data",
        lambda *a: put.append(make(*a)) or put[-1],
    )
    for step, batch in zip(range(5), batches()):
        assert batch is put[step] and len(put) == step + 2


@pytest.mark.parametrize("read", [[0, 2, 3], [0, 1, 1, 2], [1, 0, 2, 3], [0, 1, 2]])
def test_a_missing_window_is_noticed(tutorial, batches, monkeypatch, read):
    """Or one that is repeated, or out of order."""
    make = tutorial.make_token_dataset

    def others(config, split, numbers):
        steps = np.concatenate(numbers)
        return make(config, split, [steps[read]])

    monkeypatch.setattr(tutorial, "make_token_dataset", others)
    with pytest.raises(RuntimeError, match="expected the windows .*, found"):
        list(batches())
