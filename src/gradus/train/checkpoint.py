"""Run state on disk. A checkpoint of one process is a Hugging Face folder (weights, config, tokenizer) with what a
resume needs beside it (one of several processes is in `train.sharded`'s form):

    checkpoints/step-00000400/               config.json model.safetensors tokenizer…
                                             training.safetensors (optimizer, RNG)  training.json
    checkpoints/best -> best-step-00000350/  weights and tokenizer; best.json: the result of their evaluation

Everything is written into a temporary folder with the checksums of its files, flushed to the disk and renamed. A kill
at any instant leaves either the whole checkpoint or none, and later damage on the disk is noticed before it is read.
"""

from __future__ import annotations

import datetime
import itertools
import json
import math
import os
import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor

from gradus import files, models, tasks
from gradus.errors import UserError
from gradus.models.weights import checksums, some
from gradus.parallel import world as worlds
from gradus.parallel.engine import Parallel
from gradus.train.log import write_json
from gradus.train.optim import load_state_tensors, state_tensors
from gradus.train.precision import Precision


def rng_state(device: torch.device) -> dict[str, Tensor]:
    """The state of every generator that a step draws from (dropout). Data has its own, a pure function of its
    position."""
    state = {"rng.cpu": torch.get_rng_state()}
    if device.type == "cuda":
        state["rng.cuda"] = torch.cuda.get_rng_state(device)
    if device.type == "mps":
        state["rng.mps"] = torch.mps.get_rng_state()
    return state


def set_rng_state(state: dict[str, Tensor], device: torch.device) -> None:
    torch.set_rng_state(state["rng.cpu"])
    if device.type == "cuda" and "rng.cuda" in state:
        torch.cuda.set_rng_state(state["rng.cuda"], device)
    if device.type == "mps" and "rng.mps" in state:
        torch.mps.set_rng_state(state["rng.mps"])


def damage(checkpoint: Path, rank: int = 0, size: int = 1) -> str | None:
    """What is wrong with a checkpoint on the disk, in words; None: nothing. Each of `size` processes checks its share.
    """
    try:
        sums = checksums.read(checkpoint)
        if sums is None:
            return _damage_without_checksums(checkpoint)
        if "training.json" not in sums:
            return f"{checksums.FILE} does not know training.json"
        return checksums.damage(checkpoint, sums, sorted(sums)[rank::size])
    except Exception as e:  # a damaged file may raise anything
        cause = (str(e).strip() or type(e).__name__).splitlines()[0]
        return cause.removeprefix(f"{checkpoint}{os.sep}").removeprefix(f"{checkpoint}: ")


def _damage_without_checksums(checkpoint: Path) -> str | None:
    """Of a checkpoint that an earlier version wrote: whether all its parts are there and can be opened."""
    from gradus.train import sharded

    try:
        state = json.loads((checkpoint / "training.json").read_text())
        if state.get("checksums"):
            return f"{checksums.FILE} is missing"
        progress = state["progress"]
        state["step"], state["seconds"], state["metrics_position"]
        progress["step"], progress["epoch"], progress["epoch_step"]
    except FileNotFoundError:
        return "training.json is missing"
    except (ValueError, KeyError, TypeError, AttributeError):
        return "training.json is not readable"
    several = (checkpoint / "sharded").is_dir()
    if not several and not (checkpoint / "training.safetensors").is_file():
        return "training.safetensors is missing"
    if not any(key.startswith("rng.cpu") for key in sharded.read(checkpoint)):
        return "the state of the random generator is not in it"
    tasks.load_tokenizers(checkpoint)
    return None


class Checkpoints:
    """The `checkpoints/` folder of a run."""

    def __init__(self, folder: Path, keep: int):
        self.folder, self.keep = Path(folder), keep
        self.pending: Any = None  # sharded.Pending: being written
        self.group: dist.ProcessGroup | None = None  # for writing beside the training

    def steps(self) -> list[Path]:
        """All checkpoints, oldest first. They were whole when they were written."""
        return sorted(self.folder.glob("step-*"))

    def latest(self) -> Path | None:
        return (self.steps() or [None])[-1]

    def newest_whole(self) -> Path | None:
        """The newest checkpoint that is whole, the same on every process; newer ones, damaged, are named and kept under
        another name.

        None where there is no checkpoint. Raises UserError where there are some and none is whole. Collective.
        """
        damaged: dict[Path, str] = {}
        for path in reversed(worlds.gathered(self.steps())[0]):
            problem = next(filter(None, worlds.gathered(damage(path, *_place()))), None)
            if problem is None:
                for bad, why in damaged.items() if _place()[0] == 0 else ():
                    kept = _set_aside(bad).name
                    text = f"note: {bad} is damaged: {why}. It is kept as {kept}; {path.name} is taken instead"
                    print(text, flush=True)
                return path
            damaged[path] = problem
        if damaged:
            reasons = some([f"{path.name} ({why})" for path, why in damaged.items()])
            raise UserError(
                f"{self.folder}: no checkpoint here is whole: {reasons}. "
                "Put back a copy of one, or start anew with another log.dir."
            )
        return None

    def save(
        self, step: int, parallel: Parallel, tokenizers: dict, optimizer: torch.optim.Optimizer | None,
        precision: Precision, state: dict, wait: bool = False,
    ) -> Path:  # fmt: skip
        """Write one checkpoint: weights, optimizer, scaler, RNG, data position, metrics position (the last two in
        `state`).

        With several processes each writes its part, in the background unless `wait`; `finish` makes it appear.
        Collective.
        """
        state = {
            **state,
            "step": step,
            "scaler": precision.state(),
            "layout": parallel.mesh.sizes,
            "local_updates": parallel.local_updates is not None,
            "checksums": True,
        }
        target = self.folder / f"step-{step:08d}"
        if parallel.several:
            self.finish(parallel)
            self._begin(target, parallel, tokenizers, optimizer, precision, state)
            if wait:
                self.finish(parallel)
            return target

        def fill(aside: Path) -> None:
            save_weights(aside, parallel, tokenizers)
            tensors = {**state_tensors(parallel.trained(), optimizer), **rng_state(precision.device)}
            save_file({k: v.detach().contiguous().cpu() for k, v in tensors.items()}, aside / "training.safetensors")
            (aside / "training.json").write_text(json.dumps(state, indent=1))

        checksums.write_aside(target, fill)
        self._remove_old()
        return target

    def _remove_old(self) -> None:
        for old in self.steps()[: -self.keep]:
            files.remove(old)

    def _begin(
        self, target: Path, parallel: Parallel, tokenizers: dict, optimizer, precision: Precision, state: dict
    ) -> None:
        from gradus.train import sharded

        if self.group is None:
            self.group = dist.new_group(backend="gloo", timeout=datetime.timedelta(seconds=parallel.layout.timeout))
        rank, parameters = parallel.mesh.world.rank, {h.name: h.parameter for h in parallel.local_parameters}
        tensors = {f"model.{name}": p for name, p in parameters.items() if parallel.counts(name)}
        for key, local in state_tensors(parallel.trained(), optimizer).items():
            name = key.split(".", 1)[1]
            if parallel.counts(name):
                stored = f"worker{rank}_{key}" if parallel.local_updates else key
                tensors[stored] = sharded.like(parameters[name], local)
        if parallel.local_updates:
            momenta = zip(parallel.local_parameters, parallel.local_updates.state())
            tensors |= {f"outer.{h.name}": momentum for h, momentum in momenta}
        tensors |= {f"{key}.{rank}": value for key, value in rng_state(precision.device).items()}

        def fill(aside: Path) -> None:
            (aside / "training.json").write_text(json.dumps(state, indent=1))
            tasks.save_tokenizers(aside, tokenizers)

        self.pending = sharded.save(target, parallel.bare.config, tensors, fill, self.group)

    def finish(self, parallel: Parallel) -> None:
        """Wait for the checkpoint under way, if there is one, and let it appear. Collective."""
        if self.pending is not None:
            pending, self.pending = self.pending, None
            pending.finish()
            if parallel.mesh.world.first:
                self._remove_old()

    def saved(self) -> bool:
        """Whether a checkpoint is under way and this process has written its part."""
        return self.pending is not None and self.pending.done()

    def save_best(self, parallel: Parallel, tokenizers: dict, evaluated: dict[str, Any]) -> None:
        """Weights only; the name `best` moves to them in one step. Collective.

        evaluated: "step", "metric", "value" and "metrics" (all, by name) of these weights; it is stored with them.
        """
        names = (f"best-step-{evaluated['step']:08d}" + (f"-{n}" if n else "") for n in itertools.count())
        # before a kill, this step may have been evaluated too, with other weights
        target = next(p for p in (self.folder / name for name in names) if not p.exists())

        def note(aside: Path) -> None:
            write_json(aside / "best.json", evaluated)

        if parallel.several:
            from gradus.train import sharded

            parameters = {h.name: h.parameter for h in parallel.local_parameters}
            group = parallel.mesh.group("pipeline")
            sharded.export(parameters, parallel.bare.config, target, tokenizers, group, note)
            if not parallel.mesh.world.first:
                return
        else:
            checksums.write_aside(target, lambda aside: (save_weights(aside, parallel, tokenizers), note(aside)))
        self._call_best(target, evaluated["metric"])

    def _call_best(self, target: Path, metric: str) -> None:
        """Move `best` to `target`, and remove weights that were evaluated by the same metric and are worse."""
        link = self.folder / ".best-link"
        link.unlink(missing_ok=True)
        link.symlink_to(target.name)
        os.replace(link, self.folder / "best")
        for old in self.folder.glob("best-step-*"):
            if old != target and metric in _evaluated(old).get("metrics", {}):
                files.remove(old)

    def best(self, metric: str, higher: bool, known: dict[str, Any]) -> dict[str, Any] | None:
        """The best evaluation ("value", "step") by `metric` of all weights kept; `best` then names those weights.

        None where none were evaluated by it. higher: whether that is better.
        known: what the checkpoint says ("step", "metric", "value") about weights of an earlier version, which have no
        best.json of their own.
        Damaged ones are named and kept under another name. The same on every process. Collective.
        """
        return worlds.gathered(self._find_best(metric, higher, known) if _place()[0] == 0 else None)[0]

    def _find_best(self, metric: str, higher: bool, known: dict[str, Any]) -> dict[str, Any] | None:
        found: list[tuple[float, int, Path]] = []
        link = self.folder / "best"
        for folder in sorted(self.folder.glob("best-step-*")):
            try:
                sums = checksums.read(folder)
                problem = checksums.damage(folder, sums, sums) if sums is not None else None
            except ValueError:
                problem = f"{checksums.FILE} is not readable"
            if problem:
                if link.resolve() == folder.resolve():
                    link.unlink()
                print(f"note: {folder} is damaged: {problem}. It is kept as {_set_aside(folder).name}", flush=True)
                continue
            linked = sums is None and link.resolve() == folder.resolve()
            known_here = linked and folder.name == f"best-step-{known['step'] or 0:08d}"
            if known_here and not (folder / "best.json").exists():
                write_json(folder / "best.json", known | {"metrics": {known["metric"]: known["value"]}})
            evaluated = _evaluated(folder)
            value = evaluated.get("metrics", {}).get(metric)
            if value is not None and math.isfinite(value):
                found.append((value if higher else -value, evaluated["step"], folder))
        if not found:
            return None
        value, step, folder = max(found, key=lambda f: f[0])  # of equal ones the first
        self._call_best(folder, metric)
        return {"value": value if higher else -value, "step": step}

    def load(
        self, path: Path, parallel: Parallel, optimizer: torch.optim.Optimizer | None, precision: Precision, seed: int
    ) -> dict:
        """Put a checkpoint's weights, optimizer, RNG and scaler back. Returns the state that was saved with it.
        Collective."""
        if parallel.several or (path / "sharded").is_dir():
            return self._load_parts(path, parallel, optimizer, precision, seed)
        self._clear_left()
        models.load_weights(parallel.bare, path)
        tensors = load_file(path / "training.safetensors")
        rng = {k: tensors.pop(k) for k in list(tensors) if k.startswith("rng.")}
        load_state_tensors(parallel.trained(), optimizer, tensors)
        set_rng_state(rng, precision.device)
        state = json.loads((path / "training.json").read_text())
        precision.load_state(state.get("scaler", {}))
        return state

    def _clear_left(self) -> None:
        """Remove what a kill left half written or half removed."""
        for left in (*self.folder.glob(".writing-*"), *self.folder.glob(".removing-*")):
            shutil.rmtree(left, ignore_errors=True)

    def _load_parts(self, path: Path, parallel: Parallel, optimizer, precision: Precision, seed: int) -> dict:
        """From a checkpoint of any number of processes: every process reads its part."""
        from gradus.train import sharded

        mesh = parallel.mesh
        state = json.loads((path / "training.json").read_text())
        alike = state.get("layout", dict.fromkeys(mesh.sizes, 1)) == mesh.sizes
        separate = state.get("local_updates", state.get("apart", False))  # what checkpoints called it before
        if separate and not (alike and parallel.local_updates):
            n = math.prod(state["layout"].values())
            raise UserError(
                f"{path}: {n} workers with local updates wrote it, each with its own optimizer. "
                f"Resume with {n} and the same layout."
            )
        if mesh.world.first:
            self._clear_left()
        parameters = {h.name: h.parameter for h in parallel.local_parameters}
        sharded.load(path, {f"model.{name}": p for name, p in parameters.items()})
        stored, rank = sharded.read(path), mesh.world.rank
        if separate:
            names = sharded.stored_names(parallel.bare.config)
            worker = f"worker{rank}_"
            kinds = {key.partition(".")[0].removeprefix(worker) for key in stored if key.startswith(worker)}
            keys = {f"{kind}.{name}": f"{worker}{kind}.{names[name]}" for kind in kinds for name in parameters}
            tensors = {key: stored[theirs].read() for key, theirs in keys.items()}
            for h, momentum in zip(parallel.local_parameters, parallel.local_updates.state()):
                momentum.copy_(stored[f"outer.{names[h.name]}"].read())
        else:
            tensors = sharded.load_state(path, {name: parameters[name] for name, _ in parallel.trained()})
        if parallel.local_updates:
            parallel.local_updates.restart()
        if optimizer is not None:
            load_state_tensors(parallel.trained(), optimizer, tensors)
        keys = list(rng_state(precision.device))
        if alike and all(f"{key}.{rank}" in stored for key in keys):
            set_rng_state({key: stored[f"{key}.{rank}"].read() for key in keys}, precision.device)
        else:  # not the processes that saved: dropout draws anew, from the run's step
            place = mesh.rank("pipeline", "replicate", "expert", "shard", "context")
            torch.manual_seed(seed + 1_000_003 * place + 7_919 * state["step"])
        precision.load_state(state.get("scaler", {}))
        return state


def _place() -> tuple[int, int]:
    """(rank, number of processes)."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def _set_aside(folder: Path) -> Path:
    """Keep a damaged folder where nothing takes it for a whole one."""
    out = folder.with_name(f"damaged-{folder.name}")
    shutil.rmtree(out, ignore_errors=True)
    os.replace(folder, out)
    return out


def _evaluated(best: Path) -> dict[str, Any]:
    """What best.json says; {} where there is none."""
    try:
        return json.loads((best / "best.json").read_text())
    except (OSError, ValueError):
        return {}


def save_weights(folder: Path, parallel: Parallel, tokenizers: dict) -> None:
    """Write the weights in the Hugging Face layout, the tokenizer beside them (a second one, for the target language,
    in `target/`)."""
    models.save(parallel.bare, folder)
    tasks.save_tokenizers(folder, tokenizers)
