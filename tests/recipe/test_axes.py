"""How ranks lie along the axes of a layout."""

from __future__ import annotations

import numpy as np
import pytest

from gradus.recipe import axes
from gradus.recipe.schema import Layout


@pytest.mark.parametrize(
    ("layout", "n"), [({}, 4), ({"tensor": 2}, 8), ({"pipeline": 3, "shard": 2}, 12), ({"pipeline": 2, "shard": 2, "context": 3, "tensor": 2}, 48), ({"expert": 4}, 8)]
)
def test_strides_are_those_of_ranks_in_an_array_of_the_axes(layout, n):
    sizes = axes.sizes(Layout(**layout), n)
    ranks = np.arange(n).reshape([sizes[axis] for axis in axes.AXES])
    assert [axes.strides(Layout(**layout), n)[axis] for axis in axes.AXES] == [step // ranks.itemsize for step in ranks.strides]
