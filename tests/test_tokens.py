"""Token files: what is refused, and the order of their windows."""

from pathlib import Path

import numpy as np
import pytest

import trainkit.tokens


def test_half_of_the_files_stops_at_once(small, write_bins):
    config = write_bins(small())
    (Path(config.data_dir) / "val.bin").unlink()
    with pytest.raises(FileExistsError, match="not both train.bin and val.bin"):
        trainkit.tokens.existing(config, {})


def test_a_mounted_disk_is_refused(small, monkeypatch):
    """It couldn't be replaced by the finished folder."""
    config = small()
    assert trainkit.tokens.existing(config, {}) is None
    Path(config.data_dir).mkdir()
    assert trainkit.tokens.existing(config, {}) is None
    monkeypatch.setattr(Path, "is_mount", lambda self: True)
    with pytest.raises(ValueError, match="mounted disk; choose a folder in it"):
        trainkit.tokens.existing(config, {})


def test_other_tokens_are_left_alone(small):
    config, source = small(), {"dataset": "builtin", "files": 2}
    with trainkit.tokens.new_folder(config) as folder:
        written = trainkit.tokens.write_manifest(folder, source, 7, {"train": 8})
    assert trainkit.tokens.existing(config, source) == written
    without_files = {"dataset": "builtin"}
    assert trainkit.tokens.existing(config, without_files) == written
    for other in ({"dataset": "other"}, {"split_seed": 1}, source | {"files": 3}):
        with pytest.raises(FileExistsError, match="data_dir: .*Choose another"):
            trainkit.tokens.existing(config, other)


@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
def test_a_folder_appears_whole_or_not_at_all(small, error):
    config = small()
    folder, partial = Path(config.data_dir), Path(f"{config.data_dir}.partial")
    with pytest.raises(error):
        with trainkit.tokens.new_folder(config) as new:
            (new / "train.bin").touch()
            assert new == partial and not folder.exists()
            raise error
    assert not partial.exists() and not folder.exists()
    partial.mkdir()
    (partial / "val.bin").touch()  # of a run that was killed
    with trainkit.tokens.new_folder(config) as new:
        (new / "train.bin").touch()
    assert [path.name for path in folder.iterdir()] == ["train.bin"]
    assert not partial.exists()


@pytest.mark.parametrize(
    "contents, words",
    [
        (None, "does not exist"),
        (b"", "has 0 bytes"),
        (b"123", "has 3 bytes"),
        (b"1234" * 4, "has 16 bytes.*block_size"),
    ],
)
def test_unusable_files(small, write_bins, contents, words):
    config = write_bins(small())
    path = Path(config.data_dir) / "train.bin"
    path.unlink() if contents is None else path.write_bytes(contents)
    with pytest.raises((FileNotFoundError, ValueError), match=f"train.bin.*{words}"):
        trainkit.tokens.check(config)


def test_token_beyond_the_vocabulary(small, write_bins):
    config = write_bins(small())
    np.full(400, 600, np.uint16).tofile(Path(config.data_dir) / "val.bin")
    with pytest.raises(
        ValueError, match="val.bin holds token id 600.*vocab_size is 521"
    ):
        trainkit.tokens.check(config)


def test_own_files_need_not_be_read_to_be_checked(small, write_bins):
    config = write_bins(small(vocab_size=50_257))
    np.full(400, 60_000, np.uint16).tofile(Path(config.data_dir) / "val.bin")
    with pytest.raises(ValueError, match="token id 60000"):
        trainkit.tokens.check(config)
    (Path(config.data_dir) / "manifest.json").touch()
    trainkit.tokens.check(config)


def test_too_few_validation_windows(small, write_bins):
    config = write_bins(small(eval_steps=99))
    with pytest.raises(ValueError, match="25 windows.*396. Set one of these lower"):
        trainkit.tokens.check(config)


def test_a_file_that_ends_too_soon(small, write_bins):
    path = Path(write_bins(small()).data_dir) / "train.bin"
    with pytest.raises(OSError, match="train.bin ended.* at token 1990"):
        trainkit.tokens.read(path, np.array([0, 1_990]), 17)


@pytest.mark.parametrize("size", [1, 2, 3, 17, 1000, 4096, 4097])
def test_shuffle_is_a_permutation(size):
    index = np.arange(size)
    orders = [
        trainkit.tokens.shuffle_index(index, size, np.full(size, key))
        for key in range(3)
    ]
    for order in orders:
        assert sorted(order) == list(range(size))
    if size > 16:
        assert (orders[0] != orders[1]).any() and (orders[1] != orders[2]).any()


def test_shuffle_looks_random():
    """Neighbors end up far apart, and displacement has no bias, at OpenWebText's size."""
    size, key = 8_823_810, np.zeros(20_000, np.int64)
    order = trainkit.tokens.shuffle_index(np.arange(20_000), size, key)
    assert len(set(order.tolist())) == len(order)
    assert abs(order.mean() / size - 0.5) < 0.01
    gaps = np.abs(np.diff(order)) / size
    assert abs(gaps.mean() - 1 / 3) < 0.01  # two uniform draws differ by 1/3 on average


@pytest.mark.parametrize("first_step, at_once", [(0, 8), (7, 8), (0, 9), (19, 1)])
def test_stretches_are_the_steps_of_a_run(small, monkeypatch, first_step, at_once):
    config = small()  # 20 steps of 4 windows
    monkeypatch.setattr(trainkit.tokens, "WINDOWS_AT_ONCE", at_once)
    found = list(trainkit.tokens.stretches(config, first_step))
    assert [step for steps in found for step in steps] == list(range(first_step, 20))
    assert all(len(steps) * config.batch_size < at_once + 4 for steps in found)
