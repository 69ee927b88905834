"""Files: try again what fails for a moment, tell that from damage, and tell them apart."""

import hashlib
import itertools
import math
import os
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec

SAMPLE = 2**16  # bytes
PAUSES = (1, 2, 4)  # seconds before the second, third, and fourth attempt
UNSEEN_PAUSES = (*PAUSES, 8, 16, 32)  # for files that may come late, as on NFS
PASSING = re.compile(  # in the words of TensorStore, and of the operating system
    "UNAVAILABLE|DEADLINE_EXCEEDED|ABORTED|CANCELLED|RESOURCE_EXHAUSTED|"
    "PERMISSION_DENIED|UNAUTHENTICATED|OS error|Errno|AWS Error|(?i:timed? ?out)"
)
MISSING = re.compile("NOT_FOUND|File not found|No such file|Checkpoint at .* not found")

# Listings of a bucket must not be kept: other processes write there, too.
for protocol in ("s3", "s3a", "gs", "gcs"):
    fsspec.config.conf.setdefault(protocol, {})["use_listings_cache"] = False


def patiently(
    function: Callable, *args, unless: tuple[type[Exception], ...] = (), **options
) -> Any:
    """The result of `function`, which is called up to four times while it raises.

    While what it reads can't be seen, it is called for a minute.

    Args:
        unless: exceptions that another attempt can't help.

    Raises:
        Exception: what the last attempt raised.
    """
    for attempt in itertools.count():
        try:
            return function(*args, **options)
        except unless:
            raise
        except Exception as error:
            pauses = UNSEEN_PAUSES if is_missing(error) else PAUSES
            if attempt >= len(pauses):
                raise
            name = getattr(function, "__name__", function)
            reason = f"{type(error).__name__}: {error!s:.300}"
            print(f"{name} failed; again in {pauses[attempt]} s ({reason})")
            time.sleep(pauses[attempt])


def causes(error: BaseException | None) -> list[BaseException]:
    """`error`, and what it came from."""
    found = []
    while error and error not in found:
        found.append(error)
        error = error.__cause__ or error.__context__
    return found


def is_missing(error: BaseException) -> bool:
    """Whether `error` says that a file isn't there, or can't be seen yet."""
    return any(
        isinstance(cause, FileNotFoundError) or MISSING.search(str(cause))
        for cause in causes(error)
    )


def is_damage(error: BaseException) -> bool:
    """Whether `error`, from reading a file, says that what was read is damaged.

    A file that isn't there may come; a file server that doesn't answer, or a full disk,
    says nothing about the file.
    """
    if is_missing(error):
        return False
    for cause in causes(error):
        if isinstance(cause, OSError) or PASSING.search(str(cause)):
            return False
    kinds = (ValueError, LookupError, TypeError, EOFError)
    return any(isinstance(cause, kinds) for cause in causes(error))


def digest(path: str | Path) -> str:
    """What tells a file from others: a hash of its size, and of its contents.

    Of more than 64 MiB, a thousand samples of 64 KiB count.
    """
    size, hashed = os.path.getsize(path), hashlib.blake2b(digest_size=8)
    hashed.update(str(size).encode())
    samples = min(math.ceil(size / SAMPLE), 1_024)
    with open(path, "rb") as file:
        for i in range(samples):
            file.seek(i * max(size - SAMPLE, 0) // max(samples - 1, 1))
            hashed.update(file.read(SAMPLE))
    return hashed.hexdigest()


def is_running(process: int | str) -> bool:
    """Whether this machine has a process of that number; of what is no number, perhaps."""
    try:
        os.kill(int(process), 0)
    except ProcessLookupError:
        return False
    except (PermissionError, ValueError):  # another user's, or of another host
        pass
    return True
