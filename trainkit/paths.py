"""Paths that mean the same on all machines, and folders that are whole or not there."""

import contextlib
import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path


def absolute(place: str) -> str:
    """A path that means the same to workers, which run in folders of their own.

    Raises:
        ValueError: it names a variable that isn't set here.
    """
    place = os.path.expandvars(place.removeprefix("file://"))
    if "$" in place:
        raise ValueError(f"{place} names a variable that isn't set")
    if is_object_store(place):
        return place.rstrip("/")
    return os.path.abspath(os.path.expanduser(place))


def is_object_store(place: str | os.PathLike) -> bool:
    """Whether files there can't be locked or appended to."""
    return "://" in os.fspath(place)


def path_or_name(name: str) -> str:
    """What is here by a name with a slash, as an absolute path; others are names of a hub.

    What begins as no name of a hub does is a path, too.
    """
    path = os.path.expanduser(os.path.expandvars(name))
    is_path = (
        name.startswith((".", "/", "~", "$")) or "/" in name and os.path.exists(path)
    )
    return absolute(name) if is_path else name


@contextlib.contextmanager
def new_folder(folder: str | Path) -> Iterator[Path]:
    """A folder to write files in, which move to `folder` if all goes well.

    An error leaves nothing, and a killed process a folder NAME.partial-*. Files move one by
    one, by name, because mounts of buckets may not rename a folder. A kill then leaves some.

    Raises:
        OSError: `folder` is there and has files, or the disk is full.
    """
    folder = Path(folder).resolve()  # a link stays one
    partial = folder.with_name(f"{folder.name}.partial-{secrets.token_hex(4)}")
    partial.mkdir(parents=True)
    made = [partial]
    try:
        yield partial
        with contextlib.suppress(FileNotFoundError):
            folder.rmdir()
        folder.mkdir()
        made.append(folder)
        for path in sorted(partial.iterdir()):
            path.rename(folder / path.name)
        partial.rmdir()
    except BaseException as error:
        for path in made:
            shutil.rmtree(path)
        error.add_note(f"{folder} wasn't written.")
        raise
