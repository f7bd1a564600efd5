"""Verbs before money is spent: what it will cost, and on what."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from gradus.cli.verb import JSON_FILE, RECIPE, energy, is_given, load_recipe, overrides, picture, print_all, verb
from gradus.errors import UserError
from gradus.limits import BATCH, LENGTH, THREADS, TOKENS
from gradus.options import option, real, whole
from gradus.text import say

if TYPE_CHECKING:
    from gradus.plan.answer import Request
    from gradus.rows import Row

QUESTIONS = ("explain", "devices", "search", "serve", "optimal", "accuracy", "web")


@verb(
    "memory, time, money, energy", "gradus plan gpt2-small --tokens 3e9 --on 8xA100-80GB", "plan",
    option("recipe RECIPE", "a recipe, a run folder, a preset (gradus models) or hf:NAME", nargs="?"),
    overrides("layout.checkpointing=full"), JSON_FILE,
    option("--on NxDEVICE", "hardware, e.g. 8xA100-80GB, H100 or this (gradus hardware, gradus calibrate)"),
    option(
        "--tokens N", "tokens to train on, instead of the recipe's steps, e.g. 300e9",
        real(above=0, least=1, most=TOKENS),
    ),
    option("--days D", "deadline: how many of --on DEVICE it needs", real(above=0, most=1e6)),
    option("--price P", "of a device-hour (default: known prices)", real(above=0, most=1e6),
           only="plan explain search web"),
    option("--mtbf TIME", "between two failures of one device, e.g. 50000h (default: published rates)",
           only="plan explain search"),
    *energy(only="plan explain web"),
    option("--all", "tables of every component", only="plan serve devices"),
    option("--json", "the rows as JSON lines", only="plan explain devices search serve optimal"),
    option("--explain NAME", "the formula, inputs and source of one figure"),
    picture("draw it too: memory by component and over a step, a pipeline's schedule", "RECIPE-plan.svg", only="plan"),
    option("--devices", "which single device, at which precision and price"),
    option("--search", "the best layouts on this hardware, and why the others are slower"),
    option("--serve", "serving instead of training: weights, cache, time per token"),
    option("--batch B", "with --serve: sequences at a time (default 1)", whole(BATCH), only="serve"),
    option("--length N", "with --serve: tokens per sequence (default: the context length)", whole(LENGTH),
           only="serve"),
    option("--bits Q", "with --serve: bits per stored weight, e.g. 8 (default: the precision's)", whole(32),
           only="serve"),
    option("--new N", "with --serve: of --length those of the answer; adds what a request takes", whole(LENGTH),
           only="serve"),
    option("--rate R", "with --serve --new: requests/s that arrive (default: a batch at once)",
           real(above=0, most=1e6), only="serve"),
    option("--optimal", "compute-optimal tokens; with --tokens, the model size"),
    option("--accuracy FILE", "error against published runs (no file), with --on a chip's", nargs="?", const=True),
    option("--web", "serve the plan as a local page"),
    option("--port PORT", "with --web (default 8000)", whole(65_535, 0), only="web"),
    option("--host HOST", "with --web (default 127.0.0.1: this machine only)", only="web"),
)  # fmt: skip
def plan(args) -> int | Iterable[str]:
    """what a recipe or a preset will cost: memory, time, money, energy"""
    from gradus.plan.answer import Request
    from gradus.plan.show import printed, progress

    question = _question(args)
    if question == "accuracy":
        from gradus.plan.published import lines

        return printed(lines(None if args.accuracy is True else args.accuracy, args.on))
    mtbf = args.mtbf and _seconds(args.mtbf)
    given = args.recipe, tuple(args.overrides), args.on, args.tokens, args.days, args.json_file, args.price, mtbf
    request = Request(*given)
    if question == "web":
        from gradus.plan.web import serve

        port = 8000 if args.port is None else args.port
        return serve(request if args.recipe else None, host=args.host or "127.0.0.1", port=port)
    if args.recipe is None:
        raise UserError("gradus plan: no recipe or preset given. gradus recipes and gradus models list them.")
    with progress(args.recipe, args.json):
        if question in ("plan", "explain"):
            lines, rows = _planned(args, request)
        else:
            lines, rows = _replied(args, request)
    return (row.json() for row in rows) if args.json else printed(lines)


def _question(args) -> str:
    """Which is asked: "plan" or one of QUESTIONS. Raises UserError where it is not one, and for an option that would
    have no effect on it."""
    asked = [name for name in QUESTIONS if is_given(args, name)]
    if len(asked) > 1:
        raise UserError(f"gradus plan: --{' and --'.join(asked)} are different questions. Give one of them.")
    question = asked[0] if asked else "plan"
    for action in args.parser._actions:
        name, only = action.dest, getattr(action, "only", "").split()
        has_effect = question in only if only else question != "accuracy" or name in ("accuracy", "on")
        if is_given(args, name) and not has_effect:
            where = f"without --{only[0]}" if len(only) == 1 and name != "picture" else f"with --{question}"
            word = "RECIPE" if name == "recipe" else f"--{name}"
            raise UserError(f"gradus plan: {word} has no effect {where}. Leave it out.")
    if args.all and args.json:
        raise UserError("gradus plan: --all has no effect with --json, which holds every figure. Leave it out.")
    return question


def _seconds(text: str) -> float:
    """`50000h`, `2 years` → seconds. Raises UserError."""
    from gradus.hardware.units import quantity

    try:
        return quantity(text, "time")
    except ValueError as e:
        raise UserError(f"--mtbf: {e} Write for example 50000h or 2000days.") from None


def _planned(args, request: Request) -> tuple[Iterable[str], Sequence[Row]]:
    """What the screen says of the plan or of one of its figures, and the rows."""
    from gradus.plan.answer import answer
    from gradus.plan.show import explain, named, screen

    response = answer(request)
    if args.explain is None:
        lines, rows = screen(response, args.all), response.rows
    else:
        lines, rows = explain(response.rows, args.explain), named(response.rows, args.explain)
    if args.json:
        for note in response.notes:
            say(f"note: {note}", sys.stderr)
    if args.picture:
        from gradus import pictures
        from gradus.plan.picture import draw

        path = pictures.write(draw(response), args.picture, f"{response.recipe.name}-plan")
        drawn = f"{path}: the plan drawn"
        if args.json:
            say(drawn, sys.stderr)
        else:
            lines = [*lines, drawn]
    return lines, rows


def _replied(args, request: Request) -> tuple[Iterable[str], Sequence[Row]]:
    """What the screen says to another question, and the rows."""
    from gradus.plan.answer import devices, optimal, search, serve
    from gradus.plan.show import components, first_screen, note_lines

    if args.serve:
        lines, rows, notes = serve(
            request, batch=args.batch or 1, length=args.length, bits=args.bits, new=args.new, rate=args.rate
        )  # fmt: skip
        if args.all:
            return [*lines, *note_lines(notes), *components(rows)], rows
        last = ["--all for components, --json for rows"]
        return first_screen([line for line in lines if line], notes, last), rows
    if args.devices:
        lines, rows, notes = devices(request, everything=args.all)
    elif args.search:
        lines, rows, notes = search(request)
    else:
        lines, rows, notes = optimal(request)
    return [*lines, *note_lines(notes)], rows


@verb(
    "presets, parameters counted", "gradus models gpt2-small", "plan",
    option("names PRESET", "only these, by component", nargs="*"),
)  # fmt: skip
def models(args) -> Iterable[str]:
    """list the model presets with their exact parameter counts"""
    from gradus.models import count
    from gradus.plan.counts import active
    from gradus.recipe.presets import PRESETS, config_of
    from gradus.text import table

    if args.names:
        for name in args.names:
            counts = count(config := config_of(name))
            if getattr(config, "n_experts", None):
                counts["active"] = active(config)
            yield name + "".join(f"\n  {part:14} {n:>19,}" for part, n in counts.items())
        return
    configs = {name: config_of(name) for name in PRESETS}
    body = [
        [name, c.family, f"{c.n_layers}", f"{c.d_model}", f"{c.n_heads}", f"{count(c)['total']:,}"]
        for name, c in configs.items()
    ]
    yield from table(["preset", "family", "layers", "d_model", "heads", "parameters"], body, {2, 3, 4, 5})


@verb(
    "devices and links it knows", "gradus hardware H100", "plan",
    option("name NAME", "a device or link: all that is known of it (default: tables of all)", nargs="*"),
)  # fmt: skip
def hardware(args) -> Iterable[str]:
    """the devices and links that the plan knows"""
    from gradus.hardware import lines

    return lines(" ".join(args.name) or None)


@verb("this machine as detected", "gradus env", "recipes", option("--json", "as JSON"))
def env(args) -> int:
    """this machine as detected, with a note on each figure"""
    from gradus.measure.machine import env

    return env(args)


@verb(
    "measure this machine", "gradus calibrate", "proof",
    option("--seconds S", "about how long (default 180; below 30: coarsely)", real(above=0, most=1e6), default=180.0),
    option("--threads N", "CPU threads (default: PyTorch's choice)", whole(THREADS)),
    option("--to FILE", "hardware file (default: $GRADUS_HARDWARE, else ~/.config/gradus/hardware.yaml)"),
)  # fmt: skip
def calibrate(args) -> Iterable[str]:
    """measure this machine for a few minutes, so that gradus plan --on this is right"""
    from gradus.proof.calibrate import run

    return run(args)


@verb(
    "the largest micro-batch", "gradus fit copy-task --memory 1GiB", "proof",
    *RECIPE,
    option("--memory SIZE", "a budget, e.g. 8GiB (default: all of a GPU, 80 %% of free CPU memory)"),
    option("--sweep N,...", "instead, measure speed and memory at these micro-batches, e.g. 8,16,32,64"),
    option("--json", "the figures as JSON rows"),
)  # fmt: skip
def fit(args) -> int:
    """the largest micro-batch that fits: planned, then confirmed by one step"""
    from gradus.proof.fit import fit

    return print_all(fit(load_recipe(args), args), args.json)
