"""How the processes are arranged: one axis for each way to split the work."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from gradus.parallel.world import World
from gradus.recipe.axes import AXES, DATA, needed, sizes  # noqa: F401  (DATA and needed: for those who use a mesh)
from gradus.recipe.schema import Layout
from gradus.torch_private import flatten_mesh

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def single_process(layout: Layout) -> Layout:
    """The layout without what concerns several processes: as one that evaluates a run of many has it."""
    one = {
        "device", "threads", "precision", "tf32", "micro_batch", "attention", "chunk", "checkpointing", "loss",
        "compile",
    }  # fmt: skip
    return layout.model_copy(
        update={key: field.default for key, field in type(layout).model_fields.items() if key not in one}
    )


@dataclasses.dataclass(eq=False)
class Mesh:
    """The arrangement as one process sees it. `sizes`: axis → processes; the world's ranks run along the last axis
    first."""

    world: World
    sizes: dict[str, int]
    devices: DeviceMesh | None = None  # None: one process, or whole replicas that come and go

    @classmethod
    def single(cls) -> Mesh:
        """Of one process."""
        return cls(World(), dict.fromkeys(AXES, 1))

    @classmethod
    def make(cls, layout: Layout, world: World, device: str = "cpu") -> Mesh:
        """Raises AssertionError when the layout does not fit the number of processes. Collective: every process makes
        it."""
        shape = sizes(layout, world.size)
        if world.size == 1 or world.newcomer or (layout.elastic and layout.shard == 1):
            return cls(world, shape)
        from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

        if world.groups:
            ranks, names = torch.arange(world.size).view(-1, layout.shard), ("replicate", "shard")
            return cls(world, shape, DeviceMesh.from_group([*world.groups], device, ranks, mesh_dim_names=names))
        return cls(world, shape, init_device_mesh(device, tuple(shape.values()), mesh_dim_names=AXES))

    def size(self, *axes: str) -> int:
        return math.prod(self.sizes[a] for a in axes)

    def rank(self, *axes: str) -> int:
        """This process's place along the axes taken as one, the first the slowest."""
        place, rest = {}, self.world.rank
        for axis in reversed(AXES):
            rest, place[axis] = divmod(rest, self.sizes[axis])
        index = 0
        for axis in axes:
            index = index * self.sizes[axis] + place[axis]
        return index

    @functools.cache  # noqa: B019  (a mesh lives as long as the process)
    def sub(self, *axes: str) -> DeviceMesh:
        """The mesh of these axes taken as one, through this process: one-dimensional."""
        assert list(axes) == [a for a in AXES if a in axes], f"{axes}: not in the order of {AXES}"
        wide = tuple(a for a in axes if self.sizes[a] > 1) or axes[:1]
        return self.devices[wide[0]] if len(wide) == 1 else flatten_mesh(self.devices[wide], "_".join(wide))

    def group(self, *axes: str) -> dist.ProcessGroup | None:
        """The processes that differ from this one only along `axes` (in the order of AXES); None where there is no
        other."""
        if self.size(*axes) == 1:
            return None
        everybody = self.devices is None or (self.world.groups and self.size(*axes) == self.world.size)
        return dist.group.WORLD if everybody else self.sub(*axes).get_group()

    def seed_dropout(self, seed: int, step: int = 0) -> None:
        """Dropout is drawn from the seed where this process is the only one or the first; processes that split the
        matrix products of the same samples draw alike, others differ. step: of the run, where it is drawn anew."""
        place = self.rank("pipeline", "replicate", "expert", "shard", "context")
        torch.manual_seed(seed + 1_000_003 * place + 7_919 * step)

    def describe(self) -> str:
        """For example `shard 2 × tensor 2`."""
        return " × ".join(f"{axis} {n}" for axis, n in self.sizes.items() if n > 1) or "one process"
