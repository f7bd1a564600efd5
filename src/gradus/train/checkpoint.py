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
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor

from gradus import files, limits, tasks
from gradus.errors import UserError
from gradus.models.weights import checksums, some
from gradus.parallel import qat
from gradus.parallel import world as worlds
from gradus.parallel.engine import Parallel
from gradus.parallel.precision import Precision
from gradus.text import say
from gradus.train.folder import write_json
from gradus.train.optim import load_state_tensors, state_tensors


def rng_state(device: torch.device, rank: int) -> dict[str, Tensor]:
    """The state of every generator that a step of this process draws from (dropout). Data has its own, a pure function
    of its position."""
    state = {f"rng.cpu.{rank}": torch.get_rng_state()}
    if device.type == "cuda":
        state[f"rng.cuda.{rank}"] = torch.cuda.get_rng_state(device)
    if device.type == "mps":
        state[f"rng.mps.{rank}"] = torch.mps.get_rng_state()
    return state


def set_rng_state(state: dict[str, Tensor], device: torch.device) -> None:
    setters = {"cpu": torch.set_rng_state, "mps": torch.mps.set_rng_state}
    setters["cuda"] = lambda value: torch.cuda.set_rng_state(value, device)
    for key, value in state.items():
        setters[key.split(".")[1]](value)


class Checkpoints:
    """The `checkpoints/` folder of a run."""

    def __init__(self, folder: Path, keep: int):
        self.folder, self.keep = Path(folder), keep
        self.pending: Any = None  # sharded.Pending: being written
        self.group: dist.ProcessGroup | None = None  # for writing beside the training

    def steps(self) -> list[Path]:
        """All checkpoints, oldest first. They were whole when they were written."""
        return files.numbered(self.folder, "step-")

    def latest(self) -> Path | None:
        return (self.steps() or [None])[-1]

    def newest_whole(self) -> Path | None:
        """The newest checkpoint that is whole, the same on every process; newer ones, damaged, are named and kept under
        another name.

        None where there is no checkpoint. Raises UserError where there are some and none is whole. Collective.
        """
        damaged: dict[Path, str] = {}
        rank, size = _place()
        for path in reversed(worlds.from_first(self.steps())):
            own = checksums.damage(path, lambda names: names[rank::size], needs="training.json")
            problem = next(filter(None, worlds.gathered(own)), None)
            if problem is None:
                for bad, why in damaged.items() if _place()[0] == 0 else ():
                    kept = _set_aside(bad).name
                    text = f"note: {bad} is damaged: {why}. It is kept as {kept}; {path.name} is used instead"
                    say(text)
                return path
            damaged[path] = problem
        if damaged:
            reasons = some([f"{path.name} ({why})" for path, why in damaged.items()])
            raise UserError(
                f"{self.folder}: no checkpoint here is whole: {reasons}. "
                "Restore a copy of one, or start again with another log.dir."
            )
        return None

    def save(
        self, step: int, parallel: Parallel, tokenizers: dict, optimizer: torch.optim.Optimizer | None,
        precision: Precision, state: dict, wait: bool = False,
    ) -> Path:  # fmt: skip
        """Write one checkpoint: weights, optimizer, scaler, RNG, data position, metrics position (the last two in
        `state`).

        With several processes each writes its part, in the background unless `wait`; `finish` makes it appear. Of
        replicas that come and go the first writes all of it, and of split ones each its part at once. Collective.
        """
        elastic = parallel.layout.elastic
        state = {
            **state,
            "step": step,
            "scaler": precision.state(),
            "layout": parallel.mesh.sizes,
            "local_updates": parallel.local_updates is not None,
        }
        target = self.folder / f"step-{step:08d}"
        if parallel.several and not (elastic and parallel.layout.shard == 1):
            self.finish(parallel)
            self._begin(target, parallel, tokenizers, optimizer, precision, state)
            if wait or elastic:
                self.finish(parallel)
            return target

        def training(aside: Path) -> None:
            tensors = {**state_tensors(parallel.trained(), optimizer), **rng_state(precision.device, 0)}
            save_file({k: v.detach().contiguous().cpu() for k, v in tensors.items()}, aside / "training.safetensors")
            (aside / "training.json").write_text(json.dumps(state, indent=1))

        self._export(target, parallel, tokenizers, training)
        if parallel.mesh.world.first:
            self._remove_old()
        return target

    def _export(self, target: Path, parallel: Parallel, tokenizers: dict, more: Callable[[Path], None]) -> None:
        """Write the weights in the Hugging Face layout with the tokenizers and what more(folder) adds. Collective."""
        from gradus.train import sharded

        def with_ranges(aside: Path) -> None:
            more(aside)
            if ranges := qat.ranges(parallel.bare):
                write_json(aside / qat.FILE, ranges)

        parameters, group = {h.name: h.parameter for h in parallel.stored}, parallel.mesh.group("pipeline")
        sharded.export(parameters, parallel.bare.config, target, tokenizers, group, with_ranges)

    def _remove_old(self) -> None:
        for old in self.steps()[: -self.keep]:
            files.remove(old)

    def _begin(
        self, target: Path, parallel: Parallel, tokenizers: dict, optimizer, precision: Precision, state: dict
    ) -> None:
        from gradus.train import sharded

        if parallel.layout.elastic:  # whose members may be others by now; nothing else uses it meanwhile
            self.group = dist.group.WORLD
        elif self.group is None:
            self.group = dist.new_group(backend="gloo", timeout=datetime.timedelta(seconds=parallel.layout.timeout))
        rank, parameters = parallel.mesh.world.rank, {h.name: h.parameter for h in parallel.stored}
        tensors = {f"model.{name}": p for name, p in parameters.items() if parallel.counts(name)}
        for key, local in state_tensors(parallel.trained(), optimizer).items():
            name = key.split(".", 1)[1]
            if parallel.counts(name):
                stored = f"worker{rank}_{key}" if parallel.local_updates else key
                tensors[stored] = sharded.like(parameters[name], local)
        if parallel.local_updates:
            momenta = zip(parallel.trainable, parallel.local_updates.state())
            tensors |= {f"outer.{h.name}": momentum for h, momentum in momenta}
        tensors |= rng_state(precision.device, rank)

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

        self._export(target, parallel, tokenizers, note)
        if parallel.mesh.world.first:
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

    def best(self, metric: str, higher: bool) -> dict[str, Any] | None:
        """The best evaluation ("value", "step") by `metric` of all weights kept; `best` then names those weights.

        None where none were evaluated by it. higher: whether that is better.
        Damaged ones are named and kept under another name. The same on every process. Collective.
        """
        return worlds.from_first(self._find_best(metric, higher) if _place()[0] == 0 else None)

    def _find_best(self, metric: str, higher: bool) -> dict[str, Any] | None:
        candidates: list[tuple[float, int, Path]] = []
        link = self.folder / "best"
        for folder in sorted(self.folder.glob("best-step-*")):
            if problem := checksums.damage(folder, needs="best.json"):
                if link.resolve() == folder.resolve():
                    link.unlink()
                say(f"note: {folder} is damaged: {problem}. It is kept as {_set_aside(folder).name}")
                continue
            evaluated = _evaluated(folder)
            value = evaluated["metrics"].get(metric)
            if value is not None and is_finite(evaluated["metrics"], metric):
                candidates.append((value if higher else -value, evaluated["step"], folder))
        if not candidates:
            return None
        value, step, folder = max(candidates, key=lambda f: (f[0], -f[1]))  # of equal ones the first
        self._call_best(folder, metric)
        return {"value": value if higher else -value, "step": step}

    def load(self, path: Path, parallel: Parallel, optimizer: torch.optim.Optimizer | None, precision: Precision,
             seed: int) -> dict:  # fmt: skip
        """Put a checkpoint's weights, optimizer, RNG and scaler back, written by any number of processes: every process
        reads its part. Returns the state that was saved with it. Collective."""
        from gradus.train import sharded

        mesh = parallel.mesh
        state = json.loads((path / "training.json").read_text())
        alike, separate = state["layout"] == mesh.sizes, state["local_updates"]
        if separate and not (alike and parallel.local_updates):
            n = math.prod(state["layout"].values())
            raise UserError(
                f"{path}: {n} workers with local updates wrote it, each with its own optimizer. "
                f"Resume with {n} and the same layout."
            )
        parameters = {h.name: h.parameter for h in parallel.stored}
        sharded.load(path, {f"model.{name}": p for name, p in parameters.items()})
        stored, rank = sharded.read(path), mesh.world.rank
        if separate:
            names = sharded.stored_names(parallel.bare.config)
            worker = f"worker{rank}_"
            kinds = {key.partition(".")[0].removeprefix(worker) for key in stored if key.startswith(worker)}
            trained = [h.name for h in parallel.trainable]
            keys = {f"{kind}.{name}": f"{worker}{kind}.{names[name]}" for kind in kinds for name in trained}
            tensors = {key: stored[theirs].read() for key, theirs in keys.items()}
            for name, momentum in zip(trained, parallel.local_updates.state()):
                if key := stored.get(f"outer.{names[name]}"):  # none where the run had no outer momentum so far
                    momentum.copy_(key.read())
        else:
            tensors = sharded.load_state(path, {name: parameters[name] for name, _ in parallel.trained()})
        if parallel.local_updates:
            parallel.local_updates.restart()
        if optimizer is not None:
            load_state_tensors(parallel.trained(), optimizer, tensors)
        keys = list(rng_state(precision.device, rank))
        if alike and all(key in stored for key in keys):
            set_rng_state({key: stored[key].read() for key in keys}, precision.device)
        else:  # not the processes that saved: dropout draws anew, from the run's step
            mesh.seed_dropout(seed, state["step"])
        precision.load_state(state["scaler"])
        if (path / qat.FILE).is_file():
            qat.restore(parallel.bare, json.loads((path / qat.FILE).read_text()))
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


def is_finite(metrics: dict[str, float], name: str) -> bool:
    """Whether weights with these metrics may be the best by one of them. Old runs have an accuracy of logits that are
    not finite; a perplexity may be infinite."""
    return all(math.isfinite(metrics.get(key, 0.0)) for key in (name, f"{name.split('/')[0]}/loss"))


def _evaluated(best: Path) -> dict[str, Any]:
    """What best.json says; {} where it is damaged."""
    try:
        return json.loads(limits.regular(best / "best.json").read_text())
    except (OSError, ValueError, UserError):
        return {}
