"""What an attacker could use, and what a person could give away."""

import threading
import traceback
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from conftest import ROOT
from notebook_module import code_cells
from samples import python

import trainkit.config
import trainkit.corpus
import trainkit.lock
import trainkit.token_files
import trainkit.workers


def test_nothing_unpickles():
    """Token files, weights, and checkpoints have formats that cannot hold code."""
    modules = sorted((ROOT / "trainkit").glob("*.py"))
    sources = [path.read_text() for path in modules]
    sources += [cell.source for cell in code_cells()]
    assert len(modules) > 10 and len(sources) > len(modules) + 20
    for word in ("pickle", "eval(", "exec(", "torch.load", "np.load(", "trust_remote"):
        assert not any(word in source for source in sources), word


class Nothing(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_error(404)

    do_HEAD = do_GET


@pytest.fixture
def empty_hub():
    """The address of a hub that has no dataset."""
    with HTTPServer(("127.0.0.1", 0), Nothing) as server:
        threading.Thread(target=server.serve_forever).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_errors_do_not_tell_secrets(cluster, small, monkeypatch, tmp_path, empty_hub):
    """What a person copies into a bug report has no token in it."""
    secret = "hf_thisIsASecretToken1234567890"
    for name in ("HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "WANDB_API_KEY"):
        monkeypatch.setenv(name, secret)
    monkeypatch.setattr("datasets.config.HF_ENDPOINT", empty_hub)
    storage = str(tmp_path / "file")
    Path(storage).write_text("")
    attempts = [
        lambda: trainkit.config.load_config(ROOT / "configs/smoke.yaml", wrong=1),
        lambda: trainkit.corpus.load(small(dataset="nobody/nothing")),
        lambda: trainkit.lock.hold(small(storage_path=storage)).__enter__(),
        lambda: trainkit.workers.check_resources(
            small(num_workers=4, cpus_per_worker=999.0)
        ),
        lambda: trainkit.token_files.open_tokens(small(), "train"),
    ]
    for attempt in attempts:
        with pytest.raises((ValueError, OSError, RuntimeError)) as error:
            attempt()
        assert secret not in "".join(traceback.format_exception(error.value))


@pytest.mark.slow
def test_dashboard_listens_on_the_loopback_address_only():
    """Started as the notebook starts it, in a process of its own."""
    (cell,) = [c.source for c in code_cells() if c.source.startswith("ray.init(")]
    script = f"""
import psutil, ray, trainkit
{cell}
port = int(ray._private.worker.global_worker.node.webui_url.rsplit(":", 1)[1])
found = [c.laddr.ip for c in psutil.net_connections("tcp")
         if c.status == psutil.CONN_LISTEN and c.laddr.port == port]
print("LISTENS", found)
"""
    assert "LISTENS ['127.0.0.1']" in python(script)
