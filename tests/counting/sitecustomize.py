"""Notes what each of Ray's Python processes opens and lists, in a file of $COUNTS."""

import os
import sys


def _note(event: str, given: tuple) -> None:
    name = str(given[0]) if given else ""
    if event == "open" and name.endswith(".bin"):
        os.write(_file, b"opened\n")
    elif event in ("os.listdir", "os.scandir") and name.endswith("/runs/run"):
        os.write(_file, b"listed\n")


if "COUNTS" in os.environ and any("default_worker" in x for x in sys.orig_argv):
    _path = f"{os.environ['COUNTS']}/{os.getpid()}"
    _file = os.open(_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    sys.addaudithook(_note)
