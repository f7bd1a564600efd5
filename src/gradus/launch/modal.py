"""`gradus launch modal`: write an app that trains a recipe, or generates from a model, on Modal's GPUs."""

from __future__ import annotations

import os
import pprint
import re
import shlex
import sys
from argparse import Namespace
from pathlib import Path
from typing import TYPE_CHECKING

from gradus import files
from gradus.errors import UserError, did_you_mean, requirements
from gradus.launch import (
    EXTRAS,
    inputs,
    one_line,
    portable,
    preview,
    read,
    recipe_file,
    train_options,
    train_words,
    travelling,
)
from gradus.options import option

if TYPE_CHECKING:
    from gradus.recipe.schema import Recipe

GPUS = (
    "T4", "L4", "A10", "A10G", "L40S", "A100", "A100-40GB", "A100-80GB", "RTX-PRO-6000", "H100", "H100!", "H200",
    "B200", "B200+", "none",
)  # fmt: skip


OPTIONS = (
    *train_options(nargs="?"),
    option("--to FILE.py", "where to write the app", required=True),
    option("--gpu TYPE[:N]", "e.g. T4, A100-80GB, H100:4 (default A100); none: CPU only", default="A100"),
    option("--model MODEL", "to generate from: a folder or a name on the hub (default: the recipe's run)"),
    option(
        "--precision", "of generation: weights and arithmetic (default fp32)",
        choices=["fp32", "bf16", "fp16"], default="fp32",
    ),
    option("--secret NAME", "holds HF_TOKEN, for weights and data that need one"),
)  # fmt: skip


def launch(args: Namespace) -> int:
    """Write the app. Raises UserError for a mistake in the options or the recipe."""
    gpu, n_gpus = _gpu(args.gpu)
    if args.secret is not None and not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}", args.secret):
        raise UserError(f"--secret={args.secret}: give a name of letters, digits, dots, - and _, of at most 64.")
    if not args.recipe and not args.model:
        raise UserError("launch modal: nothing to do. Give a RECIPE to train, or --model MODEL to generate from.")
    file = files.writable(Path(args.to))
    if file.suffix != ".py" or not file.stem.isidentifier():
        raise UserError(f"--to={args.to}: Modal imports it. Give a file name like app.py.")
    recipe, run = read(args, n_gpus) if args.recipe else (None, "")
    text = app(args, gpu, n_gpus, recipe, run)
    try:
        file.write_text(text, encoding="utf-8")
    except OSError as e:
        raise UserError(f"{file}: cannot be written ({e.strerror}). Give another --to.") from None
    print(f"wrote {file}. With an account (pip install modal; modal setup):")
    for line in text.split('"""')[1].splitlines()[2:]:
        print(line.replace(f" {file.name}::", f" {shlex.quote(args.to)}::").rstrip())
    if recipe:
        print("", *preview(args, recipe, n_gpus, gpu and gpu.partition(":")[0].rstrip("!+")), sep="\n")
    return 0


def _gpu(text: str) -> tuple[str | None, int]:
    name, _, number = text.partition(":")
    if name not in GPUS:
        raise UserError(f"--gpu={text}: Modal has no {name}.{did_you_mean(name, GPUS)}")
    if number and (number not in [*"12345678"] or name == "none"):
        raise UserError(f"--gpu={text}: give TYPE or TYPE:N with N from 1 to 8, e.g. A100:2, or none.")
    return (None if name == "none" else text), int(number or 1)


def app(args: Namespace, gpu: str | None, n_gpus: int, recipe: Recipe | None, run: str) -> str:
    """The text of the app: its settings as Python constants, then a program that is always the same."""
    import gradus

    if not (packages := requirements("", *EXTRAS)):
        raise UserError("launch modal: gradus is not installed, only on the path. In its checkout: pip install -e .")
    added: dict[str, Path] = {"/root/gradus": Path(gradus.__file__).resolve().parent}  # path in the image → path here
    words, model, name = [], args.model, "model"
    if recipe:
        name, settings = recipe.name, {}
        portable(run)
        for key, paths in inputs(recipe).items():
            added |= {f"/root/inputs/{key}/{path.name}": path for path in paths}
            settings[key] = f"/root/inputs/{key}/{paths[0].name}"
        file = recipe_file(args.recipe)
        if file:
            added[f"/root/inputs/{file.name}"] = file.resolve()
        arguments, theirs = travelling(args), "/root/inputs/training_args.json"
        if arguments:
            added[theirs] = arguments
        words = train_words(args, run, f"/root/inputs/{file.name}" if file else None, settings, theirs)
        words = [word for word in words if not word.startswith("log.dir=")]
        if n_gpus > 1:
            words += ["--processes", str(n_gpus)]
    elif args.overrides or args.force or args.json_file:
        setting = args.overrides[0] if args.overrides else "--force" if args.force else "--json_file"
        raise UserError(f"{setting}: a setting of a recipe, and there is none. Give RECIPE too.")
    if model and Path(os.path.expanduser(one_line("--model", model))).exists():
        path = Path(os.path.expanduser(model)).resolve()
        model = f"/root/inputs/model/{path.name}"
        added[model] = path

    file_name, title = Path(args.to).name, re.sub(r"[^\w .-]", "-", name)
    commands = [f'modal run {file_name}::generate --prompt "..."  # generate']
    if run:
        fetch = f"modal volume get gradus {run} .  # fetch the run folder"
        commands = [f"modal run {file_name}::main  # train", *commands, fetch]
    if args.secret:
        commands.insert(0, f"modal secret create {args.secret} HF_TOKEN=...  # once: for the hub")
    settings = {
        "NAME": "gradus-" + title.replace(" ", "-")[:50],
        "GPU": gpu,
        "VOLUME": "gradus",  # where runs and weights are kept
        "SECRETS": [args.secret] if args.secret else [],
        "SECONDS": 86_400,  # after which an attempt ends: as long as Modal lets it be
        "PYTHON": f"{sys.version_info.major}.{sys.version_info.minor}",
        "PACKAGES": packages,
        "FOLDERS": {there: str(local) for there, local in added.items() if local.is_dir()},  # in the image: here
        "FILES": {there: str(local) for there, local in added.items() if not local.is_dir()},
        "MODEL": model or run,
        "PRECISION": args.precision,
        **({"RUN": run, "WORDS": words} if run else {}),
    }
    constants = "\n".join(f"{key} = {pprint.pformat(value, sort_dicts=False)}" for key, value in settings.items())
    lines = "".join(f"    {line}\n" for line in commands)
    head = f'"""{title} on Modal, by gradus.\n\n{lines}"""\n\nfrom pathlib import Path\n\nimport modal\n\n{constants}\n'
    return head + APP + (TRAIN if run else "")


APP = '''
app = modal.App(NAME)
volume = modal.Volume.from_name(VOLUME, create_if_missing=True)  # runs and weights are kept in it
secrets = [modal.Secret.from_name(name) for name in SECRETS]
image = modal.Image.debian_slim(python_version=PYTHON).pip_install(PACKAGES)
image = image.env({"HF_HOME": "/volume/huggingface", "GRADUS_CACHE": "/volume/cache"})
for there, here in FOLDERS.items():
    image = image.add_local_dir(here, there)
for there, here in FILES.items():
    image = image.add_local_file(here, there)
machine = {"image": image, "gpu": GPU, "volumes": {"/volume": volume}, "secrets": secrets, "timeout": SECONDS}


def at(name):
    """Where a path is on the machine that runs this: in the image, or in the volume. \
Anything else is a name on the hub."""
    if modal.is_local():
        return {**FOLDERS, **FILES}.get(name, name)
    kept = Path("/volume") / name
    return str(kept) if kept.exists() else name


@app.cls(**machine)
class Model:
    """A model that stays in memory between calls."""

    name: str = modal.parameter(default=MODEL)

    @modal.enter()
    def load(self):
        from gradus import api

        self.model = api.load(at(self.name), precision=PRECISION)

    @modal.method()
    def generate(self, prompt: str, max_new: int = 200, temperature: float = 0.8, seed: int = 0) -> str:
        from gradus import api

        return api.generate(self.model, prompt, max_new=max_new, temperature=temperature, seed=seed)


@app.local_entrypoint()
def generate(prompt: str = "", max_new: int = 200, temperature: float = 0.8, seed: int = 0, here: bool = False):
    """Generate there, or with --here on this machine."""
    method = Model().generate
    print((method.local if here else method.remote)(prompt, max_new, temperature, seed))
'''

TRAIN = '''

@app.function(**machine, retries=modal.Retries(max_retries=5, initial_delay=10.0))
def train() -> str:
    """Train, or resume where an earlier attempt stopped. Returns the run's summary."""
    from gradus.cli import main

    run = Path("." if modal.is_local() else "/volume") / RUN
    local = {**FOLDERS, **FILES} if modal.is_local() else {}
    words = []
    for word in WORDS:
        *key, value = word.split("=", 1)
        words.append(local.get(word, "=".join((*key, local.get(value, value)))))
    code = main([*words, f"log.dir={run}"])
    if not modal.is_local():
        volume.commit()
    if code:
        raise RuntimeError(f"gradus train ended with exit code {code}")
    return (run / "summary.json").read_text()


@app.local_entrypoint()
def main(here: bool = False):
    """Train there, or with --here on this machine."""
    print(train.local() if here else train.remote())
'''
