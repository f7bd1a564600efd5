"""`gradus VERB RECIPE key=value ...`: one thin function a verb. Heavy imports are inside, so that `--help` is quick."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import re
import select
import sys
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path

from gradus import __version__, errors, files, limits
from gradus.errors import FAULT, UserError, did_you_mean, disk_full, exit_code, nearest, tell_error
from gradus.launch import json_file
from gradus.text import plain_where_needed, say

# group → verb → (a command that runs, the page that says more), in the order of the journey
JOURNEY: dict[str, dict[str, tuple[str, str]]] = {
    "start": {
        "demo": ("gradus demo", "docs/start.md"),
        "new": ("gradus new mine.yaml --data reviews.csv", "docs/your-data.md"),
        "recipes": ("gradus recipes", "docs/results.md"),
        "show": ("gradus show copy-task train.steps=100", "docs/recipes.md"),
        "keys": ("gradus keys layout", "docs/recipes.md"),
        "completion": ("gradus completion bash", "docs/install.md"),
    },
    "plan": {
        "plan": ("gradus plan gpt2-small --tokens 3e9 --on 8xA100-80GB", "docs/plan.md"),
        "models": ("gradus models gpt2-small", "docs/plan.md"),
        "hardware": ("gradus hardware H100", "docs/plan.md"),
        "env": ("gradus env", "docs/recipes.md"),
        "calibrate": ("gradus calibrate", "docs/proof.md"),
        "fit": ("gradus fit copy-task --memory 1GiB", "docs/proof.md"),
    },
    "train": {
        "train": ("gradus train copy-task train.steps=20", "docs/start.md"),
        "check": ("gradus check copy-task", "docs/proof.md"),
        "tokenizer": ("gradus tokenizer train corpus.txt --vocab-size 8000 --to bpe", "docs/recipes.md"),
    },
    "use": {
        "predict": ('gradus predict RUN "a fine film"', "docs/recipes.md"),
        "generate": ('gradus generate RUN "Once upon a time" --temperature 0.8', "docs/inference.md"),
        "look": ('gradus look runs/copy-task/latest "3 1 4 1 5 9 2 6 5 3"', "docs/report.md"),
        "evaluate": ("gradus evaluate runs/copy-task/latest", "docs/recipes.md"),
        "quantize": ("gradus quantize RUN --to DIR --as int8", "docs/inference.md"),
    },
    "measure": {
        "prove": ("gradus prove runs/copy-task/latest", "docs/proof.md"),
        "report": ("gradus report runs/copy-task/latest --to report", "docs/report.md"),
        "profile": ("gradus profile copy-task", "docs/report.md"),
        "bench": ("gradus bench RUN", "docs/inference.md"),
        "ladder": ("gradus ladder copy-task", "docs/ladder.md"),
        "scale": ("gradus scale copy-task --processes 1,2", "docs/layouts-measured.md"),
        "study": ("gradus study FILE.yaml", "docs/studies.md"),
        "collectives": ("gradus collectives --processes 2", "docs/collectives.md"),
    },
    "move": {
        "launch": ("gradus launch slurm copy-task --nodes 2 --gpus 4 --dry-run", "docs/launch.md"),
        "export": ("gradus export runs/copy-task/latest --to exported", "docs/export.md"),
        "fetch": ("gradus fetch copy-task --to staged", "docs/launch.md"),
    },
}
HELP = """\
Plan it, train it, prove it: what a transformer will cost, its training, and what it did cost.

gradus COMMAND ...    gradus COMMAND --help opens with an example; gradus --version

start    demo         all of it, in two minutes        new          a recipe for your own data
         recipes      the packaged recipes             show         a recipe with all it leads to
         keys         every key of a recipe            completion   for bash, zsh and fish
plan     plan         memory, time, money, energy      models       presets, parameters counted
         hardware     devices and links it knows       env          this machine as detected
         calibrate    measure this machine             fit          the largest micro-batch
train    train        a recipe, into a run folder      check        look before you train
         tokenizer    train one from text
use      predict      label, masked word, translation  generate     continue a text
         look         attention and more, pictured     evaluate     metrics over a whole split
         quantize     int8 or int4, if worth it
measure  prove        planned beside measured          report       runs as HTML and PDF
         profile      where time and memory go         bench        engines and precisions
         ladder       faster or smaller by steps       scale        1, 2, 4, ... processes
         study        any settings side by side        collectives  all-reduce and the others
move     launch       on Slurm, over ssh, on Modal     export       for Hugging Face, ONNX, ...
         fetch        for a machine without internet

For example: gradus demo
             gradus plan gpt2-small --tokens 3e9 --on 8xA100-80GB
             gradus train copy-task train.steps=20
"""


class Parser(argparse.ArgumentParser):
    """argparse with errors in the house's form: one line, exit code 2."""

    opening = ""  # of the help

    def format_help(self) -> str:
        return self.opening + super().format_help()

    def error(self, message: str):
        own = re.fullmatch(r"argument (?:\S+/)?(--[\w-]+): (=.*)", message, re.S)  # of limits.whole and limits.real
        if own:
            raise UserError(f"{self.prog}: {own[1]}{own[2]}")
        raise UserError(f"{self.prog}: {message}. See {self.prog} --help")

    def _check_value(self, action: argparse.Action, value: object) -> None:
        """argparse's own, with the nearest choice in place of all of them; and no empty path."""
        if value == "" and action.option_strings and re.match("DIR|FILE|FOLDER|PATH", str(action.metavar)):
            raise UserError(f"{self.prog}: {action.option_strings[0]}=: an empty path. Name one, or leave it out.")
        if action.choices is None or value in action.choices:
            return
        if action.dest == "verb":
            from gradus.recipe import names

            recipe = value in names() or str(value).endswith((".yaml", ".yml", ".json"))
            near = next((verb for verb in action.choices if value in other_names(verb)), None)
            near = f" Did you mean {near}?" if near else did_you_mean(str(value), action.choices)
            meant = f" Did you mean gradus train {value}?" if recipe else near
            raise UserError(f"gradus {value}: no such command.{meant} See gradus --help")
        what = action.option_strings[0] if action.option_strings else action.metavar or action.dest
        known, near = ", ".join(map(str, action.choices)), nearest(str(value), action.choices)
        raise UserError(f"{self.prog}: {what}={value}: not one of {known}.{f' Did you mean {near}?' if near else ''}")


Verb = Callable[..., argparse.ArgumentParser]  # (name, function, text, words)


def parser() -> Parser:
    top = Parser(prog="gradus")
    top.format_help = lambda: HELP
    top.add_argument("--version", action="version", version=f"gradus {__version__}")
    verbs = top.add_subparsers(dest="verb", metavar="COMMAND", parser_class=Parser)
    pages = {name: of for group in JOURNEY.values() for name, of in group.items()}

    def verb(name: str, function, text: str, words: str | None = None) -> argparse.ArgumentParser:
        # words: the argument that takes words wherever they stand ("": none); None: the verb takes a recipe
        p = verbs.add_parser(name, help=text, description=text)
        example, page = pages[name]
        p.opening = f"example: {example}\nmore:    the documentation, page {Path(page).stem}\n\n"
        p.set_defaults(function=function, words="overrides" if words is None else words)
        if words is None:
            what = "a packaged recipe (gradus recipes), a YAML or JSON file, or a run folder"
            p.add_argument("recipe", metavar="RECIPE", help=what)
            _overrides(p, "train.steps=100 optimizer.lr=1e-3")
        return p

    for group in (
        _starting, _running, _planning, _looking, _preparing, _using, _measuring, _machine, _elsewhere, _quantizing,
    ):  # fmt: skip
        group(verb)
    return top


def _overrides(p: argparse.ArgumentParser, example: str) -> None:
    p.add_argument("overrides", nargs="*", metavar="key=value", help=f"settings of the recipe, e.g. {example}")
    json_file(p)


FLAG: dict = {"action": "store_true"}
PASTED = ("completion", "fetch", "show")  # whose lines are a script, a command or YAML, and stay whole


def picture(add: Callable, text: str, name: str) -> None:
    """The option --picture; text: what is drawn; name: of the file, unless one is given."""
    add("--picture", nargs="?", const=True, type=limits.svg_file, metavar="FILE", help=f"{text} (default {name})")


def whole(most: int, least: int = 1, name: str = "N") -> dict:
    """Of an option: a whole number."""
    return {"type": limits.whole(least, most), "metavar": name}


ENERGY = {  # options that set a key of the recipe's energy
    "watts": ("W", "of one GPU, or of one host's CPUs, where no meter reads it (default: the device's)"),
    "pue": ("X", "power of the data centre over its computers' (default: the usual range)"),
    "grid": ("COUNTRY", "its electricity's CO2, e.g. FR, or '385 g/kWh' (default: the world's mean)"),
}


def _energy(add: Callable) -> None:
    for key, (value, text) in ENERGY.items():
        add(f"--{key}", metavar=value, help=text)


def _starting(verb: Verb) -> None:
    text = "plan, check, train, prove and report the copy task, in about two minutes: each command before it runs"
    verb("demo", lambda a: room("demo").demo(), text, "")
    text = 'a script that completes verbs, options, recipes and keys: eval "$(gradus completion bash)" in ~/.bashrc'
    p = verb("completion", lambda a: [room("completion").script(a.shell, parser())], text, "")
    p.add_argument("shell", choices=["bash", "zsh", "fish"], help="fish: in ~/.config/fish/completions/gradus.fish")


def _running(verb: Verb) -> None:
    add = verb("train", train, "train a recipe into a run folder").add_argument
    add("--resume", **FLAG, help="resume RECIPE if it is a run folder (or log.dir), else its newest run")
    add("--auto-resume", **FLAG, help="start, or resume if log.dir already holds a run: for requeued jobs")
    add("--processes", **whole(limits.PROCESSES), help="start N processes here (or use torchrun, mpirun, srun)")
    add("--max-restarts", **whole(10**6, 0, name="K"), default=0, help="with --processes: restarts allowed")
    add("--data-changed", **FLAG, help="resume also with other data than the run has read")
    add("--force", **FLAG, help="start even if the plan says that the run will not fit")
    _energy(add)
    run = lambda a: room("train.new").new(a.file, a.data, a.init, a.text, a.label, a.lora)  # noqa: E731
    p = verb("new", run, "a recipe for your own data", "")
    add = p.add_argument
    add("file", metavar="FILE.yaml", help="the recipe to write")
    kinds = "a table (CSV, TSV, JSONL, Parquet), a text, a folder of these or of images, or two files of parallel text"
    add("--data", nargs="+", required=True, metavar="PATH", help=kinds)
    add("--init", metavar="FOLDER", help="weights to fine-tune (Hugging Face layout) in place of a small new model")
    add("--lora", **FLAG, help="with --init: train an adapter, small matrices beside its weights")
    add("--text", metavar="COLUMN", help="of a table: the text column (default: the only candidate)")
    add = p.add_mutually_exclusive_group().add_argument
    add("--label", metavar="COLUMN", help="of a table: the label column (default: the only candidate)")
    text = "of a table: use the text alone, to train a model that predicts the next token"
    add("--no-label", dest="label", action="store_const", const=False, help=text)


def _planning(verb: Verb) -> None:
    p = verb("plan", plan, "what a recipe or a preset will cost: memory, time, money, energy", "overrides")
    add = p.add_argument
    add("recipe", nargs="?", metavar="RECIPE", help="a recipe, a run folder, a preset (gradus models) or hf:NAME")
    _overrides(p, "layout.checkpointing=full")
    add("--on", metavar="NxDEVICE", help="hardware, e.g. 8xA100-80GB, H100 or this (gradus hardware, gradus calibrate)")
    add("--tokens", type=limits.real(above=0, least=1, most=limits.TOKENS), metavar="N",
        help="tokens to train on, instead of the recipe's steps, e.g. 300e9")
    add("--days", type=limits.real(above=0, most=1e6), metavar="D", help="deadline: how many of --on DEVICE it needs")
    add("--price", type=limits.real(above=0, most=1e6), metavar="P", help="of a device-hour (default: known prices)")
    _energy(add)
    add("--all", **FLAG, help="tables of every component")
    add("--json", **FLAG, help="the rows as JSON lines")
    add("--explain", metavar="NAME", help="the formula, inputs and source of one figure")
    picture(add, "draw it too: memory by component and over a step, a pipeline's schedule", "RECIPE-plan.svg")
    add("--devices", **FLAG, help="which single device, at which precision and price")
    add("--search", **FLAG, help="the best layouts on this hardware, and why the others are slower")
    add("--serve", **FLAG, help="serving instead of training: weights, cache, time per token")
    add("--batch", **whole(limits.BATCH, name="B"), help="with --serve: sequences at a time (default 1)")
    add("--length", **whole(limits.LENGTH), help="with --serve: tokens per sequence (default: the context length)")
    add("--bits", **whole(32, name="Q"), help="with --serve: bits per stored weight, e.g. 8 (default: the precision's)")
    add("--optimal", **FLAG, help="compute-optimal tokens; with --tokens, the model size")
    add("--accuracy", nargs="?", const=True, metavar="FILE", help="error against published measurements (no file)")
    add("--web", **FLAG, help="serve the plan as a local page")
    add("--port", type=limits.whole(0, 65_535), help="with --web (default 8000)")
    add("--host", help="with --web (default 127.0.0.1: this machine only)")
    run, text = lambda a: room("proof.prove").prove(a.runs, a.json), "planned against measured, for finished runs"
    add = verb("prove", run, text, "runs").add_argument
    add("runs", nargs="+", metavar="RUN", help="run folders; several: each figure's error by run, and their median")
    add("--json", **FLAG, help="the figures as JSON lines")
    text = "runs and studies as one HTML file and one PDF, to hand in"
    shown = ("title", "author", "x", "code")

    def run(a) -> Iterable[str]:
        return room("report.report").report(a.runs, a.to, a.notes, **{key: getattr(a, key) for key in shown})

    add = verb("report", run, text, "runs").add_argument
    text = "folders of runs and of studies; runs of one recipe are compared with the first of them that is finished"
    add("runs", nargs="+", metavar="RUN|STUDY", help=text)
    add("--to", required=True, metavar="DIR", help="folder for report.html and report.pdf")
    add("--notes", metavar="FILE.md", help="your own discussion")
    add("--title", default="", metavar="TEXT", help="of the first page (default: the names of what is reported)")
    add("--author", default="", metavar="TEXT", help="beside the date of the newest measurement")
    add("--x", default="step", choices=["step", "tokens", "seconds"], help="what curves stand above (default: step)")
    add("--code", **FLAG, help="also recipes with every key, job scripts and the models' source")


def _looking(verb: Verb) -> None:
    text = "before training: data, shapes, memory, gradients, first loss, one batch overfitted, loader"
    add = verb("check", lambda a: room("proof.check").check(load_recipe(a), a.json), text).add_argument
    add("--json", **FLAG, help="the lines as JSON rows")
    text = "the largest micro-batch that fits: planned, then confirmed by one step"
    add = verb("fit", lambda a: print_all(room("proof.fit").fit(load_recipe(a), a), a.json), text).add_argument
    add("--memory", metavar="SIZE", help="a budget, e.g. 8GiB (default: all of a GPU, 80 %% of free CPU memory)")
    add("--sweep", metavar="N,...", help="instead, measure speed and memory at these micro-batches, e.g. 8,16,32,64")
    add("--json", **FLAG, help="the figures as JSON rows")
    add = verb("show", show, "print the resolved recipe and everything derived from it").add_argument
    add("--no-data", **FLAG, help="only what is known without opening the data")
    add("--modules", **FLAG, help="instead, the module tree as the layout splits it: each parameter's shape and part")
    text = "instead, draw the model: its blocks, each weight's shape; also of a preset"
    picture(add, text, "RECIPE.svg")
    add("--processes", **whole(limits.AXIS), help="as one of N processes (default: as many as the layout's axes need)")
    add("--rank", **whole(limits.AXIS, 0, name="R"), help="with --modules: the process to show (default 0)")
    add = verb("keys", keys, "every key of a recipe: its default, type and meaning", "section").add_argument
    add("section", nargs="*", metavar="SECTION", help="e.g. layout, optimizer.adamw, layout.precision (default: all)")
    verb("recipes", recipes, "list the packaged recipes", "")
    add = verb("models", models, "list the model presets with their exact parameter counts", "names").add_argument
    add("names", nargs="*", metavar="PRESET", help="only these, by component")


def _preparing(verb: Verb) -> None:
    add = verb("fetch", fetch, "stage tokenizer, weights and data for a machine without internet").add_argument
    add("--to", required=True, metavar="DIR", help="folder to fill")
    add = verb("tokenizer", tokenizer, "train a tokenizer from text", "files").add_argument
    add("action", choices=["train"], help="byte-level BPE, as GPT-2's")
    add("files", nargs="+", metavar="FILE", help="text files (txt, jsonl, csv, tsv, parquet, also .gz and .xz)")
    add("--vocab-size", **whole(limits.TOKEN_IDS), required=True, help="tokens at most, special tokens included")
    add("--lowercase", **FLAG, help="convert the text to lower case")
    add("--text", metavar="COLUMN", help="the column, for formats that have columns (default: text)")
    add("--to", required=True, metavar="DIR", help="folder for tokenizer.json")
    text = "torch.profiler over a few steps: where time and memory go, and what to try next"
    add = verb("profile", profile, text).add_argument
    add("--repeat", **whole(1_000), default=2, help="cycles of 1 step to wait, 1 to warm up, 3 recorded")
    add("--to", metavar="DIR", help="folder for page, rows and traces (default: profile/RECIPE)")


ADAPTER = "an adapter of this model; several answer in turn and share its weights (one alone can be given as the model)"


def _using(verb: Verb) -> None:
    add = verb("evaluate", evaluate, "the metrics of a run's best checkpoint, over a whole split").add_argument
    add("--split", default="valid", choices=["valid", "test", "train"], help="of the run's data (default valid)")
    add("--checkpoint", metavar="DIR", help="another checkpoint or folder with weights")
    add("--beams", **whole(1_000), default=1, help="beam width for translations (default 1: greedy)")
    text = "folder for the run's report, with a confusion matrix and what it gets most wrong"
    add("--report", metavar="DIR", help=text)
    _engine(add)
    text = "text or image in: label, filled mask or translation out"
    add = verb("predict", lambda a: room("infer.predict").predict(a), text, "inputs").add_argument
    add("model", metavar="RUN_OR_MODEL", help="a run folder, a checkpoint or a folder in the Hugging Face layout")
    text = "texts, files of texts, or images; none: standard input; -: each line as it comes"
    add("inputs", nargs="*", metavar="INPUT", help=text)
    add("--split", choices=["valid", "test"], help="take the first --n samples of the run's data instead")
    add("--n", type=limits.whole(1, limits.SAMPLES), default=16, help="with --split: how many (default 16)")
    add("--top", type=limits.whole(1, limits.CLASSES), default=5, help="how many of the likeliest answers (default 5)")
    add("--to", metavar="FILE", help="the predictions as .jsonl; as RUN/predictions.jsonl they are in the run's report")
    text = "of images: a picture with the answers, green or red where the right ones are known, as .svg"
    add("--grid", dest="grid_file", metavar="FILE", help=text)
    add("--adapter", action="append", metavar="DIR", help=ADAPTER)
    _engine(add)
    text = "what a model does with a text or an image, as one page: attention, positions, patches, nearest words"
    add = verb("look", lambda a: room("report.look").look(a), text, "inputs").add_argument
    add("model", metavar="RUN_OR_MODEL", help="a run, a checkpoint, a Hugging Face folder, a llama2.c .bin")
    add("inputs", nargs="*", metavar="INPUT", help="one text in quotes (of the copy task: numbers), or one image file")
    text = "instead, of a run that reads images: image N, from 0, of its validation split"
    add("--sample", type=limits.whole(0, limits.SAMPLES), metavar="N", help=text)
    add("--tokenizer", metavar="PATH", help="the tokenizer, if it is not beside the weights")
    add("--to", default="look.html", metavar="FILE", help="the page (default: look.html)")
    add = verb("generate", lambda a: room("infer.generate").generate(a), "continue a text", "prompt").add_argument
    add("model", metavar="RUN_OR_MODEL", help="a run, a checkpoint, a Hugging Face folder, a llama2.c .bin")
    text = "the text to continue (default: from the begin token); several: one batch"
    add("prompt", nargs="*", metavar="PROMPT", help=text)
    add("--tokenizer", metavar="PATH", help="the tokenizer, if it is not beside the weights")
    add("--max-new", **whole(limits.LENGTH), default=200, help="tokens (default 200)")
    add("--temperature", type=limits.real(least=0), default=0.0, help="0 (default) is greedy")
    add("--top-k", type=limits.whole(1, limits.VOCABULARY), help="sample among the K likeliest tokens (default: all)")
    text = "nucleus sampling: among the likeliest tokens whose probabilities sum to P (default: all)"
    add("--top-p", type=limits.real(above=0, most=1), help=text)
    add("--seed", type=limits.whole(0), default=0, help="of sampling (default 0)")
    add("--sliding-window", **FLAG, help="continue beyond the context length, reading only the latest tokens")
    add("--no-cache", **FLAG, help="recompute everything for every token (slower, same text)")
    add("--beams", **whole(1_000), default=1, help="beam width; 1 (default): no beam search")
    add("--adapter", action="append", metavar="DIR", help=ADAPTER)
    _engine(add)


def _engine(add: Callable) -> None:
    text = "torch (default), compiled, ...; auto: gradus bench's best; of an exported folder it is known"
    add("--engine", metavar="NAME", help=text)
    precisions = ["fp32", "bf16", "fp16", "int8", "int4"]
    add("--precision", choices=precisions, help="int8 and int4: weights only (default fp32; with --engine auto: any)")


def _measuring(verb: Verb) -> None:
    text = "time broadcast, all-reduce and the other collectives between processes"
    add = verb("collectives", lambda a: room("measure.collectives").collectives(a), text, "").add_argument
    add("--processes", **whole(limits.PROCESSES), help="how many (default 2; under a launcher: the launcher's)")
    add("--backend", default="gloo", metavar="gloo|mpi|nccl", help="that carries the messages (default gloo)")
    add("--sizes", metavar="SIZE,...", help="of the whole array, e.g. 1KiB,4MiB (default: 1KiB to 16MiB, times 4)")
    add("--to", metavar="FILE.jsonl", help="add the rows to this file")
    add = verb("scale", scale, "speed-up and efficiency on 1, 2, 4, ... processes, and what is lost").add_argument
    add("--processes", required=True, metavar="N,...", help="how many to compare, e.g. 1,2,4; all on this machine")
    add("--steps", **whole(limits.STEPS), default=30, help="timed steps per round (default 30)")
    add("--warmup", **whole(limits.STEPS, 0), default=5, help="untimed steps before them (default 5)")
    add("--repeat", **whole(10**6), default=3, help="rounds, each with every number of processes (default 3)")
    add("--to-the-end", **FLAG, help="also run the whole training once, with its evaluations")
    add("--weak", **FLAG, help="weak scaling: the recipe's batch per process, not in total; also with --to-the-end")
    add("--scale-lr", **FLAG, help="with --weak: the learning rate times the number of processes (the linear rule)")
    add("--force", **FLAG, help="start even if the plan says that the run will not fit")
    add("--to", metavar="DIR", help="folder (default: scale/RECIPE/TIME); an interrupted one is continued")
    text = "faster, or smaller, step by step: each optimisation measured side by side with the best so far"
    add = verb("ladder", lambda a: print_all(room("proof.ladder").ladder(load_recipe(a), a), a.json), text).add_argument
    add("--for", dest="goal", default="speed", choices=["speed", "memory"], help="what to optimise for (default speed)")
    add("--steps", **whole(limits.STEPS), default=8, help="timed steps per round (default 8)")
    add("--rounds", **whole(10**6), default=3, help="rounds of each comparison (default 3)")
    add("--to-the-end", **FLAG, help="also train the first and the last rung in full, with accuracy")
    add("--to", metavar="DIR", help="folder (default: ladder/RECIPE-GOAL); an interrupted one is continued")
    add("--json", **FLAG, help="the rows as JSON lines")
    text = "a table of any configurations: planned, measured, accuracy"
    add = verb("study", lambda a: print_all(room("proof.study_file").study(a), a.json), text, "overrides").add_argument
    add("file", metavar="FILE.yaml", help="the configurations, and what to measure of each")
    add("overrides", nargs="*", metavar="key=value", help="settings for every recipe")
    add("--only", metavar="TEXT,...", help="only configurations with one of these in the name, and their baselines")
    add("--rounds", **whole(10**6), help="instead of the file's")
    add("--steps", **whole(limits.STEPS), help="instead of the file's: timed steps per round")
    add("--to", metavar="DIR", help="folder (default: studies/NAME); an interrupted one is continued")
    add("--page", metavar="FILE.md", help="also put the table into this page, between its marks <!-- NAME -->")
    add("--json", **FLAG, help="the rows as JSON lines")
    text = "latency, tokens/s, memory and accuracy of a trained model in every engine and precision"
    add = verb("bench", lambda a: print_all(room("proof.bench").bench(a), a.json), text, "").add_argument
    add("model", metavar="RUN_OR_MODEL", help="a run folder, a checkpoint or a folder in the Hugging Face layout")
    add("--engines", metavar="NAME,...", default="all", help="torch, compiled, ... (default: all)")
    add("--precisions", metavar="NAME,...", default="all", help="fp32, bf16, fp16, int8, int4 (default: all)")
    add("--batch", metavar="N,...", default="1,8,32", help="samples at a time (default 1,8,32)")
    add("--length", metavar="N,...", help="input tokens (default: 128 and 512, if they fit)")
    add("--new", type=limits.whole(2, limits.LENGTH), metavar="N", help="tokens to generate (default 64)")
    text = "over N samples of the run's valid split; 0: none (default: all for encoders, else 0; without N: all)"
    add("--accuracy", type=limits.whole(0, limits.SAMPLES), nargs="?", const=limits.SAMPLES, metavar="N", help=text)
    text = "timed runs in all rounds, at least; at most ten times as many (default 10)"
    add("--runs", **whole(limits.STEPS), default=10, help=text)
    text = "seconds to time in all rounds, at least; at most six times as long (default 10)"
    add("--seconds", type=limits.real(above=0, most=1e6), default=10.0, metavar="S", help=text)
    add("--warmup", **whole(limits.STEPS), default=10, help="runs before them, in each round (default 10)")
    add("--rounds", **whole(10**6), default=2, help="each with every configuration in a new process (default 2)")
    add("--to", metavar="DIR", help="folder (default: bench/NAME); an interrupted one is continued")
    add("--json", **FLAG, help="the rows as JSON lines")


def _machine(verb: Verb) -> None:
    run, text = lambda a: room("measure.machine").env(a), "this machine as detected, with a note on each figure"
    add = verb("env", run, text, "").add_argument
    add("--json", **FLAG, help="as JSON")
    run, text = lambda a: room("hardware").lines(" ".join(a.name) or None), "the devices and links that the plan knows"
    add = verb("hardware", run, text, "name").add_argument
    add("name", nargs="*", metavar="NAME", help="a device or link: all that is known of it (default: tables of all)")
    text = "measure this machine for a few minutes, so that gradus plan --on this is right"
    add = verb("calibrate", lambda a: room("proof.calibrate").run(a), text, "").add_argument
    text = "about how long (default 180; below 30: coarsely)"
    add("--seconds", type=limits.real(above=0, most=1e6), default=180.0, metavar="S", help=text)
    add("--threads", **whole(limits.THREADS), help="CPU threads (default: PyTorch's choice)")
    add("--to", metavar="FILE", help="hardware file (default: $GRADUS_HARDWARE, else ~/.config/gradus/hardware.yaml)")


def _elsewhere(verb: Verb) -> None:
    text = "run a recipe elsewhere: as a Slurm job, on a rented machine over ssh, on Modal"
    p = verb("launch", None, text, "")
    places = p.add_subparsers(dest="place", metavar="PLACE", parser_class=Parser, required=True)
    for place in ("slurm", "ssh", "modal"):
        module = importlib.import_module(f"gradus.launch.{place}")
        text = module.__doc__.partition(": ")[2].strip()
        q = places.add_parser(place, help=text, description=text)
        q.set_defaults(function=module.launch, words="overrides", options=q)
        module.options(q)
    text = "write a checkpoint, of any layout, as files that other engines load, and check them"
    export = lambda a: room("infer.export").export(  # noqa: E731
        a.model, Path(a.to), a.shard_gb, a.kind, a.precision, a.opset, a.merge
    )
    add = verb("export", export, text, "").add_argument
    add("model", metavar="RUN_OR_CHECKPOINT", help="a run folder (its best, else newest checkpoint) or a checkpoint")
    add("--to", required=True, metavar="DIR", help="folder to write")
    formats = ["hf", "onnx", "pt2", "torchscript", "tensorrt"]
    add("--as", dest="kind", default="hf", choices=formats, help="Hugging Face's layout (default), or graphs")
    text = "of weights and arithmetic (default: hf as stored, else fp32); norms of graphs stay in fp32"
    add("--precision", choices=["fp32", "bf16", "fp16"], help=text)
    text = "of a run with an adapter: whole weights, merged in fp32 (default for hf: the adapter alone, as PEFT does)"
    add("--merge", **FLAG, help=text)
    add("--opset", **whole(99), help="ONNX opset (default: what the exporter writes)")
    add("--shard-gb", type=limits.real(above=0, most=1e6), default=5.0, metavar="GB", help="largest file (default 5)")


def _quantizing(verb: Verb) -> None:
    text = "a run's best checkpoint in int8 or int4: size, time and accuracy before and after, kept if it is worth it"
    add = verb("quantize", lambda a: room("infer.quantize").quantize(a), text).add_argument
    add("--to", required=True, metavar="DIR", help="folder to write")
    kinds = "int8, int4: weights alone; dynamic, static: activations too, their ranges by batch or calibrated"
    add("--as", dest="how", required=True, choices=["dynamic", "static", "int8", "int4"], help=kinds)
    add("--calibrate", metavar="SPLIT[:N]", help="for static: samples that are not evaluated (default train:256)")
    add("--split", default="valid", choices=["valid", "test", "train"], help="split for the accuracy (default valid)")
    add("--checkpoint", metavar="DIR", help="another checkpoint or folder with weights")
    text = "accuracy it may lose, in points (default 1)"
    add("--max-loss", type=limits.real(least=-100, most=100), default=1.0, metavar="POINTS", help=text)
    add("--engine", metavar="NAME", help="the engine that measures both (default: torch; int8 and int4: compiled)")
    add("--force", **FLAG, help="keep it even if it is slower or loses more accuracy")


def room(name: str):
    """Imported when a verb is called, so that `--help` is quick."""
    return importlib.import_module(f"gradus.{name}")


def print_all(lines: Iterable[str], as_json: bool = False) -> int:
    """Print lines as a terminal holds them, or as they are. Returns the exit code that they end with."""
    return room("proof.results").print_lines(lines, as_json)


def load_recipe(args, world=None):
    """The recipe with its overrides and --json_file; what an earlier layer lost to a later one is printed. world: of
    the run (None: one process)."""
    from gradus.parallel.world import World
    from gradus.train.resolve import RunContext, load_and_print_notes

    return load_and_print_notes(args.recipe, args.overrides, RunContext(args.json_file, world or World()))


def on_this_host(n: int | None):
    """The world of a run of n processes on this machine (None: of one)."""
    from gradus.parallel.world import World

    return World(size=max(1, n or 1), local_size=max(1, n or 1))


def train(args) -> int:
    if args.max_restarts and args.processes is None:
        raise UserError("--max-restarts has no effect without --processes. Leave it out: another launcher restarts.")
    if args.resume and args.auto_resume:
        raise UserError("--resume and --auto-resume: the second starts a new run if there is none. Give one of them.")
    if args.data_changed and not (args.resume or args.auto_resume):
        raise UserError("--data-changed has no effect without --resume. Leave it out: a new run takes any data.")
    flags = {"force": args.force, "data_changed": args.data_changed}
    if args.processes is not None:
        options = {k: getattr(args, k) for k in ("max_restarts", "resume", "auto_resume", "json_file")}
        options["flags"] = [f"--{name.replace('_', '-')}" for name, is_set in flags.items() if is_set]
        return room("launch.local").train(args.processes, args.recipe, args.overrides, **options)
    from gradus.parallel import status
    from gradus.parallel import world as worlds
    from gradus.proof.prove import train_and_prove
    from gradus.train.resolve import RunContext
    from gradus.train.signals import Stopped

    world = worlds.find()
    if world.first and not (args.resume or args.auto_resume) and Path(args.recipe, "recipe.yaml").is_file():
        say(f"note: a new run of the recipe in {args.recipe} begins; --resume continues that run")
    try:
        options = {**flags, "resume": args.resume, "auto_resume": args.auto_resume}
        context = RunContext(args.json_file, world)
        outcome = train_and_prove(args.recipe, args.overrides, context, **options)
    except Stopped as stop:
        if world.first:
            how = status.command(stop.checkpoint.parent.parent, world.size if status.has_parent() else None)
            say(f"\nstopped; saved {stop.checkpoint}. Resume with: {how}")
        return 128 + stop.signal_number
    recipe = outcome.trainer.recipe
    if recipe.task.name == "copy" and world.size == 1:
        exact = outcome.summary["metrics"].get("valid/exact_match")
        say(f"exact match on {recipe.data.n_valid:,} held-out sequences: {exact:.4f}")
        say("\n".join(outcome.trainer.task.examples(outcome.trainer.model.eval(), 1)))
    return 0


def plan(args) -> int | Iterable[str]:
    from gradus.plan.answer import Request

    questions = ("explain", "devices", "search", "serve", "optimal", "accuracy", "web")
    modes = [m for m in questions if getattr(args, m) not in (None, False)]
    if len(modes) > 1:
        raise UserError(f"gradus plan: --{' and --'.join(modes)} are different questions. Give one of them.")
    mode = modes[0] if modes else "plan"
    _only_with(args, mode)
    if mode == "accuracy":
        return room("plan.show").printed(room("plan.published").lines(None if args.accuracy is True else args.accuracy))
    request = Request(args.recipe, tuple(args.overrides), args.on, args.tokens, args.days, args.json_file, args.price)
    if mode == "web":
        port = 8000 if args.port is None else args.port
        return room("plan.web").serve(request if args.recipe else None, host=args.host or "127.0.0.1", port=port)
    if args.recipe is None:
        raise UserError("gradus plan: no recipe or preset given. gradus recipes and gradus models list them.")
    with room("plan.show").progress(args.recipe, args.json):
        return _planned(args, mode, request)


def _planned(args, mode: str, request) -> Iterable[str]:
    from gradus.plan import answer
    from gradus.plan.show import components, explain, first_screen, named, note_lines, printed, screen

    options = {
        "serve": {"batch": args.batch or 1, "length": args.length, "bits": args.bits},
        "devices": {"everything": args.all}, "search": {}, "optimal": {},
    }  # fmt: skip
    if mode in options:
        lines, rows, notes = getattr(answer, mode)(request, **options[mode])
        if mode == "serve" and not args.all:
            last = ["--all for components, --json for rows"]
            lines = first_screen([line for line in lines if line], notes, last)
        else:
            lines = [*lines, *note_lines(notes), *(components(rows) if mode == "serve" else [])]
    else:
        response = answer.answer(request)
        if args.json:
            rows = response.rows if mode == "plan" else named(response.rows, args.explain)
            for note in response.notes:
                say(f"note: {note}", sys.stderr)
        else:
            explained = mode == "explain"
            lines = explain(response.rows, args.explain) if explained else screen(response, args.all)
        if args.picture:
            drawn = room("plan.picture").draw(response)
            path = room("pictures").write(drawn, args.picture, f"{response.recipe.name}-plan")
            if args.json:
                say(f"{path}: the plan drawn", sys.stderr)
            else:
                lines = [*lines, f"{path}: the plan drawn"]
    return (row.json() for row in rows) if args.json else printed(lines)


OF_A_RECIPE = {"plan", "explain", "devices", "search", "serve", "optimal", "web"}
TAKEN = {  # by which questions of `gradus plan`
    "port": {"web"}, "host": {"web"}, "batch": {"serve"}, "length": {"serve"}, "bits": {"serve"},
    "picture": {"plan"}, "all": {"plan", "serve", "devices"}, "json": OF_A_RECIPE - {"web"},
    "price": {"plan", "explain", "search", "web"}, **{key: {"plan", "explain", "web"} for key in ENERGY},
    **dict.fromkeys(("recipe", "on", "tokens", "days", "json_file"), OF_A_RECIPE),
}  # fmt: skip


def _only_with(args, mode: str) -> None:
    """Raises UserError for what would have no effect."""
    for option, modes in TAKEN.items():
        if getattr(args, option) not in (None, False) and mode not in modes:
            alone = len(modes) == 1 and modes != {"plan"}
            where = f"without --{next(iter(modes))}" if alone else f"with --{mode}"
            word = "RECIPE" if option == "recipe" else f"--{option}"
            raise UserError(f"gradus plan: {word} has no effect {where}. Leave it out.")
    if args.all and args.json:
        raise UserError("gradus plan: --all has no effect with --json, which holds every figure. Leave it out.")


def show(args) -> int:
    import yaml

    from gradus.recipe import dump

    if args.picture:
        return _shown(args)
    recipe = load_recipe(args, on_this_host(args.processes))
    if args.modules:
        return room("measure.modules").modules(recipe, args.processes, args.rank or 0, data=not args.no_data)
    if args.rank is not None:
        raise UserError("--rank has no effect without --modules. Leave it out.")
    if args.no_data:
        room("parallel.check").validate(recipe, args.processes or room("recipe.axes").needed(recipe.layout))
        return dump(recipe).splitlines()
    session = room("train.session").open_for(recipe, args.processes)
    derived = yaml.safe_dump({"derived": room("train.session").derive(session)}, sort_keys=False)
    return [*dump(session.recipe).splitlines(), "", "# derived", *derived.splitlines()]


def _shown(args) -> Iterable[str]:
    from gradus.plan.answer import Request, of_model, open_recipe

    for option in ("modules", "no_data", "processes", "rank"):
        if getattr(args, option) is not None and getattr(args, option) is not False:
            why = "it draws the whole model, and opens the data only for sizes that the recipe does not say"
            raise UserError(f"--{option.replace('_', '-')} has no effect with --picture: {why}. Leave it out.")
    recipe, *_ = open_recipe(Request(args.recipe, tuple(args.overrides), json_file=args.json_file), notes := [])
    path = room("pictures").write(room("models.picture").draw(recipe.model, recipe.name), args.picture, recipe.name)
    return [*(f"note: {note}" for note in of_model(notes)), f"{path}: the model drawn"]


def keys(args) -> Iterable[str]:
    lines = (line for asked in args.section or [None] for line in room("recipe.keys").keys(asked))
    return "\n".join(lines).rstrip().splitlines()


def recipes(args) -> Iterable[str]:
    from gradus.recipe import header, names

    return (f"{name:22} {header(name)[0]}" for name in names())


def models(args) -> Iterable[str]:
    from gradus.models import count
    from gradus.recipe.presets import PRESETS, config_of
    from gradus.text import table

    if args.names:
        for name in args.names:
            counts = count(config_of(name))
            yield name + "".join(f"\n  {part:14} {n:>19,}" for part, n in counts.items())
        return
    configs = {name: config_of(name) for name in PRESETS}
    body = [
        [name, c.family, f"{c.n_layers}", f"{c.d_model}", f"{c.n_heads}", f"{count(c)['total']:,}"]
        for name, c in configs.items()
    ]
    yield from table(["preset", "family", "layers", "d_model", "heads", "parameters"], body, {2, 3, 4, 5})


def fetch(args) -> Iterable[str]:
    words = [args.recipe, *args.overrides, *(["--json_file", args.json_file] if args.json_file else [])]
    return room("train.fetch").fetch(load_recipe(args), Path(args.to), words)


def tokenizer(args) -> Iterable[str]:
    from gradus.data.corpus import Corpus
    from gradus.data.readers import kind_of
    from gradus.data.tokenizers import train_bpe

    if args.text and all(kind_of(file) == "txt" for file in args.files):
        raise UserError(f"--text {args.text}: a column of a table, and {args.files[0]} is plain text. Leave it out.")
    texts = (piece for file in args.files for piece in Corpus.open(file, args.text or "text"))
    bpe = train_bpe(texts, args.vocab_size, lowercase=args.lowercase)
    to = Path(args.to)
    with errors.writing(to, "the tokenizer was not written. Free some space, or give another --to."):
        to.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.nullcontext(to) if to.exists() else files.aside(to) as folder:
            bpe.save(folder)
    use = f"use it with tokenizer.kind=file tokenizer.path={args.to}"
    return [f"{bpe.vocab_size:,} tokens in {args.to}/tokenizer.json; {use}"]


def profile(args) -> Iterable[str]:
    recipe = load_recipe(args)
    folder, page = Path(args.to or f"profile/{recipe.name}"), room("report.profiled").page
    return room("measure.profile").profile(recipe, folder, args.repeat, page)


def evaluate(args) -> Iterable[str]:
    if args.report:
        room("report.runs").read([args.recipe])  # raises where it is no run
    overrides = [*args.overrides, *([f"evaluate.beams={args.beams}"] if args.beams != 1 else [])]
    how = {"engine": args.engine, "precision": args.precision, "keep": args.report is not None}
    run = room("infer.predict").evaluate
    metrics = run(args.recipe, overrides, args.split, args.checkpoint, args.json_file, **how)
    yield from (f"{name:26} {value:.4f}" for name, value in metrics.items())
    if args.report:
        yield from room("report.report").report([args.recipe], args.report)


def scale(args) -> int:
    counts = limits.numbers(args.processes, "--processes")  # strong scaling keeps one batch: that of the most processes
    recipe = load_recipe(args, on_this_host(1 if args.weak else max(counts)))
    return print_all(room("proof.scale").scale(recipe, counts, args))


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Words may stand before, between and after options, which argparse does not allow below a verb."""
    argv = sys.argv[1:] if argv is None else argv
    limits.words(argv)
    runs = [files.run_of(word) for word in argv]
    words = {word.rstrip("/") for word in argv}  # a link beside its run, as in runs/copy-task/*, is one run
    argv = [run for word, run in zip(argv, runs) if run == word or run not in words]
    top = parser()
    args, rest = top.parse_known_args(argv)
    for word in rest:
        if (word.startswith("-") and word != "-") or not hasattr(args, getattr(args, "words", "")):
            verbs = top._subparsers._group_actions[0].choices
            options = getattr(args, "options", None) or (verbs[args.verb] if args.verb else None)
            actions = options._actions if options else []
            following = next(iter(argv[argv.index(word) + 1 :]), "")
            near = _option_for(word, following, actions)
            near = near or (_key_for(word, following, args.verb) if hasattr(args, "overrides") else "")
            known = [s[2:] for a in actions for s in a.option_strings if s.startswith("--") and s != "--help"]
            near = near or did_you_mean(word.split("=")[0].lstrip("-"), known).replace("mean ", "mean --")
            raise UserError(f"gradus {args.verb or ''}: {word}: unknown option.{near}")
        getattr(args, args.words).append(word)
    for key in ENERGY:
        if (value := getattr(args, key, None)) is not None:
            args.overrides.append(f"energy.{key}={value}")
    return args


def other_names(own: str) -> list[str]:
    """What other tools call a command, an option or an argument of one here."""
    return files.packaged("options.yaml").get(own, "").split()


def _option_for(option: str, following: str, actions: Iterable[argparse.Action]) -> str:
    """What to write in place of another tool's option that is an option or an argument here, or a value of one; ''
    where it is none."""
    name, _, value = option.lstrip("-").partition("=")
    name, value = name.replace("-", "_"), value or following
    for action in sorted(actions, key=lambda a: (value in (a.choices or ()), a.option_strings != []), reverse=True):
        own, choices = next(iter(action.option_strings), action.dest), [*(action.choices or ())]
        if name in [own, *other_names(own), *choices]:
            shown = next((f" {word}" for word in (name, value) if word in choices), "")
            place = f"Write it without an option, in the place of {action.metavar or own}."
            return f" Did you mean {own}{shown}?" if action.option_strings else f" {place}"
    return ""


def _key_for(option: str, following: str, verb: str) -> str:
    """What to write in place of an option that is a key of a recipe here; '' where it is none."""
    name, _, value = option.lstrip("-").partition("=")
    name = name.replace("-", "_")
    key_of = room("recipe.fields").key_of
    if not (key := (verb == "evaluate" and key_of(f"eval_{name}")) or key_of(name)):
        return ""
    value = name if name in ("fp16", "bf16") else value or following
    plain = value and not value.startswith("-") and "=" not in value
    same = plain and (not key.startswith("layout.") or name in (key, key.rpartition(".")[2], "fp16", "bf16"))
    return f" It is a key of the recipe, written without --: {key}={value if same and 'ratio' not in name else '...'}"


def main(argv: list[str] | None = None) -> int:
    """Parse, call the verb, turn a user's mistake into one line on standard error and exit code 2 (a fault of the
    machine: `errors.FAULT`). One of several processes does not come back from here: it ends when the others do."""
    os.environ.setdefault("PYTHONSAFEPATH", "1")  # the Pythons started from here import nothing from the working folder
    _open_streams()
    code, joined = 1, lambda: (world := sys.modules.get("gradus.parallel.world")) and world.joined()
    try:
        with plain_where_needed():
            code = run(argv)
    except Exception:  # a bug
        if not joined():
            raise
        traceback.print_exc()
    if joined():
        sys.modules["gradus.parallel.world"].leave(code)
    return code


def _open_streams() -> None:
    """Standard streams that whoever started this closed (`>&-`) lead to nothing."""
    for number, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        if getattr(sys, name) is None:
            handle = os.open(os.devnull, os.O_RDWR)
            with contextlib.suppress(OSError):  # its number may be another file's by now
                os.fstat(number)
                number = handle
            if number != handle:
                os.dup2(handle, number)
            setattr(sys, name, open(number, mode, closefd=False))  # noqa: SIM115


def run(argv: list[str] | None) -> int:
    try:
        args = parse(argv)
        if args.verb is None:
            parser().print_help()
            return 0
        errors.check_working_folder()
        answer = args.function(args)  # an exit code, or lines
        if not isinstance(answer, int):
            whole = getattr(args, "json", False) or args.verb in PASTED
            for line in answer or ():
                print(line, flush=True) if whole else say(line)
            answer = 0
        sys.stdout.flush()  # here, so that a reader who has gone is heard of below
        return answer
    except UserError as e:
        world = sys.modules.get("gradus.parallel.world")
        text = world.mistake(str(e)) if world is not None and world.joined() else str(e)
        if text is not None:
            tell_error(limits.shown(text))
        return exit_code(e)
    except MemoryError as e:
        tell_error(f"not enough memory{f' ({e})' if str(e) else ''}. Use smaller sizes, or a machine with more memory.")
        return 2
    except KeyboardInterrupt:
        print("\nstopped", file=sys.stderr)
        return 130
    except Exception as e:  # a file that may not be read, a disk that fails: where nothing nearer by has a message
        unread, code = isinstance(e, BrokenPipeError) and _nobody_reads(), exit_code(e)
        if code == 1:
            raise
        _forget_unwritable_output()
        if unread:
            return 0
        if code == FAULT and not getattr(e, "filename", None) and not disk_full(e):  # its text does not say where
            traceback.print_exc()
        tell_error(limits.shown(str(errors.of_system(e))))
        return code


def _forget_unwritable_output() -> None:
    """What cannot be written to standard output (its reader has gone, or its disk is full) goes nowhere, so that
    Python does not try again at its end."""
    try:
        sys.stdout.flush()
    except OSError:
        with contextlib.suppress(ValueError):  # it may be no file
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _nobody_reads() -> bool:
    """Whether standard output is a pipe whose reader has gone (`gradus ... | head`)."""
    try:
        poll = select.poll()
        poll.register(sys.stdout.fileno(), 0)
        return any(event & select.POLLERR for _, event in poll.poll(0))
    except (AttributeError, OSError, ValueError):
        return False
