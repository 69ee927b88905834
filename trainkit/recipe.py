"""What a run goes on with must be what it was: its recipe, and its tokens."""

import dataclasses
import os
import re
from collections.abc import Mapping

from trainkit import checkpoint_reader
from trainkit.config import SHAPE, RecipeConfig, TrainingConfig


def compare(config: TrainingConfig, tokens: Mapping) -> dict | None:
    """Refuse to go on with a checkpoint of another recipe or of other tokens.

    A key that the checkpoint lacks had its default then; one that no longer exists is ignored.
    A branch may have another recipe, but for shapes, the batch, and where weights came from.

    Args:
        tokens: `token_files.digest` of the configuration's.

    Returns:
        What the run is a branch of, if it is one: `{"from": folder, "differs": [...]}`, which
        its checkpoints keep.

    Raises:
        ValueError: key by key, what it was, and what it is. Or `branch_from` names no
            checkpoint, or isn't where the run's own checkpoints began.
    """
    if own := checkpoint_reader.about_newest(config.run_path):
        branch = own.get("branch")
        began = branch and branch["from"]
        if config.branch_from not in (None, began):
            raise ValueError(
                f"branch_from: {config.run_path} has checkpoints of its own, which began with "
                f"{began}, and not with {config.branch_from}. Choose another run_name"
            )
        if differing := _differences(own, config, tokens):
            raise ValueError(
                f"run_name: {config.run_path} is from another recipe or other tokens: "
                f"{'; '.join(differing.values())}. Choose another run_name, or undo the change."
            )
        return branch
    if not config.branch_from:
        return None
    saved = checkpoint_reader.about("branch_from", config.branch_from)
    differing = _differences(saved, config, tokens)
    fixed = [*SHAPE, "batch_size", "init_from", *(f"{x}.bin" for x in tokens)]
    if refused := [differing[key] for key in fixed if key in differing]:
        raise ValueError(
            f"branch_from: a branch of {config.branch_from} can't differ in these: "
            f"{'; '.join(refused)}. Undo the change, or start with its weights, by init_from"
        )
    step = re.match(r"step_(\d{8})", os.path.basename(config.branch_from))
    if step and int(step[1]) >= config.max_steps:
        raise ValueError(
            f"branch_from: {config.branch_from} is of step {int(step[1]):,}: expected less "
            f"than max_steps, {config.max_steps:,}"
        )
    return {"from": config.branch_from, "differs": [*differing.values()]}


def _differences(saved: Mapping, config: TrainingConfig, tokens: Mapping) -> dict:
    """By key, in words, how a recipe and its tokens differ from those of a checkpoint."""
    was = {field.name: field.default for field in dataclasses.fields(RecipeConfig)}
    was |= {key: value for key, value in saved["config"].items() if key in was}
    was |= {f"{split}.bin": x for split, x in (saved["tokens"] or {}).items()}
    now = config.recipe | {f"{split}.bin": x for split, x in tokens.items()}
    return {
        key: f"{key} was {was.get(key)!r}, is {now.get(key)!r}"
        for key in was | now
        if was.get(key) != now.get(key)
    }
