"""One-line breaks of what the page promises, each with the default test that catches it.

    bash ci/test.sh -m extra tests/test_mutations.py

runs each test on a copy of the repository in which the line is broken. tests/README.md says
which promise it is.
"""

from typing import NamedTuple


class Mutation(NamedTuple):
    test: str  # file::name, without its parameters
    file: str  # README.ipynb: one of its code cells
    line: str  # a part of a line that occurs once
    broken: str


MUTATIONS = [
    Mutation(
        "test_prepare.py::test_builtin_text_byte_for_byte",
        "README.ipynb",
        "([*tokenizer.encode_ordinary(text), end] for",
        "([*tokenizer.encode_ordinary(text)] for",
    ),
    Mutation(
        "test_token_files.py::test_a_folder_appears_whole_or_not_at_all",
        "trainkit/token_files.py",
        "    except BaseException:",
        "    except ZeroDivisionError:",
    ),
    Mutation(
        "test_windows.py::test_each_window_once_an_epoch",
        "trainkit/token_files.py",
        "file.seek(window * T * tokens.itemsize)",
        "file.seek((window * T + 1) * tokens.itemsize)",
    ),
    Mutation(
        "test_windows.py::test_same_order_twice_and_from_the_middle",
        "README.ipynb",
        "sequence = (steps.start + step) * config.batch_size",
        "sequence = step * config.batch_size",
    ),
    Mutation(
        "test_windows.py::test_a_missing_window_is_noticed",
        "trainkit/devices.py",
        "if not np.array_equal(",
        "if len(batch) > 9 and not np.array_equal(",
    ),
    Mutation(
        "test_huggingface.py::test_the_same_function",
        "trainkit/layers.py",
        "approximate=True",
        "approximate=False",
    ),
    Mutation(
        "test_model.py::test_a_later_token_never_changes_an_earlier_logit",
        "trainkit/layers.py",
        "is_causal=True",
        "is_causal=False",
    ),
    Mutation(
        "test_model.py::test_initialization",
        "trainkit/layers.py",
        "math.sqrt(2 * config.n_layer) if residual",
        "math.sqrt(config.n_layer) if residual",
    ),
    Mutation(
        "test_training.py::test_learning_rate_is_nanogpts",
        "README.ipynb",
        "config.learning_rate / (config.warmup_steps + 1)",
        "0.0",
    ),
    Mutation(
        "test_training.py::test_twenty_steps_equal_pytorch",
        "README.ipynb",
        'path[-1] in ("kernel", "embedding")',
        'path[-1] in ("kernel", "embedding", "bias")',
    ),
    Mutation(
        "test_training.py::test_accumulation_equals_the_large_batch",
        "trainkit/gradients.py",
        "jax.tree.map(lambda x: x / k, total)",
        "jax.tree.map(lambda x: x, total)",
    ),
    Mutation(
        "test_training.py::test_step_is_deterministic_and_depends_on_the_step_number",
        "trainkit/gradients.py",
        "jax.random.fold_in(jax.random.key(config.seed), state.step)",
        "jax.random.key(config.seed)",
    ),
    Mutation(
        "test_devices.py::test_parameters_are_divided_as_the_table_says",
        "trainkit/layers.py",
        "nnx.with_partitioning(nnx.initializers.zeros, axes[1:])",
        "nnx.with_partitioning(nnx.initializers.zeros, axes[-1:])",
    ),
    Mutation(
        "test_loss.py::test_gradients_of_the_loss_are_those_that_jax_finds",
        "README.ipynb",
        "targets = model.wte.embedding[...], windows[:, 1:]",
        "targets = model.wte.embedding[...], windows[:, :-1]",
    ),
    Mutation(
        "test_generate.py::test_greedy_text_equals_hugging_faces",
        "trainkit/layers.py",
        "<= position",
        "< position",
    ),
    Mutation(
        "test_huggingface.py::test_in_out_in_is_exact",
        "trainkit/huggingface.py",
        "wte[: config.vocab_size].copy()",
        "wte[: config.vocab_size - 1].copy()",
    ),
    Mutation(
        "test_config.py::test_mistakes_name_the_key",
        "trainkit/config.py",
        'ConfigDict(extra="forbid", strict=True)',
        'ConfigDict(extra="ignore", strict=True)',
    ),
    Mutation(
        "test_run_log.py::test_log_forgets_what_comes_after_the_checkpoint",
        "trainkit/run_log.py",
        "if n <= step]",
        "if n <= step + 1]",
    ),
    Mutation(
        "test_faults.py::test_a_loss_that_is_no_number_ends_the_run",
        "trainkit/run_log.py",
        "        return True",
        "        return False",
    ),
    Mutation(
        "test_workers.py::test_two_workers_of_a_node_take_two_gpus",
        "trainkit/workers.py",
        "        use_assigned_gpus()",
        "        pass",
    ),
    Mutation(
        "test_token_files.py::test_other_formats_are_told_apart",
        "trainkit/token_files.py",
        "and start[1::2].max() < 16 <= start[::2].max():",
        "and start[1::2].max() < 0 <= start[::2].max():",
    ),
    Mutation(
        "test_token_files.py::test_two_processes_prepare_the_same_folder",
        "trainkit/token_files.py",
        'if not (folder / "manifest.json").exists():\n                raise',
        'if (folder / "manifest.json").exists():\n                raise',
    ),
    Mutation(
        "test_workers.py::test_gpus_that_lack_bfloat16_are_refused",
        "trainkit/workers.py",
        'if older and config.compute_dtype == "bfloat16":',
        'if older and config.compute_dtype == "float64":',
    ),
    Mutation(
        "test_package.py::test_versions_that_do_not_work_are_refused_in_a_sentence",
        "trainkit/__init__.py",
        "elif flax < [0, 12, 10] and jax >= [0, 11, 2]:",
        "elif flax < [0, 12, 8] and jax >= [0, 11, 2]:",
    ),
    Mutation(
        "test_run_log.py::test_a_bar_that_is_open_at_the_end_does_no_harm",
        "trainkit/run_log.py",
        "@atexit.register",
        "",
    ),
    Mutation(
        "test_huggingface.py::test_a_checkpoint_of_gpus_answers_on_a_cpu",
        "trainkit/checkpoints.py",
        'config.attention != "xla" and',
        'config.attention == "xla" and',
    ),
    Mutation(
        "test_generate.py::test_text_needs_the_vocabulary_of_the_tokenizer",
        "trainkit/generate.py",
        "if config.vocab_size != tokenizer.n_vocab:",
        "if config.vocab_size > tokenizer.n_vocab:",
    ),
    Mutation(
        "test_run_log.py::test_a_validation_loss_that_is_no_number_stops_the_run",
        "trainkit/run_log.py",
        'names = ("loss", "grad_norm", "val_loss")',
        'names = ("loss", "grad_norm")',
    ),
    Mutation(
        "test_lost_runs.py::test_checkpoint_that_cannot_be_seen_is_not_condemned",
        "trainkit/checkpoints.py",
        "UNSEEN_PAUSES if is_missing(error) else PAUSES",
        "PAUSES",
    ),
    Mutation(
        "test_corpus.py::test_what_the_pattern_matches_is_read_once",
        "trainkit/corpus.py",
        "if system.isfile(path):",
        "if False:",
    ),
    Mutation(
        "test_corpus.py::test_tokens_of_a_text_that_was_edited_are_refused",
        "trainkit/corpus.py",
        '"digest": contents,',
        '"digest": 0,',
    ),
    Mutation(
        "test_launch.py::test_another_program_is_refused",
        "trainkit/launch.py",
        "    if program and config.accept_changed_program:",
        "    if program:",
    ),
    Mutation(
        "test_launch.py::test_an_edit_that_changes_the_program_is_seen",
        "trainkit/launch.py",
        'return f"{x.dtype}{[*x.shape]}:{x.item() if x.size == 1 else hashed}"',
        'return f"{x.dtype}{[*x.shape]}"',
    ),
    Mutation(
        "test_launch.py::test_an_edit_that_changes_no_result_is_none",
        "trainkit/launch.py",
        'if kind in ("jit", "pjit"):',
        'if kind in ("pjit",):',
    ),
    Mutation(
        "test_launch.py::test_other_tokens_are_refused",
        "trainkit/launch.py",
        "differences(known[key], now[key])",
        "differences(known[key], known[key])",
    ),
    Mutation(
        "test_launch.py::test_other_windows_are_refused",
        "trainkit/launch.py",
        "steps = {0, second, config.max_steps - 1,",
        "steps = {0,",
    ),
    Mutation(
        "test_launch.py::test_a_node_with_other_tokens_is_refused",
        "trainkit/launch.py",
        'dict.fromkeys(tokens, "nothing") | token_files.digest(config)',
        "token_files.digest(config)",
    ),
    Mutation(
        "test_launch.py::test_a_launch_deletes_rays_record",
        "trainkit/launch.py",
        "(config.run_path / checkpoints.RECORD).unlink(missing_ok=True)",
        "pass",
    ),
    Mutation(
        "test_lock.py::test_one_launch_at_a_time",
        "trainkit/lock.py",
        "                lock.acquire()",
        "                pass",
    ),
    Mutation(
        "test_lock.py::test_a_path_that_is_another_folder_on_this_node",
        "trainkit/lock.py",
        "if mark and found != mark:",
        "if mark and found and found != mark:",
    ),
    Mutation(
        "test_lock.py::test_a_worker_saves_for_its_own_launch_only",
        "trainkit/checkpoints.py",
        "retry(lock.confirm, self.config, unless=(RuntimeError,))",
        "pass",
    ),
]
