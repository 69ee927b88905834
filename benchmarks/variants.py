"""Other ways to write parts of the notebook's train step, to measure beside its own.

Each function changes the notebook's module, or a module of trainkit that it calls, before
anything is compiled.
"""

from functools import partial

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import PartitionSpec

import trainkit.config
import trainkit.devices
import trainkit.gradients
import trainkit.layers


def without_donation(tutorial) -> None:
    """The old and the new state exist at once."""
    step = tutorial.train_step.__wrapped__
    tutorial.train_step = jax.jit(step, static_argnames="config")


def vocabulary_not_padded(tutorial) -> None:
    """50,257 rows in the embedding table, a number that is no multiple of 128."""
    trainkit.config.TrainingConfig.padded_vocab_size = property(
        lambda self: self.vocab_size
    )


def one_product_for_qkv(tutorial) -> None:
    """One product of a wider matrix for query, key, and value, and then cut it."""

    def project(linear, x, n_head):
        B, T, _ = x.shape
        qkv = linear(x).reshape(B, T, 3, n_head, -1)
        return jnp.unstack(qkv, axis=2)

    trainkit.layers.project_to_heads = project


def gelu_differentiated_by_jax(tutorial) -> None:
    """What GELU's backward pass needs is kept, where it would be computed again."""
    trainkit.layers.gelu = partial(nnx.gelu, approximate=True)


def loss_differentiated_by_jax(tutorial) -> None:
    """The backward pass gets the loss's gradients from what the forward pass kept.

    Of one chunk that is its logits. With more, nothing is kept, and the backward pass
    computes the logits again.
    """

    def cross_entropy(table, features, targets, vocab_size, chunks=1):
        def mean(chunk):
            features, targets = chunk
            logits = trainkit.layers.score_tokens(table, features, vocab_size)
            return optax.softmax_cross_entropy_with_integer_labels(
                logits.astype(jnp.float32), targets
            ).mean()

        if chunks == 1:
            return mean((features, targets))

        def split(x):
            return jnp.stack(jnp.split(x, chunks, axis=1))

        return jax.lax.map(
            jax.checkpoint(mean), (split(features), split(targets))
        ).mean()

    trainkit.layers.cross_entropy = cross_entropy


def recomputed(tutorial) -> None:
    """Each block keeps its input only, as `scan_layers` does, without the loop."""

    def run_blocks(blocks, x, rngs, caches=None, scan=False):
        for block in blocks:
            graph, state = nnx.split(block)

            @jax.checkpoint
            def run(x, state, graph=graph):
                return nnx.merge(graph, fetch_layer(state))(x, rngs=rngs)

            x = run(x, state)
        return x

    trainkit.layers.run_blocks = run_blocks


layer_specs = {}  # how `fsdp` divides a block's parameters, if `fetched_by_layer` says so


def fetch_layer(state: nnx.State) -> nnx.State:
    """The whole of a block's parameters."""

    def fetch(path, param):
        spec = layer_specs.get(path)
        if spec is None:
            return param
        return param.replace(fetch_param(param[...], spec, path[-1] == "kernel"))

    return nnx.map_state(fetch, state)


def fetch_param(x: jax.Array, spec: PartitionSpec, is_kernel: bool) -> jax.Array:
    """`x` of all devices; its gradient is summed in float32, each device its own part."""
    axis = spec.index("fsdp") if "fsdp" in spec else None

    @jax.custom_vjp
    def fetch(x):
        x = x.astype(jnp.bfloat16) if is_kernel else x
        return (
            x if axis is None else jax.lax.all_gather(x, "fsdp", axis=axis, tiled=True)
        )

    def backward(_, gradient):
        gradient = gradient.astype(jnp.float32)
        if axis is None:
            return (jax.lax.psum(gradient, "fsdp"),)
        return (
            jax.lax.psum_scatter(gradient, "fsdp", scatter_dimension=axis, tiled=True),
        )

    fetch.defvjp(lambda x: (fetch(x), None), backward)
    return fetch(x)


def fetched_by_layer(tutorial) -> None:
    """With `fsdp`, a block's parameters are fetched where it runs, forward and backward.

    Its gradients are summed there, too, once for each micro-batch.
    """

    def mean_over_devices(loss_and_gradients, params, windows, rules):
        mesh = jax.sharding.get_abstract_mesh()
        axes = tuple(a for a in trainkit.devices.BATCH_AXES if mesh.shape[a] > 1)
        with nnx.logical_axis_rules(rules):
            specs = nnx.get_partition_spec(params)
        specs = jax.tree.map(
            lambda spec: PartitionSpec(*(a if a in axes else None for a in spec)), specs
        )
        paths = nnx.to_flat_state(params)
        in_layer = {}
        for (path, _), spec in zip(paths, jax.tree.leaves(specs), strict=True):
            if path[0] == "h":
                layer_specs[path[2:]] = spec
            in_layer[path] = path[0] == "h"
        in_layer = jax.tree.unflatten(
            jax.tree.structure(params), list(in_layer.values())
        )

        def fetch(x, spec, in_layer):
            if "fsdp" not in spec or in_layer:
                return x
            return jax.lax.all_gather(x, "fsdp", axis=spec.index("fsdp"), tiled=True)

        def mean(x, spec, in_layer):
            others = axes
            if in_layer:
                others = tuple(axis for axis in axes if axis != "fsdp")
            elif "fsdp" in spec:
                i = spec.index("fsdp")
                x = jax.lax.psum_scatter(x, "fsdp", scatter_dimension=i, tiled=True)
                others = tuple(axis for axis in axes if axis != "fsdp")
            x = jax.lax.psum(x, others) if others else x
            return x / jax.lax.axis_size(axes)

        def on_device(params, windows):
            everything = jax.tree.map(fetch, params, specs, in_layer)
            loss, gradients = loss_and_gradients(everything, windows)
            gradients = jax.tree.map(mean, gradients, specs, in_layer)
            return jax.lax.pmean(loss, axes), gradients

        return jax.shard_map(
            on_device,
            in_specs=(specs, PartitionSpec(axes)),
            out_specs=(PartitionSpec(), specs),
            axis_names={*mesh.axis_names},
            check_vma=False,
        )(params, windows)

    def scan_blocks(blocks, x, rngs):
        graph, states = nnx.graphdef(blocks[0]), [nnx.state(block) for block in blocks]
        stacked = jax.tree.map(lambda *layers: jnp.stack(layers), *states)

        @jax.checkpoint
        def run_block(x, state):
            return nnx.merge(graph, fetch_layer(state))(x), None

        return jax.lax.scan(run_block, x, stacked)[0]

    def run_blocks(blocks, x, rngs, caches=None, scan=False):
        if scan:
            return scan_blocks(blocks, x, rngs)
        for block in blocks:
            graph, state = nnx.split(block)
            x = nnx.merge(graph, fetch_layer(state))(x)
        return x

    def cast_kernels(params, dtype):  # those of blocks are cast where they are fetched
        def cast(path, param):
            other = path[-1] == "kernel" and path[0] != "h"
            return param.replace(param[...].astype(dtype)) if other else param

        return nnx.map_state(cast, params)

    trainkit.gradients.mean_over_devices = mean_over_devices
    trainkit.gradients.cast_kernels = cast_kernels
    trainkit.layers.run_blocks = run_blocks
