"""Step 3: which token files are refused, and the order of their windows."""

import dataclasses
import os
import pickle
import shutil
import time
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from trainkit import token_files

IDS = np.random.default_rng(0).integers(0, 521, 4_000, np.uint16)


@pytest.mark.parametrize(
    "name, data, words",
    [
        ("val", IDS.astype(np.uint32), "val.bin isn't uint16: every second is 0"),
        ("train", bytes(999), "train.bin has 999 bytes; expected 2 for each token"),
        ("val", b"", "val.bin has 0 bytes; expected 2 for each token"),
        ("train", np.uint16([*IDS, 521]), "has the token 521, and vocab_size is 521"),
        ("train", IDS[:16], "{'train': 0, 'val': 25} windows"),
        ("val", IDS[:128], "'val': 7} windows.*eval_windows asks for 8 of val"),
    ],
)
def test_what_cannot_be_trained_on_is_refused(small, write_bins, name, data, words):
    config = write_bins(small())
    assert token_files.check(config) == {"train": 2_001, "val": 401}
    token_files.path_of(config, name).write_bytes(bytes(data))
    with pytest.raises(ValueError, match=words):
        token_files.check(config)


def test_files_must_be_as_their_manifest_says(small, write_bins):
    """A copy that was cut off isn't, for example. The ids are those that it notes."""
    config, manifest = write_bins(small()), {"largest_id": {"train": 520, "val": 520}}
    manifest["tokens"] = token_files.check(config)
    token_files.check(config, manifest)
    with pytest.raises(ValueError, match="token 520, and vocab_size is 520"):
        token_files.check(dataclasses.replace(config, vocab_size=520), manifest)
    write_bins(config, train_tokens=2_000)
    with pytest.raises(ValueError, match="has 2000 tokens.*, 2001. Delete"):
        token_files.check(config, manifest)


def test_a_digest_tells_tokens_from_others(small, write_bins):
    config = small()
    with pytest.raises(FileNotFoundError, match="data/train.bin"):
        token_files.digest(config)
    changes = ({}, {"seed": 1}, {"val_tokens": 402}, {})
    found = [token_files.digest(write_bins(config, **each)) for each in changes]
    assert found[0]["train"].startswith("2,001 tokens, ") and found[0] == found[3]
    assert found[0]["train"] != found[1]["train"] and found[0]["val"] != found[2]["val"]
    # A cut file, and one other token of a file that is read whole, whatever a manifest says
    (Path(config.data_dir) / "manifest.json").write_text("{}")
    path = token_files.path_of(config, "train")
    for place in (1_999, 3_000_000, 7_999_998):
        path.write_bytes(bytes(8_000_000))
        before = token_files.digest(config)["train"]
        with path.open("r+b") as file:
            file.seek(place)
            file.write(b"\1")
        assert token_files.digest(config)["train"] != before
    path.write_bytes(bytes(200_000_000))  # of which samples are read
    before = token_files.digest(config)["train"]
    path.write_bytes(bytes(200_000_002))
    assert token_files.digest(config)["train"] != before
    path.write_bytes(bytes(150_000_000) + b"\1" * 50_000_000)  # another last quarter
    assert token_files.digest(config)["train"] != before


@pytest.mark.parametrize("tokens, windows", [(32, 1), (33, 2)])
def test_a_window_needs_a_token_after_its_last(small, write_bins, tokens, windows):
    """Of 16 tokens and the one that follows: 32 tokens are a window, and 33 two."""
    config = write_bins(small(batch_size=windows), tokens, tokens)
    assert token_files.count_windows(config, "val") == windows
    whole = token_files.open_tokens(config, "val")
    found = token_files.Windows(config, "val", np.array([windows - 1, 0])).read(0)
    np.testing.assert_array_equal(found, [whole[16 * windows - 16 :][:17], whole[:17]])


def of(config, split: str) -> token_files.Windows:
    return token_files.Windows(config, split, np.arange(config.batch_size))


def test_windows_of_larger_ids(small):
    """Than a uint16 holds."""
    config = small(vocab_size=70_000)
    ids = np.arange(65_500, 65_700, dtype=np.uint32)
    token_files.path_of(config, "val").parent.mkdir()
    ids.tofile(token_files.path_of(config, "val"))
    expected = [ids[start:][:17] for start in range(64, 128, 16)]
    np.testing.assert_array_equal(of(config, "val").read(1), expected, strict=True)


def test_what_a_run_is_validated_with(tutorial, small, write_bins):
    """The first windows of val.bin, in order, whatever the batch, and their mean."""
    config = write_bins(small(eval_windows=7), val_tokens=7 * 16 + 1)
    token_files.check(config)
    whole = token_files.open_tokens(config, "val")
    expected = [whole[start:][:17] for start in range(0, 7 * 16, 16)]
    model, losses = tutorial.create_model(config), []
    for batch in (1, 4, 7, 9):
        config = dataclasses.replace(config, batch_size=batch)
        found = tutorial.read_validation(config, jax.sharding.get_mesh())
        np.testing.assert_array_equal(np.concatenate(found), expected)
        losses.append(float(tutorial.evaluate(model, found, config)))
    np.testing.assert_allclose(losses, losses[0], rtol=1e-6)


def test_each_window_once_an_epoch(small, write_bins):
    """Of 125 windows, four a step, steps 31 and 62 have those of two epochs."""
    config = write_bins(small())
    steps = [of(config, "train").numbers(step) for step in range(94)]
    epochs = np.concatenate(steps)[:375].reshape(3, 125)
    assert all(sorted(epoch) == [*range(125)] for epoch in epochs)
    assert len({*map(bytes, epochs)}) == 3
    first = [4, 86, 25, 3, 66, 44, 83, 87]  # for ever, or runs go on in another order
    assert epochs[0][:8].tolist() == first and epochs.dtype == np.int64
    other = dataclasses.replace(config, seed=1)
    assert (of(other, "train").numbers(0) != steps[0]).any()
    val = [of(config, "val").numbers(step) for step in range(7)]
    np.testing.assert_array_equal(np.concatenate(val), np.arange(28) % 25)


def test_steps_keep_their_order(tutorial, cluster, small, write_bins):
    """On the devices of the mesh."""
    config, mesh = write_bins(small()), jax.sharding.get_mesh()
    batches = tutorial.read_batches(config, mesh, range(7, 700))
    for step, batch in enumerate(batches, 7):
        expected = of(config, "train").read(step)
        np.testing.assert_array_equal(batch, expected, strict=True)
    assert step == 699  # of three tasks


def test_a_worker_reads_the_rows_that_its_devices_hold(tutorial, small, monkeypatch):
    """Each once, though devices on other axes hold the same ones."""
    held = {0: (slice(2, 4), slice(None)), 1: (slice(2, 4), slice(None))}
    held[2] = (slice(0, 2), slice(None))
    sharding, asked = SimpleNamespace(), []
    sharding.addressable_devices_indices_map = lambda shape: held
    make = lambda mesh, spec: asked.append(spec) or sharding  # noqa: E731
    monkeypatch.setattr(tutorial, "NamedSharding", make)
    rows, _ = tutorial.share_of_batch(small(), None, 6)
    assert rows.tolist() == [0, 1, 2, 3] and asked == [tutorial.P(("data", "fsdp"))]


def test_a_file_that_was_cut_off_since_is_noticed(small, write_bins):
    """It has no window of what happened to be in memory."""
    windows = of(write_bins(small()), "val")
    windows.read(0)
    token_files.path_of(small(), "val").write_bytes(bytes(100))
    with pytest.raises(OSError, match="val.bin ended in window 3"):
        windows.read(0)


def test_files_that_were_made_anew_since_are_refused(small, write_bins):
    """By whoever opens them next, also with as many tokens. A task that has one open reads on
    in what was there.
    """
    config = write_bins(small())
    windows, early = of(config, "train"), of(config, "train")
    expected = early.read(0)
    shutil.rmtree(config.data_dir)
    write_bins(config, seed=1)
    later = int(time.time()) + 2
    os.utime(f"{config.data_dir}/train.bin", (later, later))
    np.testing.assert_array_equal(early.read(0), expected)
    sent = pickle.loads(pickle.dumps(windows))
    with pytest.raises(
        ValueError, match="data_dir: .*train.bin has been written since"
    ):
        sent.read(0)
    again = of(config, "train")
    os.utime(f"{config.data_dir}/train.bin", ns=(0, later * 10**9 + 900_000_000))
    assert (
        again.read(0) != expected
    ).any()  # mounts of nodes differ in parts of a second
