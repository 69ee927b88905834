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
        "np.array([*tokenizer.encode_ordinary(text), tokenizer.eot_token], np.uint16)",
        "np.array([*tokenizer.encode_ordinary(text)], np.uint16)",
    ),
    Mutation(
        "test_tokens.py::test_a_folder_appears_whole_or_not_at_all",
        "trainkit/tokens.py",
        "    except BaseException:",
        "    except ZeroDivisionError:",
    ),
    Mutation(
        "test_windows.py::test_each_window_once_an_epoch",
        "README.ipynb",
        "tokens.read(path, window * T, T + 1)",
        "tokens.read(path, window * T + 1, T + 1)",
    ),
    Mutation(
        "test_windows.py::test_same_order_twice_and_from_the_middle",
        "README.ipynb",
        "sequence = (steps.start + step) * B",
        "sequence = step * B",
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
        "README.ipynb",
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
        "README.ipynb",
        "jax.tree.map(lambda x: x / k, total)",
        "jax.tree.map(lambda x: x, total)",
    ),
    Mutation(
        "test_training.py::test_step_is_deterministic_and_depends_on_the_step_number",
        "README.ipynb",
        "jax.random.fold_in(jax.random.key(config.seed), state.step)",
        "jax.random.key(config.seed)",
    ),
    Mutation(
        "test_devices.py::test_parameters_are_divided_as_the_table_says",
        "README.ipynb",
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
        "trainkit/weights.py",
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
        "test_faults.py::test_bad_steps_are_skipped_up_to_a_bound",
        "trainkit/watch.py",
        "        return True",
        "        return False",
    ),
    Mutation(
        "test_workers.py::test_two_workers_of_a_node_take_two_gpus",
        "trainkit/workers.py",
        "        own_gpus()",
        "        pass",
    ),
]
