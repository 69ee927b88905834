"""Windows: each exactly once an epoch, in the same order every time, for every worker."""

from pathlib import Path

import jax
import numpy as np
import pytest

import trainkit.devices
import trainkit.tokens


def read(dataset):
    rows = dataset.take_all()
    sequence = np.array([row["sequence"] for row in rows])
    return sequence, np.stack([row["tokens"] for row in rows])


def read_training(tutorial, config, first_step=0, rows=None):
    steps = range(first_step, config.max_steps)
    return read(tutorial.make_token_dataset(config, "train", steps, rows))


@pytest.mark.parametrize("size", [1, 2, 3, 17, 1000, 4096, 4097])
def test_shuffle_is_a_permutation(tutorial, size):
    index = np.arange(size)
    orders = [
        trainkit.tokens.shuffle_index(index, size, np.full(size, key))
        for key in range(3)
    ]
    for order in orders:
        assert sorted(order) == list(range(size))
    if size > 16:
        assert (orders[0] != orders[1]).any() and (orders[1] != orders[2]).any()


def test_shuffle_looks_random(tutorial):
    """Neighbors end up far apart, and displacement has no bias, at OpenWebText's size."""
    size, key = 8_823_810, np.zeros(20_000, np.int64)
    order = trainkit.tokens.shuffle_index(np.arange(20_000), size, key)
    assert len(set(order.tolist())) == len(order)
    assert abs(order.mean() / size - 0.5) < 0.01
    gaps = np.abs(np.diff(order)) / size
    assert abs(gaps.mean() - 1 / 3) < 0.01  # two uniform draws differ by 1/3 on average


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
    parts = [read_training(tutorial, config, rows=rows) for rows in ([0, 1], [2, 3])]
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
    whole = list(tutorial.global_batches(config, mesh, "train", 2))
    monkeypatch.setattr(tutorial, "WINDOWS_AT_ONCE", 4 * config.batch_size)
    made, make = [], tutorial.make_token_dataset
    monkeypatch.setattr(
        tutorial, "make_token_dataset", lambda *a: made.append(a[2]) or make(*a)
    )
    parts = list(tutorial.global_batches(config, mesh, "train", 2))
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
    batches = tutorial.global_batches(
        config, trainkit.devices.make_mesh(config), "train"
    )
    for step, batch in zip(range(5), batches):
        assert batch is put[step] and len(put) == step + 2


def test_a_missing_window_is_noticed(tutorial, cluster, small, write_bins, monkeypatch):
    config = write_bins(small())
    make = tutorial.make_token_dataset

    def without_one(*args):
        return make(*args).filter(lambda row: row["sequence"] != 5)

    monkeypatch.setattr(tutorial, "make_token_dataset", without_one)
    batches = tutorial.global_batches(
        config, trainkit.devices.make_mesh(config), "train"
    )
    with pytest.raises(RuntimeError, match="train data, step 1: expected the windows"):
        list(batches)


@pytest.mark.parametrize(
    "contents, words",
    [
        (None, "does not exist"),
        (b"", "has 0 bytes"),
        (b"123", "has 3 bytes"),
        (b"1234" * 4, "has 16 bytes.*block_size"),
    ],
)
def test_unusable_files(tutorial, small, write_bins, contents, words):
    config = write_bins(small())
    path = Path(config.data_dir) / "train.bin"
    path.unlink() if contents is None else path.write_bytes(contents)
    with pytest.raises((FileNotFoundError, ValueError), match=f"train.bin.*{words}"):
        trainkit.tokens.check(config)


def test_token_beyond_the_vocabulary(tutorial, small, write_bins):
    config = write_bins(small())
    np.full(400, 600, np.uint16).tofile(Path(config.data_dir) / "val.bin")
    with pytest.raises(
        ValueError, match="val.bin holds token id 600.*vocab_size is 521"
    ):
        trainkit.tokens.check(config)


def test_own_files_need_not_be_read_to_be_checked(tutorial, small, write_bins):
    config = write_bins(small(vocab_size=50_257))
    np.full(400, 60_000, np.uint16).tofile(Path(config.data_dir) / "val.bin")
    with pytest.raises(ValueError, match="token id 60000"):
        trainkit.tokens.check(config)
    (Path(config.data_dir) / "manifest.json").touch()
    trainkit.tokens.check(config)


def test_a_file_that_ends_too_soon(tutorial, small, write_bins):
    path = Path(write_bins(small()).data_dir) / "train.bin"
    with pytest.raises(OSError, match="train.bin ended.* at token 1990"):
        trainkit.tokens.read(path, np.array([0, 1_990]), 17)


def test_too_few_validation_windows(tutorial, small, write_bins):
    config = write_bins(small(eval_steps=99))
    with pytest.raises(ValueError, match="25 windows.*396. Set one of these lower"):
        trainkit.tokens.check(config)
