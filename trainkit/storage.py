"""Storage that fails for a moment: try again, and tell a passing fault from damage."""

import re
import time
from collections.abc import Callable
from typing import Any

import fsspec

PAUSES = (1, 2, 4)  # seconds before the second, third, and fourth attempt
PASSING = re.compile(  # in the words of TensorStore, and of the operating system
    "UNAVAILABLE|DEADLINE_EXCEEDED|ABORTED|CANCELLED|RESOURCE_EXHAUSTED|"
    "PERMISSION_DENIED|UNAUTHENTICATED|OS error|Errno|AWS Error|(?i:timed? ?out)"
)

# Listings of a bucket must not be kept: other processes write there, too.
for protocol in ("s3", "s3a", "gs", "gcs"):
    fsspec.config.conf.setdefault(protocol, {})["use_listings_cache"] = False


def patiently(
    function: Callable, *args, unless: tuple[type[Exception], ...] = (), **options
) -> Any:
    """The result of `function`, which is called up to four times while it raises.

    Args:
        unless: exceptions that another attempt can't help.

    Raises:
        Exception: what the last attempt raised.
    """
    for pause in PAUSES:
        try:
            return function(*args, **options)
        except unless:
            raise
        except Exception as error:
            name = getattr(function, "__name__", function)
            reason = f"{type(error).__name__}: {error!s:.300}"
            print(f"{name} failed; again in {pause} s ({reason})")
            time.sleep(pause)
    return function(*args, **options)


def is_damage(error: BaseException) -> bool:
    """Whether `error`, from reading a file, says that what was read is damaged.

    A file server that doesn't answer, or a full disk, says nothing about the file.
    """
    causes = []
    while error and error not in causes:
        causes.append(error)
        error = error.__cause__ or error.__context__
    for cause in causes:
        if isinstance(cause, OSError) and not isinstance(cause, FileNotFoundError):
            return False
        if not isinstance(cause, OSError) and PASSING.search(str(cause)):
            return False
    kinds = (ValueError, LookupError, TypeError, FileNotFoundError, EOFError)
    return any(isinstance(cause, kinds) for cause in causes)
