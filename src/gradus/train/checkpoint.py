"""Run state on disk. A checkpoint is a Hugging Face folder (weights, config, tokenizer) with what a resume needs beside it:

    checkpoints/step-00000400/  config.json model.safetensors tokenizer…  training.safetensors (optimizer, RNG)  training.json
    checkpoints/best -> best-step-00000350/                               weights and tokenizer only

Everything is written into a folder aside, flushed to the disk and renamed, so that a kill at any instant leaves either the
whole checkpoint or none.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from gradus import models
from gradus.errors import UserError
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

    def steps(self) -> list[Path]:
        """Whole checkpoints, oldest first."""
        return sorted(p for p in self.folder.glob("step-*") if (p / "training.json").exists())

    def latest(self) -> Path | None:
        return (self.steps() or [None])[-1]

    def save(self, step: int, model: nn.Module, tokenizers: dict, optimizer: torch.optim.Optimizer, precision: Precision, state: dict) -> Path:
        """One checkpoint: weights, optimizer, scaler, RNG, data position, metrics position (the last two in `state`)."""

        def fill(aside: Path) -> None:
            save_weights(aside, model, tokenizers)
            tensors = {**state_tensors(model, optimizer), **rng_state(precision.device)}
            save_file({k: v.detach().contiguous().cpu() for k, v in tensors.items()}, aside / "training.safetensors")
            (aside / "training.json").write_text(json.dumps({**state, "step": step, "scaler": precision.state()}, indent=1))

        target = self.folder / f"step-{step:08d}"
        write_aside(target, fill)
        for old in self.steps()[: -self.keep]:
            remove(old)
        return target

    def save_best(self, step: int, model: nn.Module, tokenizers: dict) -> None:
        """Weights only; the name `best` moves to them in one step."""
        target = self.folder / f"best-step-{step:08d}"
        write_aside(target, lambda aside: save_weights(aside, model, tokenizers))
        link = self.folder / ".best-link"
        link.unlink(missing_ok=True)
        link.symlink_to(target.name)
        os.replace(link, self.folder / "best")
        for old in self.folder.glob("best-step-*"):
            if old != target:
                remove(old)

    def load(self, path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, precision: Precision) -> dict:
        """Put a checkpoint's weights, optimizer, RNG and scaler back. Returns the state that was saved with it."""
        for left in (*self.folder.glob(".writing-*"), *self.folder.glob(".removing-*")):  # by a kill
            shutil.rmtree(left, ignore_errors=True)
        models.load_weights(model, path)
        tensors = load_file(path / "training.safetensors")
        rng = {k: tensors.pop(k) for k in list(tensors) if k.startswith("rng.")}
        load_state_tensors(model, optimizer, tensors)
        set_rng_state(rng, precision.device)
        state = json.loads((path / "training.json").read_text())
        precision.load_state(state.get("scaler", {}))
        return state


def save_weights(folder: Path, model: nn.Module, tokenizers: dict) -> None:
    """Weights in the Hugging Face layout, the tokenizer beside them (a second one, for the target language, in `target/`)."""
    models.save(model, folder)
    for place, tokenizer in tokenizers.items():
        (folder / place).mkdir(exist_ok=True)
        tokenizer.save(folder / place)
