"""Verbs of the training itself."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from pathlib import Path

from gradus import errors, files, limits
from gradus.cli.verb import RECIPE, energy, load_recipe, verb
from gradus.errors import UserError
from gradus.options import FORCE, option, whole
from gradus.text import say


@verb(
    "a recipe, into a run folder", "gradus train copy-task train.steps=20", "start",
    *RECIPE,
    option("--resume", "resume RECIPE if it is a run folder (or log.dir), else its newest run"),
    option("--auto-resume", "start, or resume if log.dir already holds a run: for requeued jobs"),
    option("--processes N", "start N processes here (or use torchrun, mpirun, srun)", whole(limits.PROCESSES)),
    option("--max-restarts K", "with --processes: restarts allowed", whole(10**6, 0), default=0),
    option("--data-changed", "resume also with other data than the run has read"),
    FORCE,
    *energy(),
)  # fmt: skip
def train(args) -> int:
    """train a recipe into a run folder"""
    if args.max_restarts and args.processes is None:
        raise UserError("--max-restarts has no effect without --processes. Leave it out: another launcher restarts.")
    if args.resume and args.auto_resume:
        raise UserError("--resume and --auto-resume: the second starts a new run if there is none. Give one of them.")
    if args.data_changed and not (args.resume or args.auto_resume):
        raise UserError("--data-changed has no effect without --resume. Leave it out: a new run takes any data.")
    how = {"resume": args.resume, "auto_resume": args.auto_resume}
    how |= {"force": args.force, "data_changed": args.data_changed}
    if args.processes is not None:
        from gradus.launch import local

        return local.train(args.processes, args.recipe, args.overrides, args.json_file, args.max_restarts, **how)
    from gradus.parallel import status
    from gradus.parallel import world as worlds
    from gradus.proof.prove import train_and_prove
    from gradus.train.resolve import RunContext
    from gradus.train.signals import Stopped

    world = worlds.find()
    if world.first and not (args.resume or args.auto_resume) and Path(args.recipe, "recipe.yaml").is_file():
        say(f"note: a new run of the recipe in {args.recipe} begins; --resume continues that run")
    try:
        outcome = train_and_prove(args.recipe, args.overrides, RunContext(args.json_file, world), **how)
    except Stopped as stop:
        if world.first:
            command = status.command(stop.checkpoint.parent.parent, world.size if status.has_parent() else None)
            say(f"\nstopped; saved {stop.checkpoint}. Resume with: {command}")
        return 128 + stop.signal_number
    if world.size == 1:
        trainer = outcome.trainer
        for line in trainer.task.closing(trainer.model, outcome.summary["metrics"]):
            say(line)
    return 0


@verb("look before you train", "gradus check copy-task", "proof", *RECIPE, option("--json", "the lines as JSON rows"))
def check(args) -> int:
    """before training: data, shapes, memory, gradients, first loss, one batch overfitted, loader"""
    from gradus.proof.check import check

    return check(load_recipe(args), args.json)


@verb(
    "train one from text", "gradus tokenizer train corpus.txt --vocab-size 8000 --to bpe", "recipes",
    option("action", "byte-level BPE, as GPT-2's", choices=["train"]),
    option("files FILE", "text files (txt, jsonl, csv, tsv, parquet, also .gz and .xz)", nargs="+"),
    option("--vocab-size N", "tokens at most, special tokens included", whole(limits.TOKEN_IDS), required=True),
    option("--lowercase", "convert the text to lower case"),
    option("--text COLUMN", "the column, for formats that have columns (default: text)"),
    option("--to DIR", "folder for tokenizer.json", required=True),
)  # fmt: skip
def tokenizer(args) -> Iterable[str]:
    """train a tokenizer from text"""
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
