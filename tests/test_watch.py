"""What Ray can't see; the accidents themselves are in test_faults and test_nodes."""

import dataclasses
import math

import pytest

import trainkit.watch
import trainkit.workers


def test_storage_that_cannot_be_written(small, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="storage_path"):
        trainkit.watch.check_storage(small(storage_path=str(tmp_path / "file")))


def test_a_diverged_run_is_not_started_again(cluster, small):
    """Until a person says so, by deleting the note."""
    config = small()
    trainkit.watch.check_before_start(config)
    nan = {1: {"loss": 3.0, "grad_norm": 1.0}, 2: {"loss": 3.0, "grad_norm": math.nan}}
    assert trainkit.watch.diverged(config, nan)
    with pytest.raises(FloatingPointError, match="at step 2.*nan.*none yet.*delete"):
        trainkit.watch.check_before_start(config)
    (config.run_path / "diverged.txt").unlink()
    trainkit.watch.check_before_start(config)


def test_workers_find_the_probe_of_this_start(cluster, small):
    config = small()
    with pytest.raises(RuntimeError, match="another folder on this node"):
        trainkit.watch.check_storage_is_shared(config)
    trainkit.watch.check_storage(config)
    trainkit.watch.check_storage_is_shared(config)
    probe, _ = trainkit.watch.storage_probe(config)
    probe.write_text("of an earlier start")
    with pytest.raises(RuntimeError, match="another folder on this node"):
        trainkit.watch.check_storage_is_shared(config)


def test_watchdog_watches_the_workers_join_as_well(tutorial, small, monkeypatch):
    """The first communication, in which a bad network hangs, is there."""
    watched = []
    monkeypatch.setattr(trainkit.watch, "Watchdog", watched.append)

    def join(settings):
        raise TimeoutError(watched[0])

    monkeypatch.setattr(trainkit.workers, "join", join)
    with pytest.raises(TimeoutError, match="12.5"):
        tutorial.train_loop_per_worker(dataclasses.asdict(small(stall_timeout_s=12.5)))


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("max_skipped_steps", [0, 3])
def test_a_validation_loss_that_is_no_number_stops_the_run(
    small, value, max_skipped_steps
):
    """Or its checkpoint would be saved, and be the best: NaN sorts before any number."""
    config = small(max_skipped_steps=max_skipped_steps)
    config.run_path.mkdir(parents=True)
    good = {"loss": 1.0, "grad_norm": 1.0}
    assert not trainkit.watch.diverged(config, {4: good | {"val_loss": 1.0}, 5: good})
    skipped = {"skipped_in_a_row": 1} if max_skipped_steps else {}
    bad = good | skipped | {"val_loss": value}
    assert trainkit.watch.diverged(config, {6: good, 7: bad})
    note = (config.run_path / "diverged.txt").read_text()
    assert "step 7" in note and "val_loss" in note
