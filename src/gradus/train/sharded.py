"""Checkpoints that several processes write and read together, each its own part, through torch.distributed.checkpoint
(DCP):

    checkpoints/step-00000400/  config.json tokenizer… training.json
                                sharded/shard-00001.safetensors …            one a process, none pickled

Tensors are stored under Gradus's names: `model.<name>`, `<optimizer state>.<name>` such as
`exp_avg.blocks.0.norm.weight`, `rng.cpu.<rank>`; a tied tensor is stored once. A tensor's parts carry their offsets, so
that any number of processes in any layout reads what any other wrote. `load`, `load_state` and `read` read the
checkpoints of one process too (train.checkpoint).
"""

from __future__ import annotations

import functools
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.tensor import DTensor

from gradus import files, models, tasks
from gradus.errors import FAULT, EnvironmentFault, UserError, disk_full, exit_code, first_line, not_written
from gradus.models import weights
from gradus.models.values import fill, place
from gradus.models.weights import Stored, checksums
from gradus.models.weights import sharded as stored_sharded
from gradus.parallel import world as worlds
from gradus.parallel.engine import gathered
from gradus.recipe.schema import ModelConfig

# ---------------------------------------------------------------- names and parts


@functools.lru_cache(maxsize=64)
def stored_names(config: ModelConfig) -> dict[str, str]:
    """Every parameter's name in the whole model → the name that it is stored under: a tied one has several names and is
    stored once."""
    return weights.first_names(models.whole(config))


def _key(key: str, names: Mapping[str, str]) -> str:
    kind, _, name = key.partition(".")
    return f"{kind}.{names.get(name, name)}"


def like(parameter: Tensor, local: Tensor) -> Tensor:
    """This process's part of a tensor that is split as `parameter` is (optimizer state), as a DTensor of the whole.
    A scalar, and the state of a plain parameter, stay as they are."""
    if not isinstance(parameter, DTensor) or local.ndim == 0:
        return local
    mesh, placements = parameter.device_mesh, parameter.placements
    shape, stride = parameter.shape, parameter.stride()
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=shape, stride=stride)


# ---------------------------------------------------------------- between processes


def _first(group: dist.ProcessGroup | None) -> bool:
    return not dist.is_initialized() or dist.get_rank(group) == 0


def _agree(error: UserError | None, group: dist.ProcessGroup | None, value: Any = None) -> list[Any]:
    """Raise the first error of any process on all of them. Returns the `value` of every process. Collective."""
    answers = worlds.gathered((None if error is None else (str(error), exit_code(error)), value), group)
    problem = next((problem for problem, _ in answers if problem is not None), None)
    if problem is not None:
        raise (EnvironmentFault if problem[1] == FAULT else UserError)(problem[0])
    return [value for _, value in answers]


def _not_written(target: Path, error: BaseException) -> UserError:
    # DCP's error holds the failures of every process
    causes = [error, *(failure[0] for failure in getattr(error, "failures", {}).values())]
    plain = next((c for c in causes if isinstance(c, UserError)), None)
    full = next((c for c in causes if disk_full(c)), None)
    if plain is not None and full is None:
        return plain
    last, then = causes[-1], f"{target.name} was not written; earlier checkpoints are complete."
    if full is not None or isinstance(last, OSError | SafetensorError):
        return not_written(target.parent, full or last, f"{then} Free some space, then continue with --resume.")
    return UserError(f"{target.parent}: writing failed ({first_line(last)}): {then} Continue with --resume.")


# ---------------------------------------------------------------- save


class Writer(HuggingFaceStorageWriter):
    """Writes the files of HuggingFaceStorageWriter without its two copies of all tensors, and computes the checksums of
    what this process wrote. `sums`: by path below the checkpoint."""

    def __init__(self, folder: Path):
        super().__init__(str(folder), save_distributed=True)
        self.sums: dict[str, dict] = {}

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> torch.futures.Future:
        written = torch.futures.Future()
        tensors = {item.index.fqn: planner.resolve_data(item).detach().cpu().contiguous() for item in plan.items}
        places = {item.index.fqn: {"saved_offsets": list(item.tensor_data.chunk.offsets)} for item in plan.items}
        if tensors:
            file = Path(self.path) / f"shard-{plan.storage_data['shard_index']:05}.safetensors"
            save_file(tensors, file, {"format": "pt", "DCP_VERSION": "1.0", "DCP_SHARDING_INFO": json.dumps(places)})
            with open(file, "rb") as f:
                os.fsync(f.fileno())
            self.sums[f"{stored_sharded.FOLDER}/{file.name}"] = checksums.of(file)
        written.set_result([WriteResult(item.index, tensors[item.index.fqn].nbytes, None) for item in plan.items])
        return written


class Pending:
    """A checkpoint that is being written, of a GPU's tensors while training goes on. Nothing looks whole before
    `finish`."""

    def __init__(self, target: Path, aside: Path | None, group: dist.ProcessGroup | None):
        # aside: the folder that becomes the target; None where the target was there already
        self.target, self.aside, self.group = target, aside, group
        self.future: Future | None = None
        self.writer: Writer | None = None

    def done(self) -> bool:
        """Whether this process knows how the writing ended, well or not. Never waits. Processes learn it at different
        moments."""
        return self.future is None or self.future.done()

    def finish(self) -> Path:
        """Wait until every process has written its part and flushed it to the disk, then let the folder appear under
        its name. Collective on the group of `save`: call it at a step that all agree on.

        Raises UserError on every process where one could not write; then no folder is left.
        """
        error, sums = None, {}
        try:
            written = self.future.result().state_dict_metadata if self.future else {}
        except KeyboardInterrupt:
            raise
        except BaseException as e:  # DCP's own derives from BaseException
            error = _not_written(self.target, e)
        try:
            for of_one in _agree(error, self.group, self.writer.sums if self.writer else {}):
                sums |= of_one
            if self.future is not None and _first(self.group):
                self._appear(written, sums)
        except UserError as e:
            error = e
            if _first(self.group) and self.aside is not None:
                shutil.rmtree(self.aside, ignore_errors=True)
        _agree(error, self.group)
        return self.target

    def _appear(self, written: dict[str, Any], sums: dict[str, dict]) -> None:
        try:
            there = stored_sharded.read(self.aside)
        except UserError:  # a part is missing in the middle, or all
            there = {}
        torn = [name for name, about in written.items() if name not in there or there[name].shape != tuple(about.size)]
        if torn:
            raise UserError(
                f"{self.target.parent}: parts of {weights.some(torn)} did not arrive: "
                "the processes do not share this folder. Set log.dir to a disk that all hosts see."
            )
        try:
            checksums.write(self.aside, sums)
            files.appear(self.aside, self.target)
        except OSError as e:
            raise _not_written(self.target, e) from None


def save(
    target: Path, config: ModelConfig, tensors: Mapping[str, Tensor], fill: Callable[[Path], None],
    group: dist.ProcessGroup | None = None,
) -> Pending:  # fmt: skip
    """Begin to write the checkpoint `target`. Returns when a GPU's tensors are copied to the host, or a CPU's written
    (a copy would be memory that a step needs); they may be changed then.

    tensors: what this process has, under the names above: DTensors where it has a part, plain tensors where it has the
    whole. What several processes have is written by one of them. fill(folder), on the first process, adds the rest
    (tokenizer, training.json).
    group: a gloo group of all processes that nothing else uses, since its collectives run beside those of the training.
    Collective. Raises UserError on every process where the first cannot write. A checkpoint that is there already is
    whole and stays.
    """
    names = stored_names(config)
    begun, error = [None], None
    if _first(group) and not target.exists():
        aside = files.temporary(target)
        try:
            (aside / stored_sharded.FOLDER).mkdir(parents=True)
            # of an adapter a pipeline's first stage may hold nothing
            dtype = next((t.dtype for key, t in tensors.items() if key.startswith("model.")), torch.float32)
            text = json.dumps(models.to_config_json(config, dtype), indent=2)
            (aside / "config.json").write_text(text + "\n")
            fill(aside)
            begun = [aside]
        except (OSError, SafetensorError, UserError) as e:
            shutil.rmtree(aside, ignore_errors=True)
            error = _not_written(target, e)
    _agree(error, group)
    if dist.is_initialized():
        dist.broadcast_object_list(begun, group_src=0, group=group)
    pending = Pending(target, begun[0], group)
    if begun[0]:
        pending.writer = Writer(pending.aside / stored_sharded.FOLDER)
        stored = {_key(key, names): tensor.detach() for key, tensor in tensors.items()}
        more = {"storage_writer": pending.writer, "process_group": group}
        if any(tensor.device.type != "cpu" for tensor in stored.values()):
            pending.future = dcp.async_save(stored, **more)
        else:
            pending.future = Future()
            try:
                pending.future.set_result(dcp.save(stored, **more))
            except KeyboardInterrupt:
                raise
            except BaseException as e:  # `finish` tells all processes
                pending.future.set_exception(e)
    return pending


# ---------------------------------------------------------------- load


def read(checkpoint: Path) -> dict[str, Stored]:
    """Every tensor of a checkpoint under its stored name (`stored_names`), read on demand. Needs no process group.

    Raises UserError where the checkpoint is damaged or not whole.
    """
    checkpoint = Path(checkpoint)
    if (checkpoint / stored_sharded.FOLDER).is_dir():
        return dict(stored_sharded.read(checkpoint))
    config = models.config_of(checkpoint)
    model, theirs = models.whole(config), models.tensors_of(checkpoint)
    file = checkpoint / "training.safetensors"  # none beside weights from elsewhere
    training = weights.read_files([file]) if file.is_file() else {}
    stored = {f"model.{name}": stored for name, stored in weights.fitting(model, theirs, checkpoint)[0].items()}
    return stored | {_key(key, stored_names(config)): stored for key, stored in training.items()}


def load(checkpoint: Path, tensors: Mapping[str, Tensor]) -> None:
    """Fill tensors in place from a checkpoint that any number of processes wrote in any layout; each process reads its
    own part.

    tensors: under the names above, DTensors or plain, of any device and dtype. Needs no other process.
    Raises UserError where one is missing in the checkpoint, has another shape there, or the checkpoint is damaged.
    """
    stored, names = read(checkpoint), stored_names(models.config_of(checkpoint))
    missing = [key for key in tensors if _key(key, names) not in stored]
    if missing:
        raise _foreign(checkpoint, f"{weights.some(missing)} not in it")
    values = {key: stored[_key(key, names)] for key in tensors}
    for key, tensor in tensors.items():
        if key.startswith("model."):
            weights.refuse_integers(key, values[key], checkpoint)
        if values[key].shape != tuple(tensor.shape):
            raise _foreign(checkpoint, f"{key} is {values[key].shape} there and {tuple(tensor.shape)} here")
    fill(tensors, values)


def _foreign(checkpoint: Path, what: str) -> UserError:
    return UserError(
        f"{checkpoint}: {what}. It belongs to another model or optimizer: resume with the recipe that wrote it."
    )


def load_state(checkpoint: Path, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The optimizer's state for these parameters (by their names in the whole model), as optim.load_state_tensors takes
    it: `exp_avg.<name>` → this process's part, a plain tensor on the host. Needs no other process. Raises UserError as
    `load`."""
    stored, names = read(checkpoint), stored_names(models.config_of(checkpoint))
    kinds = sorted({key.partition(".")[0] for key in stored} - {"model", "rng"})
    state = {}
    for key, parameter in ((f"{kind}.{name}", p) for name, p in parameters.items() for kind in kinds):
        source = stored.get(_key(key, names))
        if source is None:
            raise _foreign(checkpoint, f"{key} not in it")
        if source.shape not in ((), tuple(parameter.shape)):
            raise _foreign(checkpoint, f"{key} is {source.shape} there and {tuple(parameter.shape)} here")
        state[key] = source.part(*place(parameter)) if source.shape else source.read()
    return state


# ---------------------------------------------------------------- weights of a live model, in the Hugging Face layout


def export(
    parameters: Mapping[str, Tensor], config: ModelConfig, target: Path, tokenizers: Mapping = {},
    group: dist.ProcessGroup | None = None, fill_more: Callable[[Path], None] = lambda folder: None,
) -> None:  # fmt: skip
    """Make the folder `target` with config.json, model.safetensors, the tokenizers and what fill_more(folder) adds,
    from the parts that the processes hold, one parameter at a time.

    parameters, group: as `parallel.engine.gathered` takes them. Collective. Raises UserError on every process where the
    first cannot write. A folder that is there already is whole and stays.
    """
    names = stored_names(config)
    # in the order in which the rules of the family ask for them
    model = models.whole(config)
    rules = _rules(model)
    order = dict.fromkeys(names[our] for rule in rules for our in rule.names)
    parts, error = gathered(parameters, config, order, group), None

    def fill(aside: Path) -> None:
        dtype = next(iter(parameters.values())).dtype
        described = models.to_config_json(config, dtype)
        weights.write(_theirs(parts, rules, names), described, aside, adapter=models.adapter_config(model))
        tasks.save_tokenizers(aside, tokenizers)
        fill_more(aside)

    if _first(None):
        try:
            checksums.write_aside(target, fill)
        except UserError as e:
            error = e
    for _ in parts:  # the other processes send theirs, whether the first still wants them or not
        pass
    _agree(error, None)


def _rules(model: torch.nn.Module) -> list[weights.Rule]:
    """Of what a folder of weights holds: with an adapter, of what is trained."""
    held = {name for name, p in model.named_parameters(remove_duplicate=False) if p.requires_grad}
    return [rule for rule in weights.rules(model) if not model.config.adapter or held.issuperset(rule.names)]


def _theirs(
    parts: Iterator[tuple[str, Tensor]], table: list[weights.Rule], names: Mapping[str, str]
) -> Iterator[tuple[str, Tensor]]:
    """The gathered tensors as Hugging Face calls and stores them."""
    rules: dict[tuple, weights.Rule] = {}  # each stored tensor once
    for rule in table:
        rules.setdefault(tuple((names[our], rule.index) for our in rule.names), rule)
    last = {name: i for i, keys in enumerate(rules) for name, _ in keys}
    gathered: dict[str, Tensor] = {}
    for i, (keys, rule) in enumerate(rules.items()):
        while not all(name in gathered for name, _ in keys):
            name, tensor = next(parts)
            gathered[name] = tensor.cpu()
        yield rule.theirs, rule.to_theirs(*(gathered[name] if n is None else gathered[name][n] for name, n in keys))
        gathered = {name: tensor for name, tensor in gathered.items() if last[name] > i}
