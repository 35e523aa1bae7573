"""Checkpoints hold real vocabulary rows only, in the parameters and in what the optimizer keeps of them."""

import jax
import numpy as np
import pytest

from jaxpar.mesh import make_mesh
from jaxpar.train import padding
from jaxpar.train.step import build_training
from tests.train import tiny


def training(tensor, data=1, **changes):
    changes = {"mesh.data": data, "mesh.tensor": tensor} | {name.replace("__", "."): value for name, value in changes.items()}
    run = tiny.config(tiny.ROOT, "unread", changes)
    return build_training(run, make_mesh(run.mesh, jax.devices()[: run.mesh.devices]))


def types(run):
    trimmed = padding.trimmed_types(run.abstract_state, run.gradients.specs)
    return {jax.tree_util.keystr(path): (leaf.shape, leaf.dtype) for path, leaf in jax.tree_util.tree_leaves_with_path(trimmed)}


@pytest.mark.parametrize("optimizer", ["adamw", "lion", "sgd", "adafactor", "muon"])
def test_what_is_saved_has_the_same_shapes_on_every_mesh(optimizer):
    """Wide enough for adafactor to factor, whose row statistics follow the vocabulary too."""
    changes = {"optimizer__name": optimizer, "model__vocabulary": 131, "model__width": 128}
    one, two, four = (training(tensor, **changes) for tensor in (1, 2, 4))
    assert types(one) == types(two) == types(four)
    shapes = {leaf.shape[0] for leaf in jax.tree.leaves(four.abstract_state) if leaf.shape}
    assert 132 in shapes and 132 not in {shape[0] for shape, _ in types(four).values() if shape}, "the control: there is padding to trim"


def test_trim_and_pad_are_inverse_and_touch_padded_leaves_only():
    run = training(4, data=2)
    state = run.init()
    state = jax.tree.map(lambda leaf, of: jax.device_put(leaf, of.sharding), state, run.abstract_state)
    small = padding.trim(state, run.abstract_state, run.gradients.specs)
    wanted = padding.trimmed_types(run.abstract_state, run.gradients.specs)
    cut = 0
    for (path, leaf), whole, of in zip(
        jax.tree_util.tree_leaves_with_path(small), jax.tree.leaves(state), jax.tree.leaves(wanted), strict=True
    ):
        name = jax.tree_util.keystr(path)
        assert leaf.shape == of.shape and leaf.sharding == of.sharding, name
        if leaf is not whole:
            cut += 1
            assert whole.shape[0] == 64 and leaf.shape[0] == 61 and np.array_equal(leaf, whole[:61]), name
            assert not np.any(whole[61:]), name
    assert cut == 2 * 3, "table and head, each with two moments"
    back = padding.pad(small, run.abstract_state)
    for leaf, whole in zip(jax.tree.leaves(back), jax.tree.leaves(state), strict=True):
        assert leaf.sharding == whole.sharding and np.asarray(leaf).tobytes() == np.asarray(whole).tobytes()


def test_nothing_to_trim_where_the_tensor_axis_divides_the_vocabulary():
    run = training(2, model__vocabulary=62)
    assert padding.trimmed_types(run.abstract_state, run.gradients.specs) is run.abstract_state
