"""`gradus look`: what a model does with one text or one image, as one page.

No family is known here: attention is seen by a hook, where it belongs by the family's stacks, and positions by what the
modules do: a table is looked up at 0, 1, 2, ... or added to tokens; rotations and biases are given to attention.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gradus import files, tasks
from gradus.data.augment import normalise
from gradus.data.image_sources import SUFFIXES
from gradus.data.images import fit
from gradus.data.tokenizers import Tokenizer
from gradus.errors import UserError, not_written
from gradus.infer import ModelSource, encode, find, note
from gradus.infer.engines import Torch, by_name
from gradus.infer.predict import asking_for, line_of, preparation, read_images, records_of, rows_of, split_of
from gradus.layers import Attention, observe_attention
from gradus.models.decoding import complete
from gradus.models.finite import finite
from gradus.recipe.schema import Preprocess
from gradus.report.look_page import Layer, Seen, content
from gradus.report.page import to_html
from gradus.tasks.kinds import task_class

TOKENS = 48  # of a text that are read
NEAREST = 5
IMAGES = (*SUFFIXES, ".gif")


@dataclasses.dataclass
class Side:
    """One text of a model. name: of a token. n_words: the tokens that have one. whole: tokens before it was cut."""

    ids: list[int]
    name: Callable[[int], str]
    n_words: int
    whole: int = 0


def look(args: Any) -> Iterator[str]:
    """Write the page of a model and one input to `args.to`; yields what is printed. The arguments are those of `gradus
    look`. Raises UserError for a model without a tokenizer, an input that it cannot read, and a page that cannot be
    written."""
    to, source = files.writable(Path(args.to)), find(args.model)
    text = checked_input(source, args)
    if source.config.reads == "images":
        seen = look_at_image(source, text, args.sample)
    else:
        numbers = source.recipe is not None and source.recipe.task.vocabulary
        seen = look_at_numbers(source, text) if numbers else look_at_text(source, text, args.tokenizer)
    page = to_html(f"{source.name}: a look inside", content(seen))
    try:
        files.write_text(to, page)
    except OSError as e:
        raise not_written(to, e, "nothing was written. Free some space, or give another --to.") from e
    yield f"{to}: attention of {len(seen.layers)} layers, positions and more ({len(page) / 1e6:.1f} MB), in one file"


def checked_input(source: ModelSource, args: Any) -> str:
    """The one input ("" with --sample). Raises UserError where there is none, or one that is not for this model."""
    images, (text, *more) = source.config.reads == "images", args.inputs or [""]
    kind = "one image file" if images else "one text in quotes"
    if args.sample is not None and not (images and source.recipe):
        raise UserError(f"--sample={args.sample}: {source.name} is no run that reads images. Give {kind} instead.")
    if more or (text and args.sample is not None):
        takes = "one input" if args.sample is None else "an input or --sample"
        raise UserError(f"{(more or [text])[0]!r:.60}: gradus look takes {takes}: {kind}. Leave this out.")
    if args.sample is not None:
        return ""
    if not text.strip():
        raise UserError(f"nothing to look at. Give {kind} after the model's name.")
    named = text.lower().endswith(IMAGES)
    if images and not named and not os.path.isfile(text):
        raise UserError(f"{text!r:.60}: {source.name} reads images. Give an image file, such as a PNG.")
    if not images and named and os.path.isfile(text):
        raise UserError(f"{text}: an image, and {source.name} reads text. Give {kind}.")
    return text


# ---------------------------------------------------------------- what it reads


def look_at_image(source: ModelSource, file: str, sample: int | None) -> Seen:
    if sample is None:
        image = read_images(source, [file])[0]
    else:
        data = split_of(tasks.open_task(asking_for(source.recipe, "valid")), "valid", source.run)
        if sample >= len(data):
            raise UserError(f"--sample={sample}: the validation split has {len(data):,} images; the first is 0.")
        size = source.config.image_size  # that training makes of it, if it is not prepared already
        image = fit(data[sample]["image"], size, Preprocess(resize=size), f"image {sample}")
    model = source.load()
    weight = next(model.parameters())
    pixels, data = torch.tensor(image)[None].to(weight), preparation(source)  # (1, channels, image_size, image_size)
    seen = observe(source, model, partial(model.features, normalise(pixels, data.mean, data.std)))
    seen.input = file or f"image {sample} of the validation split"
    colours = pixels[0].byte().cpu()
    seen.pixels = colours if len(colours) == 3 else colours[:1].expand(3, -1, -1)
    if file and source.config.n_classes:
        seen.says = prediction(source, file)
    return seen


def look_at_numbers(source: ModelSource, text: str) -> Seen:
    whole = text.split()
    record = next(records_of(source, [" ".join(whole[: source.config.seq_len])], 1))
    read, written = (shortened([int(word) for word in record[key].split()]) for key in ("input", "answer"))
    target = task_class(source.recipe).without_data(source.recipe).decoder_reads(read, written)
    n = source.recipe.task.vocabulary
    seen = look_at_ids(source, Side(read, str, n, len(whole)), Side(target, str, n, len(whole)))
    seen.input, seen.says = text, f"{record['answer']} ({'right' if record['right'] else 'wrong'})"
    return seen


def look_at_text(source: ModelSource, text: str, path: str | None) -> Seen:
    tokenizers, family, answer, longest = source.tokenizers(path), source.family, None, source.config.longest
    tokenizer, target = tokenizers[""], tokenizers.get("target", tokenizers[""])
    if family.attention == "both":
        whole = rows_of(source, tokenizer, [text])[0]
    else:
        encoded = encode(source, tokenizers, [text], fit=False)
        whole = (encoded.sources or encoded.prompts)[0]
    read = shortened(whole, tokenizer, longest)
    if family.attention == "cross":
        most = min(TOKENS, longest or TOKENS) - 1
        new = complete(Torch(source), encoded.prompts, sources=[read], max_new=most, eos_id=encoded.ends)[0]
        answer = Side(encoded.prompts[0] + new, partial(label, target), target.vocab_size)
    seen = look_at_ids(source, Side(read, partial(label, tokenizer), tokenizer.vocab_size, len(whole)), answer)
    seen.input = text
    if answer is not None:
        seen.says = target.decode(answer.ids[1:]) or "nothing"
    elif getattr(source.config, "head", None) == "classification":
        seen.says = prediction(source, text)
    return seen


def prediction(source: ModelSource, given: str) -> str:
    """What `gradus predict` says of it: the three likeliest labels."""
    return line_of(next(records_of(source, [given], 3))).partition("  ←")[0]


def shortened(ids: list[int], tokenizer: Tokenizer | None = None, longest: int | None = None) -> list[int]:
    """At most TOKENS of them, and as many as the model can read, an end token among these."""
    most = min(TOKENS, longest or TOKENS)
    if len(ids) <= most:
        return ids
    ends = tokenizer is not None and ids[-1] in (tokenizer.sep_id, tokenizer.eos_id)
    return [*ids[: most - 1], ids[-1]] if ends else ids[:most]


def label(tokenizer: Tokenizer, i: int) -> str:
    """A token as it can be seen: ␣ for a space, ⏎ for a line end."""
    marks = {" ": "␣", "▁": "␣", "Ġ": "␣", "\n": "⏎", "Ċ": "⏎"}
    text = "".join(marks.get(c, c if c.isprintable() else "·") for c in tokenizer.token(i))
    return text if len(text) <= 14 else f"{text[:13]}…"


def look_at_ids(source: ModelSource, read: Side, written: Side | None) -> Seen:
    """written: what the decoder of an encoder-decoder reads, which it wrote itself."""
    model, sides = source.load(), [read, *([written] if written else [])]
    device = next(model.parameters()).device
    call = partial(model if written else model.hidden, *(torch.tensor([side.ids], device=device) for side in sides))
    seen, paths = observe(source, model, call), source.family.tokens
    seen.texts = [[side.name(i) for i in side.ids] for side in sides]
    if read.whole > len(read.ids):
        n, of = len(read.ids), f"the text's {read.whole:,} tokens"
        seen.cut = f"Only the first {n} of {of} are read, so that they can be drawn."
        note(seen.cut)
    for i, path in enumerate(paths):
        side = sides[min(i, len(sides) - 1)]
        ids = side.ids if len(paths) > 1 else [i for side in sides for i in side.ids]
        table = model.get_submodule(path).weight.detach()[: side.n_words]
        words = [i for i in dict.fromkeys(ids) if i < len(table)]  # a vocabulary is often padded
        seen.nearest[path] = nearest(table, words, side.name)
    return seen


def nearest(table: Tensor, ids: list[int], name: Callable[[int], str]) -> list[list[str]]:
    """For each token its name, and the rows of the table (vocab, d_model) that are nearest to its own by cosine."""
    unit = nn.functional.normalize(table.float(), dim=-1)
    alike = unit[ids] @ unit.T  # (len(ids), vocab)
    alike[range(len(ids)), ids] = -2  # itself
    values, rows = (best.tolist() for best in alike.topk(min(NEAREST, len(table) - 1)))
    return [[name(i), *(f"{name(j)} ({v:.2f})" for v, j in zip(*best))] for i, *best in zip(ids, values, rows)]


# ---------------------------------------------------------------- what is seen


@torch.no_grad()
def observe(source: ModelSource, model: nn.Module, call: Callable[[], Any]) -> Seen:
    """Attention and positions while `call` runs the model on one input. Raises NotFinite."""
    weights: dict[str, Tensor] = {}
    given: dict[str, dict[str, Any]] = {}
    tables: dict[str, Tensor] = {}

    def attends(name: str, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        given[name] = by_name(module.forward, args, kwargs)

    def looks_up(name: str, module: nn.Embedding, args: tuple) -> None:
        if (ids := args[0].flatten().tolist()) == list(range(len(ids))) and len(ids) > 1:
            tables[name] = module.weight.detach()

    with contextlib.ExitStack() as hooks, observe_attention(model, weights.__setitem__):
        for name, module in model.named_modules():
            if isinstance(module, Attention):
                hooks.callback(module.register_forward_pre_hook(partial(attends, name), with_kwargs=True).remove)
            elif isinstance(module, nn.Embedding) and name not in source.family.tokens:
                hooks.callback(module.register_forward_pre_hook(partial(looks_up, name)).remove)
        out = call()
    if not finite(out):
        raise Torch(source).not_finite(lambda _: call())
    if not weights:
        raise UserError(f"{source.name}: it has no gradus.layers.Attention, so there is nothing to see.")
    layers = [layer_of(source, name, seen[0].float().cpu(), given[name]) for name, seen in weights.items()]
    n = layers[0].weights.shape[-1] if source.config.reads == "images" else source.config.longest
    tables |= dict(added_tables(model, (n, source.config.d_model)))
    biases: dict[str, Tensor] = {}
    for layer, name in zip(layers, weights):
        if (bias := given[name].get("bias")) is not None:
            biases.setdefault(layer.kind, bias[0].float().cpu())
    turns = next((g["rotary"] for g in given.values() if g.get("rotary") is not None), ())
    about = f"{sum(p.numel() for p in model.parameters()):,} parameters, d_model {source.config.d_model}"
    return Seen(
        source.name, about, layers, {name: table.float().cpu() for name, table in tables.items()}, biases,
        tuple(t.flatten(0, -3)[0].float().cpu() for t in turns),
    )  # fmt: skip


def layer_of(source: ModelSource, name: str, weights: Tensor, given: dict[str, Any]) -> Layer:
    for i, stack in enumerate(source.family.stacks):
        if name.startswith(f"{stack.blocks}."):
            side = "Decoder" if source.family.attention == "causal" or i else "Encoder"
            cross = given.get("context") is not None
            kind = "Cross attention: decoder to encoder" if cross else f"{side}: self-attention"
            number = int(name.removeprefix(f"{stack.blocks}.").split(".")[0]) + 1
            return Layer(kind, number, weights, bool(given.get("causal")), (i, 0) if cross else (i, i))
    return Layer(f"Attention outside the layers: {name}", 1, weights, bool(given.get("causal")), (0, 0))


def added_tables(model: nn.Module, shape: tuple[int | None, int]) -> Iterator[tuple[str, Tensor]]:
    """Tensors of modules that are not PyTorch's own with a row for each position, each once."""
    known: list[Tensor] = []
    for name, module in model.named_modules():
        if type(module).__module__.startswith("torch."):
            continue
        stored = dict(module.named_parameters(recurse=False)) | dict(module.named_buffers(recurse=False))
        for key, value in {**vars(module), **stored}.items():
            if isinstance(value, Tensor) and value.shape in (shape, (1, *shape)):
                table = value.detach().view(shape)
                if not any(torch.equal(table, t) for t in known):
                    known.append(table)
                    yield f"{name}.{key}".strip("."), table
