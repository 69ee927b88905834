"""What people get wrong: each error says what, where, what was expected, and what to do."""

import pytest
import ray.train

import trainkit.checkpoints


def test_folder_that_is_no_checkpoint(tmp_path):
    with pytest.raises(ValueError, match=f"{tmp_path} holds no configuration"):
        trainkit.checkpoints.load_params(ray.train.Checkpoint(str(tmp_path)), None)
    with pytest.raises(ValueError, match="found None"):
        trainkit.checkpoints.load_params(None, None)
