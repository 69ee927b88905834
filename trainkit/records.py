"""Which checkpoints a run has, which of them are whole, and whether the run may go on.

What decides is the newest whole checkpoint on storage. On a file system, Orbax gives a
checkpoint its name once all workers have written their shards. In an object store, where
nothing can be renamed, each worker adds a mark when its part is there. Ray Train keeps a
record of its own, which a full disk can empty; one that Ray can't read is set aside, and
`Checkpointer.restore` tells Ray anew.
"""

import contextlib
import dataclasses
import difflib
import json
import logging
import re
from collections import defaultdict
from collections.abc import Callable

import ray.train
from etils import epath

from trainkit import source, tokens
from trainkit.config import RecipeConfig, TrainingConfig

RECORD = "checkpoint_manager_snapshot.json"  # Ray's
SHOWN = 12  # lines of a difference


def saved(config: TrainingConfig, recorded: str = "") -> list[str]:
    """The names of the run's whole checkpoints that aren't refused, newest first.

    Args:
        recorded: the latest checkpoint that Ray has on record. In an object store, those
            up to it are whole even without marks, as runs of older versions left them.
    """
    names = [name for name in folders(config) if not refusal(config, name).exists()]
    if config.remote:
        marked = whole(config)
        names = [name for name in names if name in marked or name <= recorded]
    return names


def folders(config: TrainingConfig) -> list[str]:
    """The names of all the run's checkpoints, whole or not, newest first."""
    names = (path.name for path in config.run_path.glob("step_*"))
    # Versions before this one wrote "-again" after the step of a damaged checkpoint.
    valid = (name for name in names if re.fullmatch(r"step_\d+(-again)*", name))
    return sorted(valid, reverse=True)


def step_of(name: str) -> int:
    """The step of a checkpoint with that name."""
    return int(re.search(r"\d+", name)[0])


def mark(config: TrainingConfig, name: str, part: int, parts: int) -> epath.Path:
    """The empty object that says: this worker's part of a checkpoint is there."""
    return config.run_path / name / f"part-{part}-of-{parts}"


def whole(config: TrainingConfig) -> set[str]:
    """The checkpoints in an object store that have the marks of all workers."""
    marks = defaultdict(set)
    for path in config.run_path.glob("step_*/part-*-of-*"):
        _, part, _, parts = path.name.split("-")
        marks[path.parent.name, int(parts)].add(int(part))
    return {name for (name, parts), found in marks.items() if len(found) == parts}


def refusal(config: TrainingConfig, name: str) -> epath.Path:
    """The note that keeps a checkpoint from being used."""
    return config.run_path / f"{name}.refused"


def refuse(config: TrainingConfig, name: str, error: Exception) -> str:
    """Keep a damaged checkpoint from being used; return a message that says so."""
    note = refusal(config, name)
    message = f"Cannot restore {config.run_path / name}, which is damaged: {error}"
    note.write_text(message)
    return (
        f"{message}\nThe next start takes the checkpoint before it. To try this one "
        f"again, delete {note}."
    )


def logged(config: TrainingConfig) -> dict[int, dict]:
    """The lines of the run's log by step; a line that was cut off isn't among them."""
    path, lines = config.run_path / "metrics.jsonl", {}
    for text in path.read_text().splitlines() if path.exists() else []:
        with contextlib.suppress(ValueError, KeyError, TypeError):
            line = json.loads(text)
            lines[line["step"]] = line
    return lines


def check_recipe(config: TrainingConfig) -> None:
    """Refuse to go on with a run that was started with another recipe.

    Its windows would be repeated or skipped, and no one would see it. More `max_steps`,
    other machines, and what changes numbers by rounding only are no other recipe.

    Raises:
        ValueError: with the fields that differ, what they were, and what they are now.
    """
    settings = next(filter(None, (settings_of(config, n) for n in folders(config))), {})
    now, recipe = vars(config), dataclasses.fields(RecipeConfig) if settings else ()
    before = {field.name: settings.get(field.name, field.default) for field in recipe}
    differing = [
        f"{key} was {value!r}, and is {now[key]!r}"
        for key, value in before.items()
        if value != now[key]
    ]
    if differing:
        raise ValueError(
            f"run_name: {config.run_path} holds a run with another recipe: "
            f"{'; '.join(differing)}. Restore these values to go on with that run, or "
            "choose another run_name to start a new one."
        )


def check_code(config: TrainingConfig, functions: tuple[Callable, ...]) -> None:
    """Refuse a run that has begun with other code; keep this code in the run's folder.

    Args:
        functions: those that decide the result. What they use counts, too, if it is
            defined beside them; comments, formatting, and docstrings don't.

    Raises:
        ValueError: with the name of what differs, and how.
    """
    path, now = config.run_path / "code.py", source.collect(functions)
    begun = path.exists() and folders(config)
    before = source.parse(path.read_text()) if begun else now
    names = [n for n in sorted({**before, **now}) if before.get(n) != now.get(n)]
    if names and not config.accept_changed_code:
        old, new = ("\n".join(x.get(n, "") for n in names) for x in (before, now))
        changes = difflib.unified_diff(
            old.split("\n"),
            new.split("\n"),
            "the run's",
            "this notebook's",
            n=1,
            lineterm="",
        )
        lines = list(changes)
        raise ValueError(
            f"run_name: {config.run_path} holds a run of other code. What differs is "
            f"{', '.join(names)}:\n"
            + "\n".join(lines[:SHOWN] + ["..."] * (len(lines) > SHOWN))
            + "\nChoose another run_name to start a new run, undo the change, or set "
            "accept_changed_code: true to go on with the new code."
        )
    path.write_text("\n\n\n".join(now.values()) + "\n")


def check_tokens(config: TrainingConfig) -> None:
    """Refuse a run that has begun with other tokens; note these in the run's folder.

    Raises:
        ValueError: with what it began with, and what is there now.
    """
    if not all(tokens.path_of(config, split).exists() for split in ("train", "val")):
        return  # such as one that streams its text
    path, now = config.run_path / "tokens.json", tokens.digest(config)
    begun = path.exists() and folders(config)
    if begun and (before := json.loads(path.read_text())) != now:
        raise ValueError(
            f"data_dir: {config.data_dir} holds other tokens than {config.run_path} began "
            f"with: {before} then, {now} now. Bring the old files back, or choose another "
            "run_name to start a new run."
        )
    path.write_text(json.dumps(now))


def say_if_done(config: TrainingConfig) -> None:
    """Print that the run has nothing left to do, if that is so."""
    done = step_of(next(iter(saved(config)), "step_0"))
    if done >= config.max_steps:
        print(
            f"{config.run_path} has done {done:,} steps, and max_steps is "
            f"{config.max_steps:,}: nothing is trained. Set max_steps higher to go on, or "
            "choose another run_name to start anew."
        )


def settings_of(config: TrainingConfig, name: str) -> dict:
    """The configuration in a checkpoint, as it was saved; empty if it can't be read."""
    try:
        text = (config.run_path / name / "_CHECKPOINT_METADATA").read_text()
        return json.loads(text)["custom_metadata"] or {}
    except (OSError, ValueError, KeyError):
        return {}


def check_record(config: TrainingConfig) -> None:
    """Set Ray's record of the run's checkpoints aside if Ray couldn't go on with it.

    That is a record that is empty or cut off, as a full disk leaves it, or that names a
    checkpoint that isn't there or is refused.
    """
    record = config.run_path / RECORD
    if not record.exists() or not (reason := flaw(config)):
        return
    named = re.findall(r'"checkpoint_dir_name": ?"([^"]+)"', record.read_text())
    for name in set(named):  # in an object store, older versions left no other mark
        if config.remote and (config.run_path / name / "_METADATA").exists():
            mark(config, name, 0, 1).write_text("")
    aside = record.with_suffix(".aside")
    record.replace(aside)
    newest = next(iter(saved(config)), "the start: no whole checkpoint is on storage")
    print(
        f"Ray's record of the checkpoints can't be used: {reason}. It is now {aside}."
    )
    print(f"The run goes on from {newest}.")


def flaw(config: TrainingConfig) -> str | None:
    """Why Ray can't use its record of the run's checkpoints; None if it can."""
    before = logging.root.manager.disable
    logging.disable(max(before, logging.INFO))  # Ray tells at length that there is one
    try:
        result = ray.train.Result.from_path(str(config.run_path))
    except Exception as error:
        return str(error).partition(". ")[0]  # and not Ray's advice to start over
    finally:
        logging.disable(before)
    recorded = [checkpoint.path for checkpoint, _ in result.best_checkpoints]
    for name in (path.rpartition("/")[2] for path in recorded):
        if refusal(config, name).exists():
            return f"it names {name}, which is refused"
    return None


def in_storage(name: str) -> ray.train.Checkpoint:
    """The checkpoint of that name in the run's folder, whether it exists or not.

    Ray has no stable call that says where a checkpoint will be: `get_storage` is marked
    DeveloperAPI, and what it returns may change with Ray's version, which is pinned.
    """
    storage = ray.train.get_context().get_storage()
    path = storage.build_checkpoint_path_from_name(name)
    return ray.train.Checkpoint(path, storage.storage_filesystem)


def on_record() -> set[str]:
    """The names of the checkpoints that Ray has on record."""
    reported = ray.train.get_all_reported_checkpoints()
    return {each.checkpoint.path.rpartition("/")[2] for each in reported}


def report_unrecorded(config: TrainingConfig, names: list[str]) -> None:
    """Tell Ray of whole checkpoints that it doesn't know, the oldest first.

    A worker may die, or Ray's record may be lost, between the end of a save and its report.
    """
    lines = logged(config) if names else {}
    for name in sorted(names):
        step = step_of(name)
        ray.train.report(
            lines.get(step, {"step": step}),
            checkpoint=in_storage(name),
            checkpoint_dir_name=name,
            checkpoint_upload_mode=ray.train.CheckpointUploadMode.NO_UPLOAD,
        )


def refuse_to_start_over(config: TrainingConfig) -> None:
    """Raise if the run has checkpoints, but only refused ones.

    Raises:
        RuntimeError: with what to do.
    """
    if any(refusal(config, name).exists() for name in folders(config)):
        raise RuntimeError(
            f"No checkpoint in {config.run_path} can be restored; the files "
            "step_*.refused say why. Delete these files to try again, or that folder "
            "to start over."
        )
