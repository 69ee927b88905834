"""Step 3: each window once an epoch, in the same order every time, for every worker."""

import time
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest
import ray.data
from accidents import batches_of

import trainkit.sharding
import trainkit.token_files


def read(tutorial, config, split, steps, rows=None):
    """The windows' numbers, [steps, rows], and tokens, as a cluster reads them, in order."""
    (numbers,) = trainkit.token_files.window_numbers(config, split, steps, rows)
    found = tutorial.make_token_dataset(config, split, numbers).take_all()
    numbers = np.concatenate(numbers)
    np.testing.assert_array_equal([row["numbers"] for row in found], numbers)
    return numbers, np.stack([row["tokens"] for row in found])


def read_training(tutorial, config, first_step=0, rows=None):
    return read(tutorial, config, "train", range(first_step, config.max_steps), rows)


def test_each_window_once_an_epoch(tutorial, cluster, small, write_bins, monkeypatch):
    """However many tasks read them."""
    monkeypatch.setattr(trainkit.token_files, "WINDOWS_AT_ONCE", 50)
    config = write_bins(small(max_steps=63))
    tokens = np.fromfile(Path(config.data_dir) / "train.bin", np.uint16)
    windows = (len(tokens) - 1) // config.block_size
    _, found = read_training(tutorial, config)
    assert found.dtype == np.uint16 and found.shape == (63, 4, config.block_size + 1)
    found = found.reshape(-1, config.block_size + 1)
    expected = np.stack([tokens[i * 16 : i * 16 + 17] for i in range(windows)])
    epochs = [found[i * windows : (i + 1) * windows] for i in range(2)]
    for epoch in epochs:
        assert sorted(map(bytes, epoch)) == sorted(map(bytes, expected))
    assert (epochs[0] != expected).any() and (epochs[0] != epochs[1]).any()


def test_same_order_from_the_middle_and_for_each_worker(
    tutorial, cluster, small, write_bins
):
    """Two workers' rows, put together, are the batches of one worker."""
    config = write_bins(small())
    whole = read_training(tutorial, config)
    _, resumed = read_training(tutorial, config, first_step=7)
    np.testing.assert_array_equal(whole[1][7:], resumed)
    parts = [
        read_training(tutorial, config, rows=np.array(r)) for r in ([0, 1], [2, 3])
    ]
    for found, *expected in zip(whole, *parts):
        np.testing.assert_array_equal(np.concatenate(expected, axis=1), found)


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


def test_windows_are_in_order_however_their_tasks_finish(
    tutorial, cluster, small, write_bins, tmp_path, monkeypatch
):
    """The first part takes longest, in a process that has set nothing for Ray Data."""
    monkeypatch.setattr(trainkit.token_files, "WINDOWS_AT_ONCE", 4)
    config = write_bins(small(max_steps=4))
    (numbers,) = trainkit.token_files.window_numbers(config, "train", range(4))
    first = numbers[0][0, 0]
    slow_reading(monkeypatch, tutorial, lambda n: 3 * (first in n), tmp_path / "notes")
    assert not ray.data.DataContext.get_current().execution_options.preserve_order
    found = tutorial.make_token_dataset(config, "train", numbers).take_all()
    expected = np.concatenate(numbers)
    np.testing.assert_array_equal([row["numbers"] for row in found], expected)


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


def test_validation_windows_are_in_order(tutorial, cluster, small, write_bins):
    config = write_bins(small())
    tokens = np.fromfile(Path(config.data_dir) / "val.bin", np.uint16)
    numbers, found = read(tutorial, config, "val", range(config.eval_steps))
    assert numbers.tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
    np.testing.assert_array_equal(found[0, 3], tokens[48:65])


def test_a_long_run_reads_its_windows_in_parts(
    tutorial, cluster, small, write_bins, monkeypatch
):
    """Three datasets, one after the other, give what one gives; the next is ahead."""
    config = write_bins(small(max_steps=11))
    mesh = trainkit.sharding.make_mesh(config)
    whole = list(batches_of(tutorial, config, mesh, first_step=2))
    monkeypatch.setattr(trainkit.token_files, "WINDOWS_IN_RANGE", 4 * config.batch_size)
    made, make = [], tutorial.make_token_dataset
    monkeypatch.setattr(
        tutorial, "make_token_dataset", lambda *a: made.append(a[2]) or make(*a)
    )
    parts = list(batches_of(tutorial, config, mesh, first_step=2))
    assert [sum(map(len, numbers)) for numbers in made] == [4, 4, 1]
    assert len(parts) == len(whole) == 9
    for a, b in zip(parts, whole):
        np.testing.assert_array_equal(a, b)


def test_the_next_batch_is_on_the_device_before_it_is_needed(
    tutorial, cluster, small, write_bins, monkeypatch
):
    config, put = write_bins(small()), []
    make = jax.make_array_from_process_local_data
    monkeypatch.setattr(
        jax,
        "make_array_from_process_local_data",
        lambda *a: put.append(make(*a)) or put[-1],
    )
    batches = batches_of(tutorial, config, trainkit.sharding.make_mesh(config))
    for step, batch in zip(range(5), batches):
        assert batch is put[step] and len(put) == step + 2


def test_a_missing_window_is_noticed(tutorial, cluster, small, write_bins, monkeypatch):
    config = write_bins(small())
    make = tutorial.make_token_dataset
    lost = trainkit.token_files.windows_of(config, "train", range(1, 2))[0, 1]

    def without_one(*args):
        return make(*args).filter(lambda row: lost not in row["numbers"])

    monkeypatch.setattr(tutorial, "make_token_dataset", without_one)
    batches = batches_of(tutorial, config, trainkit.sharding.make_mesh(config))
    with pytest.raises(RuntimeError, match="expected the windows"):
        list(batches)
