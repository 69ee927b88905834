"""The mesh, how parameters are divided over it, and batches on it."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import trainkit.sharding
from conftest import ROOT
from flax import nnx, traverse_util

import trainkit.config

SHAPES = [(8, 1, 1), (1, 8, 1), (1, 1, 8), (2, 4, 1), (2, 2, 2)]  # data, fsdp, tensor
TABLE = {  # parts of names, of which the first counts, and what divides their axes
    **{"ln_": (None,), "wpe": (None, "fsdp"), "wte": ("tensor", "fsdp")},
    **{"c_proj/kernel": ("tensor", "fsdp"), "c_proj/bias": ("fsdp",)},
    **{"kernel": ("fsdp", "tensor"), "bias": ("tensor",)},
}


@pytest.mark.parametrize("shape", SHAPES)
def test_parameters_are_divided_as_the_table_says(tutorial, small, shape):
    """And the optimizer's moments as they are; all else is whole.

    So is what has another shape than its parameter, as Adafactor keeps rows of a matrix.
    """

    def create_state(config):
        state = tutorial.create_state(config)
        rows = jax.tree.map(lambda x: x.mean(axis=0), state.params)
        return state._replace(opt_state=(state.opt_state[1][0], rows))

    mesh = jax.sharding.AbstractMesh(shape, trainkit.sharding.AXES)
    config = small(n_head=8, n_embd=64)
    state = trainkit.sharding.abstract_state(create_state, config, mesh)
    moments, rows = state.opt_state
    params = jax.tree.leaves_with_path(state.params)
    others = zip(*map(jax.tree.leaves, (moments.mu, moments.nu)), strict=True)
    for (path, x), (mu, nu) in zip(params, others, strict=True):
        name = trainkit.sharding.name_of(path)
        axes = next(axes for part, axes in TABLE.items() if part in name)
        expected = tuple(n // mesh.shape.get(axis, 1) for n, axis in zip(x.shape, axes))
        assert x.sharding.shard_shape(x.shape) == expected, name
        assert x.sharding == mu.sharding == nu.sharding
    for x in (state.step, moments.count, *jax.tree.leaves(rows)):
        assert x.sharding.is_fully_replicated


def batches_for(config, numbers):
    """One worker's rows, step by step, of windows with these numbers."""
    for step in np.reshape(numbers, (-1, 1, config.batch_size)):
        tokens = np.repeat(step[..., None], config.block_size + 1, axis=-1)
        yield {"indices": step, "tokens": tokens.astype(np.uint16)}


def test_batches_are_those_of_the_numbers_and_one_is_fetched_ahead(small):
    """No step waits for its batch, and no more than two are on a device."""

    def fetched():
        for batch in batches_for(config, numbers):
            order.append("fetched")
            yield batch

    config, order, numbers = small(), [], np.arange(8, 20).reshape(3, 4)
    mesh, found = trainkit.sharding.make_mesh(config), []
    for batch in trainkit.sharding.global_batches(fetched(), [numbers], config, mesh):
        order.append("used")
        found.append(batch)
    assert [batch.shape for batch in found] == [(4, 17)] * 3
    assert np.concatenate(found)[:, 0].tolist() == list(range(8, 20))
    assert found[0].sharding == trainkit.sharding.batch_sharding(mesh)
    assert order == ["fetched", *["fetched", "used"] * 2, "used"]


@pytest.mark.parametrize(
    "numbers, message",
    [
        ([0, 1, 2, 3, 4, 6, 7, 8], r"the windows \[4 5 6 7\], found \[4 6 7 8\]"),
        ([0, 1, 2, 3, 3, 4, 5, 6], r"the windows \[4 5 6 7\], found \[3 4 5 6\]"),
        ([0, 2, 1, 3, 4, 5, 6, 7], r"the windows \[0 1 2 3\], found \[0 2 1 3\]"),
        ([4, 5, 6, 7, 8, 9, 10, 11], r"the windows \[0 1 2 3\], found \[4 5 6 7\]"),
        ([0, 1, 2, 3], r"the windows \[4 5 6 7\], found None"),
    ],
)
def test_windows_that_are_not_those_of_the_step_are_noticed(small, numbers, message):
    config, expected = small(), np.arange(8).reshape(2, 4)
    batches = batches_for(config, numbers)
    mesh = trainkit.sharding.make_mesh(config)
    with pytest.raises(RuntimeError, match=f"expected {message}"):
        list(trainkit.sharding.global_batches(batches, [expected], config, mesh))


@pytest.fixture
def specs_of(monkeypatch):
    """A function that says how rules divide arrays of these names and shapes."""

    def specs_of(rules, shapes: dict, fsdp=2, tensor=1) -> dict[str, tuple]:
        monkeypatch.setattr(trainkit.sharding, "RULES", rules)
        arrays = {
            name: nnx.Param(jax.ShapeDtypeStruct(shape, np.float32))
            for name, shape in shapes.items()
        }
        params = nnx.State(traverse_util.unflatten_dict(arrays, sep="/"))
        mesh = SimpleNamespace(shape={"data": 1, "fsdp": fsdp, "tensor": tensor})
        specs = trainkit.sharding.parameter_specs(params, mesh)
        leaves = jax.tree.leaves_with_path(specs)
        return {trainkit.sharding.name_of(path): tuple(spec) for path, spec in leaves}

    return specs_of


def test_the_first_row_that_fits_counts_or_the_largest_axis_that_divides(specs_of):
    expected = {
        "up/first/kernel": ((2, 4), ("tensor", None)),
        "first/kernel": ((4, 4), ("fsdp", "tensor")),
        "first/bias": ((4,), ("tensor",)),
        "a/kernel": ((6, 8), (None, "fsdp")),
        "a/bias": ((8,), ("fsdp",)),
        "b/kernel": ((16, 8), ("fsdp", None)),
        "b/bias": ((8,), (None,)),
        "c/kernel": ((6, 9), (None, None)),
        "d/w": ((3, 4, 12), (None, None, "fsdp")),
        "e/scale": ((8,), (None,)),
        "f/alpha": ((), ()),
        "side_by_side/kernel": ((3, 8, 4), (None, "fsdp", None)),
        "side_by_side/bias": ((3, 4), (None, "fsdp")),  # not the kernel's last axes
    }
    rules = (("up/first", ("tensor", None)), ("first", ("fsdp", "tensor")))
    found = specs_of(rules, {name: shape for name, (shape, _) in expected.items()}, 4)
    assert found == {name: spec for name, (_, spec) in expected.items()}


@pytest.mark.parametrize(
    "rule, message",
    [
        (("nothing", ("fsdp", "tensor")), "no row .* there are layer/kernel and"),
        (("lay", ("fsdp", "tensor")), "no row .* of this model"),  # a part of a word
        (("layer", ("tensor",)), "no row .* of this model"),  # of another shape
        (("layer", ("fsdp", None)), "no row .* of this model"),
        (("layer", ("tensor", "fsdp")), r"layer/kernel, \[4, 3\], is divided over"),
        (("layer/kernel", ("tensor", "tensor")), "over tensor, and 3 is no multiple"),
        (("layer", ("data", "tensor")), "layer/kernel is divided over data; expected"),
    ],
)
def test_rows_that_cannot_be_followed_are_refused(specs_of, rule, message):
    match = f"(tensor_parallel|sharding.RULES): .*{message}"
    with pytest.raises(ValueError, match=match):
        specs_of((rule,), {"layer/kernel": (4, 3)}, tensor=2)


def test_only_the_models_own_blocks_are_left_to_the_loop(small, monkeypatch):
    """`run_blocks` fetches these; a list in another layer, nothing would."""
    fetch_part = lambda part, axis, dtype: part + 1  # noqa: E731
    monkeypatch.setattr(trainkit.sharding, "fetch_part", fetch_part)
    names = ("h", 0, "kernel"), ("neck", "layers", 0, "kernel"), ("scale",)
    params, specs = (
        nnx.State(traverse_util.unflatten_dict({name: nnx.Param(x) for name in names}))
        for x in (jnp.zeros(4), jax.sharding.PartitionSpec("fsdp"))
    )
    found = trainkit.sharding.fetch(params, specs, small(scan_layers=True))
    assert found["h"][0]["kernel"].get_metadata("fetch") == (0, "float32")
    assert found["neck"]["layers"][0]["kernel"][...].tolist() == [1] * 4
    assert found["scale"][...].tolist() == [1] * 4


def test_parameters_of_two_bytes_are_refused(tutorial, small):
    """Gradients are float32, and would turn what the optimizer keeps into it."""

    def create_state(config):
        state = tutorial.create_state(config)
        half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), state.params)
        return state._replace(params=half)

    mesh = trainkit.sharding.make_mesh(config := small())
    with pytest.raises(ValueError, match="create_model: h/0/.* is bfloat16; expected"):
        trainkit.sharding.abstract_state(create_state, config, mesh)


def test_the_gpus_of_a_node_are_neighbors_on_fsdp(monkeypatch):
    """Eight in each of four nodes, however many workers a node has."""
    monkeypatch.setattr(trainkit.sharding.jax.sharding, "Mesh", lambda grid, axes: grid)
    kind = {"platform": "gpu", "device_kind": "H100"}
    gpus = [SimpleNamespace(id=i, **kind) for i in range(32)]
    nodes = np.arange(32).reshape(4, 8)
    path = ROOT / "configs/gpt2-7b-gpu.yaml"
    for workers, each in ((32, 1), (4, 8)):
        changes = {"num_workers": workers, "devices_per_worker": each, "fsdp": 8}
        config = trainkit.config.load_config(path, **changes)
        grid = trainkit.sharding.make_mesh(config, gpus)[:, :, 0]
        np.testing.assert_array_equal([[gpu.id for gpu in row] for row in grid], nodes)


def test_rows_of_a_worker_are_those_of_its_devices(small, monkeypatch):
    """Of two workers with two devices each, the second holds the other half."""
    config, mesh = small(batch_size=8), trainkit.sharding.make_mesh(small())
    third, fourth = (slice(4, 6),), (slice(6, 8),)
    held = {"third": third, "fourth": fourth, "copy": third}
    sharding = SimpleNamespace(addressable_devices_indices_map={(8,): held}.get)
    monkeypatch.setattr(trainkit.sharding, "batch_sharding", lambda mesh: sharding)
    assert trainkit.sharding.local_rows(config, mesh).tolist() == [4, 5, 6, 7]


def test_only_the_data_axis_crosses_slices(small, monkeypatch):
    """Two slices of four chips: JAX is asked for a mesh in each, and for two of them."""
    chips = [SimpleNamespace(platform="tpu", slice_index=i // 4) for i in range(8)]
    asked = []

    def hybrid(within, across, **options):
        asked.append((within, across, len(options["devices"])))
        return np.array(trainkit.sharding.jax.devices() * 8).reshape(4, 2, 1)

    create = "create_hybrid_device_mesh"
    monkeypatch.setattr(trainkit.sharding.mesh_utils, create, hybrid)
    monkeypatch.setattr(trainkit.sharding.jax.sharding, "Mesh", lambda *a: a)
    config = SimpleNamespace(mesh_shape=lambda n: (4, 2, 1), worker_range=(2, 2))
    grid, axes = trainkit.sharding.make_mesh(config, chips)
    assert asked == [((2, 2, 1), (2, 1, 1), 8)] and axes == ("data", "fsdp", "tensor")
