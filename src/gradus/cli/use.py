"""Verbs that use a trained model."""

from __future__ import annotations

from collections.abc import Iterable

from gradus.cli.verb import RECIPE, verb
from gradus.errors import UserError
from gradus.limits import CLASSES, LENGTH, SAMPLES, VOCABULARY
from gradus.options import option, real, whole

ENGINE = (
    option(
        "--engine NAME", "torch (default), compiled, ...; auto: gradus bench's best; of an exported folder it is known"
    ),
    option(
        "--precision", "int8 and int4: weights only (default fp32; with --engine auto: any)",
        choices=["fp32", "bf16", "fp16", "int8", "int4"],
    ),
)  # fmt: skip
MODEL = option("model RUN_OR_MODEL", "a run, a checkpoint, a Hugging Face folder, a llama2.c .bin")
TOKENIZER = option("--tokenizer PATH", "the tokenizer, if it is not beside the weights")
CHECKPOINT = option("--checkpoint DIR", "another checkpoint or folder with weights")
ADAPTER = option(
    "--adapter DIR",
    "an adapter of this model; several answer in turn and share its weights (one alone can be given as the model)",
    action="append",
)
SPLITS = {"default": "valid", "choices": ["valid", "test", "train"]}


@verb(
    "label, masked word, translation", 'gradus predict RUN "a fine film"', "recipes",
    option("model RUN_OR_MODEL", "a run folder, a checkpoint or a folder in the Hugging Face layout"),
    option("inputs INPUT", "texts, files of texts, or images; none: standard input; -: each line as it comes",
           nargs="*"),
    option("--split", "take the first --n samples of the run's data instead", choices=["valid", "test"]),
    option("--n N", "with --split: how many (default 16)", whole(SAMPLES), default=16),
    option("--top TOP", "how many of the likeliest answers (default 5)", whole(CLASSES), default=5),
    option("--to FILE", "the predictions as .jsonl; as RUN/predictions.jsonl they are in the run's report"),
    option(
        "--grid FILE",
        "of images: a picture with the answers, green or red where the right ones are known, as .svg", dest="grid_file",
    ),
    ADAPTER, *ENGINE,
)  # fmt: skip
def predict(args) -> Iterable[str]:
    """text or image in: label, filled mask or translation out"""
    from gradus.infer.predict import predict

    return predict(args)


@verb(
    "continue a text", 'gradus generate RUN "Once upon a time" --temperature 0.8', "inference",
    MODEL,
    option("prompt PROMPT", "the text to continue (default: from the begin token); several: one batch", nargs="*"),
    TOKENIZER,
    option("--max-new N", "tokens (default 200)", whole(LENGTH), default=200),
    option("--temperature TEMPERATURE", "0 (default) is greedy", real(least=0), default=0.0),
    option("--top-k TOP_K", "sample among the K likeliest tokens (default: all)", whole(VOCABULARY)),
    option(
        "--top-p TOP_P", "nucleus sampling: among the likeliest tokens whose probabilities sum to P (default: all)",
        real(above=0, most=1),
    ),
    option("--seed SEED", "of sampling (default 0)", whole(least=0), default=0),
    option("--sliding-window", "continue beyond the context length, forgetting old tokens (not attention's window)"),
    option("--no-cache", "recompute everything for every token (slower, same text)"),
    option("--beams N", "beam width; 1 (default): no beam search", whole(1_000), default=1),
    option("--chat", "answer by the model's chat template: prompts in turn, or lines of standard input (/reset)"),
    option("--system TEXT", "with --chat: what the system says (default: as in training)"),
    ADAPTER, *ENGINE,
)  # fmt: skip
def generate(args) -> Iterable[str]:
    """continue a text, or answer in a conversation"""
    if args.system is not None and not args.chat:
        raise UserError("--system: it is what the system says in a chat. Give --chat too, or leave it out.")
    if args.chat:
        from gradus.infer.chat import chat

        return chat(args)
    from gradus.infer.generate import generate

    return generate(args)


@verb(
    "attention and more, pictured", 'gradus look runs/copy-task/latest "3 1 4 1 5 9 2 6 5 3"', "report",
    MODEL,
    option("inputs INPUT", "one text in quotes (of the copy task: numbers), or one image file", nargs="*"),
    option(
        "--sample N", "instead, of a run that reads images: image N, from 0, of its validation split", whole(SAMPLES, 0)
    ),
    TOKENIZER,
    option("--to FILE", "the page (default: look.html)", default="look.html"),
)  # fmt: skip
def look(args) -> Iterable[str]:
    """what a model does with a text or an image, as one page: attention, positions, patches, nearest words"""
    from gradus.report.look import look

    return look(args)


@verb(
    "metrics over a whole split", "gradus evaluate runs/copy-task/latest", "recipes",
    *RECIPE,
    option("--split", "of the run's data (default valid)", **SPLITS),
    CHECKPOINT,
    option("--beams N", "beam width for translations (default 1: greedy)", whole(1_000), default=1),
    option("--report DIR", "folder for the run's report, with a confusion matrix and what it gets most wrong"),
    *ENGINE,
)  # fmt: skip
def evaluate(args) -> Iterable[str]:
    """the metrics of a run's best checkpoint, over a whole split"""
    from gradus.infer.predict import evaluate

    if args.report:
        from gradus.report import runs

        runs.read([args.recipe])  # raises where it is no run
    overrides = [*args.overrides, *([f"evaluate.beams={args.beams}"] if args.beams != 1 else [])]
    how = {"engine": args.engine, "precision": args.precision, "keep": args.report is not None}
    metrics = evaluate(args.recipe, overrides, args.split, args.checkpoint, args.json_file, **how)
    yield from (f"{name:26} {value:.4f}" for name, value in metrics.items())
    if args.report:
        from gradus.report.report import report

        yield from report([args.recipe], args.report)


@verb(
    "int8 or int4, if worth it", "gradus quantize RUN --to DIR --as int8", "inference",
    *RECIPE,
    option("--to DIR", "folder to write", required=True),
    option(
        "--as", "int8, int4: weights alone; dynamic, static: activations too, their ranges by batch or calibrated",
        dest="how", required=True, choices=["dynamic", "static", "int8", "int4"],
    ),
    option("--calibrate SPLIT[:N]", "for static: samples that are not evaluated (default train:256)"),
    option("--split", "split for the accuracy (default valid)", **SPLITS),
    CHECKPOINT,
    option("--max-loss POINTS", "accuracy it may lose, in points (default 1)", real(least=-100, most=100), default=1.0),
    option("--engine NAME", "the engine that measures both (default: torch; int8 and int4: compiled)"),
    option("--force", "keep it even if it is slower or loses more accuracy"),
)  # fmt: skip
def quantize(args) -> Iterable[str]:
    """a run's best checkpoint in int8 or int4: size, time and accuracy before and after, kept if it is worth it"""
    from gradus.infer.quantize import quantize

    return quantize(args)
