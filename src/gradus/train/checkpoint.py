"""Run state on disk. A checkpoint of one process is a Hugging Face folder (weights, config, tokenizer) with what a resume needs beside it
(one of several processes is in `train.sharded`'s form):

    checkpoints/step-00000400/  config.json model.safetensors tokenizer…  training.safetensors (optimizer, RNG)  training.json
    checkpoints/best -> best-step-00000350/                               weights and tokenizer only

Everything is written into a folder aside, flushed to the disk and renamed, so that a kill at any instant leaves either the
whole checkpoint or none.
"""

from __future__ import annotations

import datetime
import errno
import json
import math
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from gradus import models
from gradus.errors import UserError
from gradus.parallel.engine import Parallel
from gradus.train.optim import load_state_tensors, state_tensors
from gradus.train.precision import Precision


def rng_state(device: torch.device) -> dict[str, Tensor]:
    """The state of every generator that a step draws from (dropout); data has its own, a pure function of its position."""
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


def _flush(folder: Path) -> None:
    """Force files, then their folder's entries, onto the disk before the rename says that they are there."""
    for path in [p for p in folder.rglob("*") if p.is_file()] + [folder]:
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def write_aside(target: Path, fill: Callable[[Path], None]) -> None:
    """Make the folder `target` appear whole or not at all; one that is there already is whole and stays.

    Raises UserError when the disk is full or not writable.
    """
    if target.exists():
        return
    aside = target.with_name(f".writing-{target.name}")
    try:
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
        fill(aside)
        _flush(aside)
        os.replace(aside, target)
    except (OSError, SafetensorError, UserError) as e:
        shutil.rmtree(aside, ignore_errors=True)
        full = getattr(e, "errno", None) in (errno.ENOSPC, errno.EDQUOT) or "No space left" in str(e)
        if not full and isinstance(e, UserError):
            raise
        why = f"the disk is full ({shutil.disk_usage(target.parent).free / 1e9:.2f} GB free)" if full else f"cannot write there ({e})"
        raise UserError(
            f"{target.parent}: {why}: the checkpoint was not written; earlier ones are whole. Free some space, then go on with --resume."
        ) from None


def remove(folder: Path) -> None:
    """Delete a folder so that half of it never looks whole: first out of sight, then away."""
    out = folder.with_name(f".removing-{folder.name}")
    shutil.rmtree(out, ignore_errors=True)
    os.replace(folder, out)
    shutil.rmtree(out, ignore_errors=True)


class Checkpoints:
    """The `checkpoints/` folder of a run."""

    def __init__(self, folder: Path, keep: int):
        self.folder, self.keep = Path(folder), keep
        self.pending: Any = None  # sharded.Pending: being written
        self.group: dist.ProcessGroup | None = None  # for writing beside the training

    def steps(self) -> list[Path]:
        """Whole checkpoints, oldest first."""
        return sorted(p for p in self.folder.glob("step-*") if (p / "training.json").exists())

    def latest(self) -> Path | None:
        return (self.steps() or [None])[-1]

    def save(
        self, step: int, parallel: Parallel, tokenizers: dict, optimizer: torch.optim.Optimizer | None, precision: Precision, state: dict,
        wait: bool = False,
    ) -> Path:  # fmt: skip
        """One checkpoint: weights, optimizer, scaler, RNG, data position, metrics position (the last two in `state`).

        With several processes each writes its part, in the background unless `wait`; `finish` makes it appear. Collective.
        """
        state = {**state, "step": step, "scaler": precision.state(), "layout": parallel.mesh.sizes, "apart": parallel.apart is not None}
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

        write_aside(target, fill)
        self._remove_old()
        return target

    def _remove_old(self) -> None:
        for old in self.steps()[: -self.keep]:
            remove(old)

    def _begin(self, target: Path, parallel: Parallel, tokenizers: dict, optimizer, precision: Precision, state: dict) -> None:
        from gradus.train import sharded

        if self.group is None:
            self.group = dist.new_group(backend="gloo", timeout=datetime.timedelta(seconds=parallel.layout.timeout))
        rank, held = parallel.mesh.world.rank, {h.name: h.parameter for h in parallel.held}
        tensors = {f"model.{name}": p for name, p in held.items() if parallel.counts(name)}
        for key, local in state_tensors(parallel.trained(), optimizer).items():
            name = key.split(".", 1)[1]
            if parallel.counts(name):
                tensors[f"worker{rank}_{key}" if parallel.apart else key] = sharded.like(held[name], local)
        if parallel.apart:
            tensors |= {f"outer.{h.name}": momentum for h, momentum in zip(parallel.held, parallel.apart.state())}
        tensors |= {f"{key}.{rank}": value for key, value in rng_state(precision.device).items()}

        def fill(aside: Path) -> None:
            (aside / "training.json").write_text(json.dumps(state, indent=1))
            save_tokenizers(aside, tokenizers)

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

    def save_best(self, step: int, parallel: Parallel, tokenizers: dict) -> None:
        """Weights only; the name `best` moves to them in one step. Collective."""
        target = self.folder / f"best-step-{step:08d}"
        if parallel.several:
            from gradus.train import sharded

            sharded.export({h.name: h.parameter for h in parallel.held}, parallel.bare.config, target, tokenizers)
            if not parallel.mesh.world.first:
                return
        write_aside(target, lambda aside: save_weights(aside, parallel, tokenizers))  # nothing where it is there
        link = self.folder / ".best-link"
        link.unlink(missing_ok=True)
        link.symlink_to(target.name)
        os.replace(link, self.folder / "best")
        for old in self.folder.glob("best-step-*"):
            if old != target:
                remove(old)

    def load(self, path: Path, parallel: Parallel, optimizer: torch.optim.Optimizer | None, precision: Precision, seed: int) -> dict:
        """Put a checkpoint's weights, optimizer, RNG and scaler back. Returns the state that was saved with it. Collective."""
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
        """What a kill left half written or half removed."""
        for left in (*self.folder.glob(".writing-*"), *self.folder.glob(".removing-*")):
            shutil.rmtree(left, ignore_errors=True)

    def _load_parts(self, path: Path, parallel: Parallel, optimizer, precision: Precision, seed: int) -> dict:
        """From a checkpoint of any number of processes: every process reads its part."""
        from gradus.train import sharded

        mesh = parallel.mesh
        state = json.loads((path / "training.json").read_text())
        alike = state.get("layout", dict.fromkeys(mesh.sizes, 1)) == mesh.sizes
        apart = state.get("apart", False)
        if apart and not (alike and parallel.apart):
            n = math.prod(state["layout"].values())
            raise UserError(f"{path}: {n} workers that train apart wrote it, each with its own optimizer. Resume with {n} and the same layout.")
        if mesh.world.first:
            self._clear_left()
        held = {h.name: h.parameter for h in parallel.held}
        sharded.load(path, {f"model.{name}": p for name, p in held.items()})
        stored, rank = sharded.read(path), mesh.world.rank
        if apart:
            names = sharded.stored_names(parallel.bare.config)
            kinds = {key.partition(".")[0].removeprefix(f"worker{rank}_") for key in stored if key.startswith(f"worker{rank}_")}
            tensors = {f"{kind}.{name}": stored[f"worker{rank}_{kind}.{names[name]}"].read() for kind in kinds for name in held}
            for h, momentum in zip(parallel.held, parallel.apart.state()):
                momentum.copy_(stored[f"outer.{names[h.name]}"].read())
        else:
            tensors = sharded.load_state(path, {name: held[name] for name, _ in parallel.trained()})
        if parallel.apart:
            parallel.apart.restart()
        if optimizer is not None:
            load_state_tensors(parallel.trained(), optimizer, tensors)
        keys = list(rng_state(precision.device))
        if alike and all(f"{key}.{rank}" in stored for key in keys):
            set_rng_state({key: stored[f"{key}.{rank}"].read() for key in keys}, precision.device)
        else:  # other processes than those that saved: dropout draws anew, from where the run stands
            place = mesh.rank("pipeline", "replicate", "expert", "shard", "context")
            torch.manual_seed(seed + 1_000_003 * place + 7_919 * state["step"])
        precision.load_state(state.get("scaler", {}))
        return state


def save_weights(folder: Path, parallel: Parallel, tokenizers: dict) -> None:
    """Weights in the Hugging Face layout, the tokenizer beside them (a second one, for the target language, in `target/`)."""
    models.save(parallel.bare, folder)
    save_tokenizers(folder, tokenizers)


def save_tokenizers(folder: Path, tokenizers: dict) -> None:
    for place, tokenizer in tokenizers.items():
        (folder / place).mkdir(exist_ok=True)
        tokenizer.save(folder / place)
