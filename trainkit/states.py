"""Training states: as shapes that cost no memory, and as arrays on their devices.

The notebook defines the model and the state; `create_model(config)` and `create_state(config)`
make them with random weights. These functions take either as an argument.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from trainkit import devices
from trainkit.config import ModelConfig, TrainingConfig


def count_parameters(create_model: Callable, config: ModelConfig) -> int:
    """The number of parameters, not counting the rows that pad the vocabulary."""
    params = nnx.state(nnx.eval_shape(partial(create_model, config)), nnx.Param)
    padding = (config.padded_vocab_size - config.vocab_size) * config.n_embd
    return sum(param.size for param in jax.tree.leaves(params)) - padding


def abstract_state(
    create_state: Callable,
    config: TrainingConfig,
    mesh: jax.sharding.Mesh,
    rules: tuple,
) -> Any:
    """The shape, dtype, and sharding of every array of the state; allocates nothing.

    What the optimizer keeps of a parameter, under its name and in its shape, is divided as
    the parameter is; all else is whole on each device.

    Args:
        create_state: makes a pytree with `params`.
        rules: which mesh axes divide a parameter; `devices.parameter_specs` explains them.
    """
    state = jax.eval_shape(partial(create_state, config))
    specs = jax.tree.leaves(devices.parameter_specs(state.params, rules, mesh))
    params = {
        devices.name_of(path): (x.shape, spec)
        for (path, x), spec in zip(jax.tree.leaves_with_path(state.params), specs)
    }

    def place(path, x):
        name = devices.name_of(path)
        while name and name not in params:  # opt_state/1/0/mu/h/0/... -> h/0/...
            name = name.partition("/")[2]
        shape, spec = params.get(name, (None, None))
        spec = spec if shape == x.shape else PartitionSpec()
        sharding = NamedSharding(mesh, spec)
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    return jax.tree.map_with_path(place, state)


def initial_state(create_state: Callable, config: TrainingConfig, abstract: Any) -> Any:
    """The state before the first step; each device makes the shards that it keeps.

    With `config.init_from`, every worker reads published weights from a file instead.

    Args:
        abstract: what `abstract_state` says of it.
    """
    shardings = jax.tree.map(lambda x: x.sharding, abstract)
    state = jax.jit(create_state, static_argnums=0, out_shardings=shardings)(config)
    if config.init_from != "scratch":
        from trainkit import huggingface  # slow, and needed here only

        state = state._replace(params=huggingface.load_weights(config, state.params))
    return state
