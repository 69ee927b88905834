"""Step 3: each window once an epoch, in the same order every time, for every worker."""

import time
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from accidents import batches_of, log_of, losses_of_one_process

import trainkit.devices
import trainkit.token_files


def read(tutorial, config, split, steps, rows=None):
    """The windows' numbers, [steps, rows], and tokens, as a cluster reads them, in order."""
    numbers = trainkit.token_files.window_numbers(config, split, steps, rows)
    dataset = tutorial.make_token_dataset(config, split, numbers)
    trainkit.token_files.read_in_order(dataset.context)
    found = dataset.take_all()
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


def test_same_order_twice_and_from_the_middle(tutorial, cluster, small, write_bins):
    config = write_bins(small())
    _, first = read_training(tutorial, config)
    _, second = read_training(tutorial, config)
    _, resumed = read_training(tutorial, config, first_step=7)
    np.testing.assert_array_equal(first, second)
    np.testing.assert_array_equal(first[7:], resumed)


def test_workers_share_each_batch(tutorial, cluster, small, write_bins):
    """Two workers' rows, put together, are the batches of one worker."""
    config = write_bins(small())
    whole = read_training(tutorial, config)
    parts = [
        read_training(tutorial, config, rows=np.array(r)) for r in ([0, 1], [2, 3])
    ]
    for found, *expected in zip(whole, *parts):
        np.testing.assert_array_equal(np.concatenate(expected, axis=1), found)


def test_the_next_part_is_read_while_this_one_trains(
    tutorial, cluster, small, write_bins, tmp_path, monkeypatch
):
    """A store that takes 0.1 s for a window: 160 of them, of which four make a step."""
    monkeypatch.setattr(trainkit.token_files, "WINDOWS_AT_ONCE", 8)
    config, notes = write_bins(small(max_steps=40)), tmp_path / "notes"
    numbers = trainkit.token_files.window_numbers(config, "train", range(40))
    read_part = trainkit.token_files.read

    def slow_read(config, split, numbers):
        time.sleep(0.1 * numbers.size)
        with notes.open("a") as file:
            print(time.time(), file=file)
        return read_part(config, split, numbers)

    functions = {"parts_of": trainkit.token_files.parts_of, "read": slow_read}
    slow = SimpleNamespace(**functions)  # it travels with the function, by value
    monkeypatch.setattr(tutorial, "token_files", slow)
    dataset = tutorial.make_token_dataset(config, "train", numbers)
    trainkit.token_files.read_in_order(dataset.context)
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
    mesh = trainkit.devices.make_mesh(config)
    whole = list(batches_of(tutorial, config, mesh, first_step=2))
    monkeypatch.setattr(trainkit.token_files, "WINDOWS_IN_RANGE", 4 * config.batch_size)
    made, make = [], tutorial.make_token_dataset
    monkeypatch.setattr(
        tutorial, "make_token_dataset", lambda *a: made.append(a[2]) or make(*a)
    )
    parts = list(batches_of(tutorial, config, mesh, first_step=2))
    assert [len(numbers) for numbers in made] == [4, 4, 1]
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
    batches = batches_of(tutorial, config, trainkit.devices.make_mesh(config))
    for step, batch in zip(range(5), batches):
        assert batch is put[step] and len(put) == step + 2


def test_a_missing_window_is_noticed(tutorial, cluster, small, write_bins, monkeypatch):
    config = write_bins(small())
    make = tutorial.make_token_dataset
    (lost,) = trainkit.token_files.window_numbers(config, "train", range(1, 2), [1])[0]

    def without_one(*args):
        return make(*args).filter(lambda row: lost not in row["numbers"])

    monkeypatch.setattr(tutorial, "make_token_dataset", without_one)
    batches = batches_of(tutorial, config, trainkit.devices.make_mesh(config))
    with pytest.raises(RuntimeError, match="expected the windows"):
        list(batches)


@pytest.mark.slow
@pytest.mark.extra
def test_the_loop_reads_its_windows_in_parts(tutorial, cluster, small, write_bins):
    """Three datasets on the worker, and the losses of one."""
    config = write_bins(small(max_steps=11, eval_interval=11))
    notes, train_loop = config.run_path / "read", tutorial.train_loop_per_worker

    def loop(settings):
        trainkit.token_files.WINDOWS_IN_RANGE = 4 * config.batch_size
        count_windows = trainkit.token_files.count_windows

        def note(config, split):
            with notes.open("a") as file:
                file.write(f"{split}\n")
            return count_windows(config, split)

        trainkit.token_files.count_windows = note
        train_loop(settings)

    assert tutorial.make_trainer(config, loop).fit().error is None
    assert sorted(notes.read_text().split()) == ["train"] * 3 + ["val"]
    expected = losses_of_one_process(tutorial, config)
    np.testing.assert_allclose([x["loss"] for x in log_of(config)], expected, atol=1e-4)
