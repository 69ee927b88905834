"""Step 3: each window once an epoch, in the same order every time, for every worker."""

from pathlib import Path

import jax
import numpy as np
import pytest
from accidents import batches_of, log_of, losses_of_one_process

import trainkit.devices
import trainkit.token_files


def read(dataset):
    rows = dataset.take_all()
    sequence = np.array([row["sequence"] for row in rows])
    return sequence, np.stack([row["tokens"] for row in rows])


def read_training(tutorial, config, first_step=0, rows=None):
    steps = range(first_step, config.max_steps)
    return read(tutorial.make_token_dataset(config, "train", steps, rows))


def test_each_window_once_an_epoch(tutorial, cluster, small, write_bins):
    config = write_bins(small(max_steps=63))
    tokens = np.fromfile(Path(config.data_dir) / "train.bin", np.uint16)
    windows = (len(tokens) - 1) // config.block_size
    sequence, found = read_training(tutorial, config)
    assert found.dtype == np.uint16 and found.shape[1] == config.block_size + 1
    assert sequence.tolist() == list(range(config.max_steps * config.batch_size))
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
    np.testing.assert_array_equal(first[7 * config.batch_size :], resumed)


def test_workers_share_each_batch(tutorial, cluster, small, write_bins):
    """Two workers' rows, put together, are the batches of one worker."""
    config = write_bins(small())
    whole, tokens = read_training(tutorial, config)
    parts = [
        read_training(tutorial, config, rows=np.array(r)) for r in ([0, 1], [2, 3])
    ]
    assert not set(parts[0][0]) & set(parts[1][0])
    merged = np.concatenate([p[1].reshape(-1, 2, 17) for p in parts], axis=1)
    np.testing.assert_array_equal(merged.reshape(-1, 17), tokens)
    assert sorted([*parts[0][0], *parts[1][0]]) == whole.tolist()


def test_validation_windows_are_in_order(tutorial, cluster, small, write_bins):
    config = write_bins(small())
    tokens = np.fromfile(Path(config.data_dir) / "val.bin", np.uint16)
    _, found = read(
        tutorial.make_token_dataset(config, "val", range(config.eval_steps))
    )
    assert len(found) == config.eval_steps * config.batch_size
    np.testing.assert_array_equal(found[3], tokens[48:65])


def test_a_long_run_reads_its_windows_in_parts(
    tutorial, cluster, small, write_bins, monkeypatch
):
    """Three datasets, one after the other, give what one gives; the next is ahead."""
    config = write_bins(small(max_steps=11))
    mesh = trainkit.devices.make_mesh(config)
    whole = list(batches_of(tutorial, config, mesh, first_step=2))
    monkeypatch.setattr(trainkit.token_files, "WINDOWS_AT_ONCE", 4 * config.batch_size)
    made, make = [], tutorial.make_token_dataset
    monkeypatch.setattr(
        tutorial, "make_token_dataset", lambda *a: made.append(a[2]) or make(*a)
    )
    parts = list(batches_of(tutorial, config, mesh, first_step=2))
    assert made == [range(2, 6), range(6, 10), range(10, 11)]
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

    def without_one(*args):
        return make(*args).filter(lambda row: row["sequence"] != 5)

    monkeypatch.setattr(tutorial, "make_token_dataset", without_one)
    batches = batches_of(tutorial, config, trainkit.devices.make_mesh(config))
    with pytest.raises(RuntimeError, match="step 1: expected the windows"):
        list(batches)


@pytest.mark.slow
@pytest.mark.extra
def test_the_loop_reads_its_windows_in_parts(tutorial, cluster, small, write_bins):
    """Three datasets on the worker, and the losses of one."""
    config = write_bins(small(max_steps=11, eval_interval=11))
    notes, train_loop = config.run_path / "read", tutorial.train_loop_per_worker

    def loop(settings):
        trainkit.token_files.WINDOWS_AT_ONCE = 4 * config.batch_size
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
