"""Up to sixteen workers on four nodes: what they do grows with their number, or stays."""

import json
import os
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import ray
import ray.train
from accidents import in_the_background, last_step, log_of, lose, saved, wait_for
from conftest import ROOT
from orbax.checkpoint import v1 as orbax
from ray.util.state import list_tasks
from samples import losses_alone


@pytest.fixture
def add_node(head, tmp_path, monkeypatch):
    """A function that adds a node that says it has 1,000 CPUs, with room for four workers.

    Each has a temporary folder of its own, as on a machine of its own.
    """
    (tmp_path / "counts").mkdir()
    monkeypatch.setenv("RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S", "600")
    monkeypatch.delenv("RAY_API_SERVER_ADDRESS")  # list_tasks asks the head

    def add(name: str):
        folder = tmp_path / name
        folder.mkdir()
        variables = {"TMPDIR": str(folder), "COUNTS": str(tmp_path / "counts")}
        variables["PYTHONPATH"] = str(ROOT / "tests/counting")
        given = {"num_cpus": 1_000, "resources": {"host": 4}, "env_vars": variables}
        node = head.add_node(**given)
        head.wait_for_nodes()
        return node

    return add


def noting(tutorial, counts):
    """The notebook's loop, which notes what its worker asks Ray for and reads to restore."""

    def loop(settings: dict) -> None:
        note = (counts / str(os.getpid())).open("a", buffering=1)
        load, look = orbax.load, ray.train.get_preemption_info

        def bytes_read() -> int:
            return int(open("/proc/self/io").readline().split()[1])

        def noted_load(*arguments):
            before = bytes_read()
            found = load(*arguments)
            print("restored", bytes_read() - before, file=note)
            return found

        def noted_look():
            print("looked", file=note)
            return look()

        orbax.load, ray.train.get_preemption_info = noted_load, noted_look
        tutorial.train_loop_per_worker(settings)

    return loop


@pytest.mark.extra
@pytest.mark.parametrize("workers", [1, 2, 4, 16])
def test_what_grows_with_the_workers(
    tutorial, small, write_bins, add_node, head, tmp_path, workers
):
    """A node is lost, and another one comes: the run goes on, and then goes on once more."""
    counts = tmp_path / "counts"
    nodes = [add_node(f"node-{i}") for i in range(min(4, workers))]
    each = {"host": 4 // (workers // len(nodes)), "CPU": 1}
    changes = {
        "batch_size": 32,
        "max_steps": 24,
        "eval_interval": 8,
        "eval_windows": 32,
    }
    changes |= {"stall_timeout_s": 900.0, "notice_interval": 4}
    changes["scaling"] = {"num_workers": workers, "resources_per_worker": each}
    config = write_bins(small(**changes), 200_001, 20_001)
    loop = noting(tutorial, counts)
    with in_the_background(tutorial.make_trainer(config, loop).fit) as finish:
        wait_for(lambda: last_step(config) > 8 and saved(config), what="a checkpoint")
        lose(head, nodes[-1])
        add_node("another")
        assert finish().metrics["step"] == config.max_steps
    expected = losses_alone(tutorial, config)
    np.testing.assert_allclose([x["loss"] for x in log_of(config)], expected, atol=1e-4)

    for path in counts.iterdir():
        os.truncate(path, 0)  # it is still open

    def data_tasks() -> int:
        name = "ReadRange->Map(read_step)"
        return len(list_tasks(head.address, [("name", "=", name)], limit=10_000))

    before = data_tasks()
    more = replace(config, max_steps=48)
    tutorial.make_trainer(more, loop).fit()
    lines = [x.split() for path in counts.iterdir() for x in path.open()]
    found = Counter(words[0] for words in lines)
    found["tasks of data"] = data_tasks() - before
    restored = [int(words[1]) for words in lines if words[0] == "restored"]
    print(json.dumps({"workers": workers, **found, "bytes": sorted(restored)}))
    assert found["listed"] == 1
    assert found["looked"] == workers * 24 // 4
    assert found["tasks of data"] == workers  # of 256 steps each
    # Not at each of 24 steps: a worker opens both files, and its task one; one worker of a
    # node hashes both.
    assert found["opened"] <= 4 * workers + 4 * len(nodes)
    assert len(restored) == workers and sum(restored) < 2 * max(restored)
