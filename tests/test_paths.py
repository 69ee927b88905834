"""Paths, and folders that are whole or not there."""

import os

import places
import pytest
from samples import python

from trainkit import paths


def test_a_folder_appears_whole_or_not_at_all(tmp_path):
    """A killed process leaves one whose name says what it is."""
    folder = tmp_path / "data"

    def make(name: str, contents: str = "") -> None:
        with paths.new_folder(folder) as new:
            (new / name).symlink_to("/dev/full")  # of Linux: a full disk
            (new / name).write_text(contents)

    with pytest.raises(OSError, match="No space left") as error:
        make("train.bin", "tokens")
    assert error.value.__notes__ == [f"{folder} wasn't written."]
    script = "import os, sys; from trainkit import paths\n"
    script += "with paths.new_folder(sys.argv[1]): os.kill(os.getpid(), 9)"
    with pytest.raises(AssertionError):
        python(script, folder)
    (left,) = tmp_path.iterdir()
    with pytest.raises(KeyboardInterrupt), paths.new_folder(folder):
        raise KeyboardInterrupt  # a person's
    assert [*tmp_path.iterdir()] == [left]
    assert left.name.startswith("data.partial-")
    make("train.bin")
    with pytest.raises(OSError, match="not empty"):
        make("val.bin")
    assert [path.name for path in folder.iterdir()] == ["train.bin"]


def test_no_folder_is_renamed(tmp_path, monkeypatch):
    """Which mounts of buckets may refuse. An empty folder may be there."""
    rename = os.rename

    def of_files(source, target):
        assert not os.path.isdir(source)
        rename(source, target)

    monkeypatch.setattr(os, "rename", of_files)
    (tmp_path / "data").mkdir()
    with paths.new_folder(tmp_path / "data") as new:
        (new / "train.bin").touch()
    whole = [tmp_path / "data", tmp_path / "data/train.bin"]
    assert [*tmp_path.rglob("*")] == whole

    def fail(source, target):
        of_files(source, target)
        raise OSError("a lost connection")

    monkeypatch.setattr(os, "rename", fail)
    with pytest.raises(OSError, match="lost"), paths.new_folder(tmp_path / "b") as new:
        (new / "train.bin").touch()
    assert [*tmp_path.rglob("*")] == whole


@pytest.mark.extra
def test_a_folder_in_a_mounted_bucket(tmp_path):
    with places.mounted_bucket(tmp_path) as (mount, files):
        with paths.new_folder(mount / "data") as new:
            (new / "train.bin").write_text("tokens")
        assert [*files.rglob("*")] == [files / "data", files / "data/train.bin"]


def test_a_link_to_another_disk_stays_one(tmp_path):
    """The folder is written there."""
    there, link = tmp_path / "disk/data", tmp_path / "data"
    there.mkdir(parents=True)
    link.symlink_to(there)
    with paths.new_folder(link) as new:
        assert new.parent == there.parent
        (new / "train.bin").touch()
    assert link.is_symlink() and [*there.iterdir()] == [there / "train.bin"]


def test_a_folder_is_told_from_the_name_of_a_model_on_a_hub(tmp_path, monkeypatch):
    """By a slash, and by what is there, wherever a person says it is."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "my/gpt2").mkdir(parents=True)
    for name in ("my/gpt2", "~/my/gpt2", "$HOME/my/gpt2", "./my/gpt2"):
        assert paths.path_or_name(name) == str(tmp_path / "my/gpt2")
    for name in ("my", "openai-community/gpt2"):
        assert paths.path_or_name(name) == name
    assert paths.path_or_name("./none") == str(tmp_path / "none")  # no hub is asked
