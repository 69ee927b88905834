"""Models and training states: as shapes that cost no memory, and as arrays on their devices.

The notebook defines the model and the state; `create_model(config)` and `create_state(config)`
make them with random weights. These functions take either as an argument.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import flax
import jax
from flax import nnx

from trainkit import huggingface
from trainkit.config import ModelConfig, TrainingConfig

# Parameters name their axes before there is a mesh; `initial_state` places them, all at once.
flax.config.update("flax_always_shard_variable", False)


def abstract_model(create_model: Callable, config: ModelConfig) -> nnx.Module:
    """The model with shapes for weights; allocates nothing."""
    structure = []

    def create():
        graph, weights = nnx.split(create_model(config))
        structure.append(graph)
        return weights

    weights = jax.eval_shape(create)  # nnx.eval_shape would divide them over the mesh
    return nnx.merge(*structure, weights)


def abstract_params(create_model: Callable, config: ModelConfig) -> nnx.State:
    """The shapes and dtypes of the parameters."""
    return nnx.state(abstract_model(create_model, config), nnx.Param)


def assemble(
    create_model: Callable, config: ModelConfig, params: nnx.State
) -> nnx.Module:
    """The model that has `params` for its weights."""
    model = abstract_model(create_model, config)
    nnx.update(model, params)
    return model


def count_parameters(create_model: Callable, config: ModelConfig) -> int:
    """The number of parameters, not counting the rows that pad the vocabulary."""
    params = abstract_params(create_model, config)
    padding = (config.padded_vocab_size - config.vocab_size) * config.n_embd
    return sum(leaf.size for leaf in jax.tree.leaves(params)) - padding


def abstract_state(
    create_state: Callable,
    config: TrainingConfig,
    mesh: jax.sharding.Mesh,
    rules: tuple,
) -> Any:
    """The shape, dtype, and sharding of every array of the state; allocates nothing.

    Args:
        rules: which mesh axis divides each logical axis of the parameters.
    """
    shapes = jax.eval_shape(partial(create_state, config))
    with nnx.logical_axis_rules(rules):
        shardings = nnx.get_named_sharding(shapes, mesh)
    return jax.tree.map(
        lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
        shapes,
        shardings,
    )


def initial_state(create_state: Callable, config: TrainingConfig, abstract: Any) -> Any:
    """The state before the first step; each device makes the shards that it keeps.

    With `config.init_from`, every worker reads published weights from a file instead.

    Args:
        abstract: what `abstract_state` says of it.
    """
    shardings = jax.tree.map(lambda x: x.sharding, abstract)
    state = jax.jit(create_state, static_argnums=0, out_shardings=shardings)(config)
    if config.init_from != "scratch":
        state = state._replace(params=huggingface.load_weights(config, state.params))
    return state
