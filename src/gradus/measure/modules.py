"""The module tree as a layout places it: what each process holds of every parameter. Nothing is computed and no other
process is needed."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from gradus import models
from gradus.errors import UserError
from gradus.parallel import check
from gradus.parallel.apply import apply
from gradus.parallel.device import pick_device
from gradus.parallel.engine import Parallel
from gradus.parallel.fake import cast, fake_world
from gradus.parallel.mesh import AXES, Mesh, needed
from gradus.parallel.precision import Precision
from gradus.recipe.schema import ModelConfig, Recipe
from gradus.text import table as columns
from gradus.torch_private import FakeTensorMode
from gradus.train.session import open_session


def modules(recipe: Recipe, n: int | None = None, rank: int = 0, data: bool = True) -> list[str]:
    """The lines of the tree on process `rank` of n (None: as many as the layout names), by module: class, and of each
    parameter its name, whole shape → shape here, dtype and placements.

    data: open the data for what the recipe leaves to them, such as the vocabulary's size.
    Raises UserError for a layout that does not fit, and without data for a size that the recipe does not have.
    """
    n = needed(recipe.layout) if n is None else n
    if n < 1 or not 0 <= rank < n:
        raise UserError(f"--rank={rank} of --processes={n}: ranks go from 0 to processes - 1.")
    # nothing is run here: neither the device nor how it is computed or sent changes what is held
    layout = recipe.layout.model_copy(
        update={
            "device": "cpu", "compile": "none", "compress": "none", "transport": "torch",
            "precision": recipe.layout.precision.replace("fp8", "bf16"),
        }
    )  # fmt: skip
    check.validate(recipe, n)
    recipe = recipe.model_copy(update={"layout": layout})
    with fake_world(n, rank) as world:
        config = open_session(recipe, world=world).recipe.model if data else _complete(recipe)
        mesh = Mesh.make(layout, world)
        with FakeTensorMode():
            precision = Precision(layout.precision, pick_device("cpu"))
            model = models.build(config)
            parallel = apply(cast(model, precision.dtype) if precision.pure else model, layout, mesh)
            title = f"{recipe.name}, process {rank} of {n}: {mesh.describe()}{_stages(parallel)}"
            return [title, "", *_tree(parallel), "", *_totals(parallel, config)]


def _complete(recipe: Recipe) -> ModelConfig:
    """Raises UserError for what only the data or the task would tell."""
    model, head = recipe.model, recipe.task.head
    for key, unknown in (
        ("head", getattr(model, "head", None) == "none" and head is not None),
        ("vocab_size", model.vocab_size is None and model.reads == "text"),
        ("n_classes", head == "classification" and model.n_classes is None),
    ):
        if unknown:
            raise UserError(f"model.{key}: only the data tell it. Set model.{key}, or leave out --no-data.")
    return model


def _stages(parallel: Parallel) -> str:
    pipeline = parallel.pipeline
    if pipeline is None:
        return ""
    spans = [f"{s} (blocks {pipeline.bounds[s]} to {pipeline.bounds[s + 1] - 1})" for s in sorted(pipeline.stages)]
    return f"; stage{'s' if len(spans) > 1 else ''} {' and '.join(spans)} of {pipeline.n_stages}"


def _tree(parallel: Parallel) -> list[str]:
    head, *rows = ((*row, "", "", "")[:4] for row in _rows(parallel.part, parallel))
    return columns(head, rows, right=())


def _rows(root: nn.Module, parallel: Parallel) -> Iterator[tuple[str, ...]]:
    """(module,), (parameter, shapes, dtype, placements), or (parameter, whose it is)."""
    first: dict[int, str] = {}

    def walk(module: nn.Module, name: str, path: str, depth: int) -> Iterator[tuple[str, ...]]:
        indent = "  " * depth
        kind = type(module)
        unit = isinstance(module, FSDPModule)
        kind = kind.__mro__[2] if unit else kind  # FSDP2 makes a class of FSDPModule and the module's own
        yield (f"{indent}{name}{': ' if name else ''}{kind.__name__}{', gathered as one' if unit else ''}",)
        for key, p in module.named_parameters(recurse=False):
            if id(p) in first:
                yield f"{indent}  {key}", f"shared: {first[id(p)]}"
                continue
            first[id(p)] = path + key
            yield f"{indent}  {key}", _shapes(p), str(p.dtype).removeprefix("torch."), _placed(p, path + key, parallel)
        for key, child in module.named_children():
            if not type(child).__module__.startswith("gradus.parallel."):  # in the place of what another stage has
                yield from walk(child, key, f"{path}{key}.", depth + 1)

    yield from walk(root, "", "", 0)


def _local(p: nn.Parameter) -> Tensor:
    return p.to_local() if isinstance(p, DTensor) else p


def _shapes(p: nn.Parameter) -> str:
    whole, local = tuple(p.shape), tuple(_local(p).shape)
    return f"{whole} → {local}" if local != whole else f"{whole}"


def _placed(p: nn.Parameter, name: str, parallel: Parallel) -> str:
    """The axes in the order in which they cut, the nearest first."""
    words = []
    if isinstance(p, DTensor):
        for axis, placement in reversed(list(zip(p.device_mesh.mesh_dim_names, p.placements))):
            # Shard, also FSDP2's within a tensor-parallel one
            split = placement.dim if hasattr(placement, "dim") else None
            words.append(f"{axis.replace('_', ' × ')}: {'Replicate()' if split is None else f'Shard({split})'}")
    else:
        others = parallel.mesh.size(*(axis for axis in AXES if axis != "pipeline"))
        words.append("replicated" if others > 1 else "whole")
    if parallel.pipeline and name in parallel.pipeline.tied:
        words.append(f"tied: on pipeline processes {', '.join(map(str, parallel.pipeline.tied[name]))}")
    if parallel.optimizer_shards:
        words.append(f"stepped by replica {parallel.optimizer_shards.owner[name]}")
    return ", ".join(words)


def _totals(parallel: Parallel, config: ModelConfig) -> Iterator[str]:
    tensors = [_local(p) for p in parallel.part.parameters()]
    whole, elements = models.count(config)["total"], sum(p.numel() for p in tensors)
    for label, count in (("parameters in total", whole), ("on this process", elements)):
        yield f"{label:24} {count:>17,}  {count * tensors[0].dtype.itemsize:>19,} bytes"
