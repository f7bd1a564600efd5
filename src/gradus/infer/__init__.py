"""Find a model with its configuration, recipe and tokenizers, load it, and encode texts for it."""

from __future__ import annotations

import dataclasses
import re
import sys
from pathlib import Path
from typing import Any

from torch import nn

from gradus import models
from gradus import recipe as recipes
from gradus.data import tokenizer_files
from gradus.data.cache import identity
from gradus.data.tokenizers import Tokenizer
from gradus.errors import InputError, UserError
from gradus.limits import CONFIG_FILE, TOKEN, read_json, read_object
from gradus.models.decoding import Encoded
from gradus.models.finite import not_finite, weights_not_finite
from gradus.models.weights import checksums, peft
from gradus.parallel.device import pick_device
from gradus.parallel.precision import Precision
from gradus.recipe.schema import ModelConfig, Recipe
from gradus.tasks import GENERATION
from gradus.tasks.sources import in_documents
from gradus.text import say

PUT_TOKENIZER = "Put one beside the weights; gradus generate and gradus look also take --tokenizer PATH."
EXPORTED, QUANTIZED = "export.json", "quantized.json"  # in folders that are made for engines
# keys of an older config.json that change answers in transformers
UNAPPLIED = re.compile(
    "penalty|ngram|do_sample|temperature|^top_[kp]|^min_|typical|beams|forced_bos|words_ids|suppress|sequence_bias"
)
# keys of generation_config.json that do not, or that are read elsewhere; those that change answers are all others
HARMLESS = re.compile(
    "^_|^(bos|eos|pad|decoder_start)_token_id$|^max_|version|cache|^output_|^return_|assistant|num_return|compile|"
    "trust_remote|^early_stopping$|^length_penalty$|renormalize|^(chat_format|eos_token|pad_token|transformers)"
)


@dataclasses.dataclass
class ModelSource:
    """The model that a name on the command line means: where its weights are, and what is known before reading them."""

    name: str
    path: Path  # a checkpoint, a folder in Hugging Face's or Meta's layout, or llama2.c's .bin
    config: ModelConfig
    recipe: Recipe | None  # of the run that it belongs to, in the folder `run`
    export_info: dict[str, Any] | None = None  # of a folder for engines: what `read_export_info` reads
    model: nn.Module | None = None  # once it is loaded
    engine: str | None = None  # what runs it, and in which precision: of --engine and --precision
    precision: str | None = None
    run: Path | None = None
    _read: dict[str, Tokenizer] | None = None

    @property
    def family(self) -> models.Family:
        return models.lookup(self.config.family)

    @property
    def folder(self) -> Path:
        return self.path if self.path.is_dir() else self.path.parent

    def weights(self) -> list[Path]:
        """The files that hold its weights, of an adapter its base's too; none of the state of its training."""
        if self.export_info:
            return sorted(self.folder.glob("*.safetensors"))
        return [file for path in self.places for file in models.weight_files(path)]

    @property
    def places(self) -> list[Path]:
        """Where its weights are: of an adapter its base's place too."""
        return [self.path, *([models.locate(self.config.init)] if self.config.init else [])]

    def beside(self, *names: str) -> list[Path]:
        """Those files that lie beside its weights; of an adapter each may lie beside its base's instead."""
        folders = [place for place in self.places if place.is_dir()]
        paths = (next((folder / name for folder in folders if (folder / name).is_file()), None) for name in names)
        return [path for path in paths if path]

    @property
    def settings(self) -> dict[Path, dict[str, Any]]:
        """What generation_config.json and config.json beside its weights hold."""
        return {file: read_object(file) for file in self.beside(GENERATION, "config.json")}

    def content(self) -> list[str]:
        """Hashes of all that it computes with."""
        about = (place / name for place in self.places for name in (peft.CONFIG, peft.OURS, "config.json"))
        paths = [*self.weights(), *(file for file in about if file.is_file())]
        return [identity(file) for file in ([self.folder / checksums.FILE] if self.export_info else paths)]

    def tokenizers(self, path: str | None = None) -> dict[str, Tokenizer]:
        """By side: "", and "target" where the target language has its own. path: replaces the tokenizer beside the
        weights.

        Read once. Raises UserError where there is none, or one that does not fit the model.
        """
        if self._read is not None and path is None:
            return self._read
        if path is not None:
            tokenizers = {"": tokenizer_files.load(path)}
        else:
            folder = next((file.parent for file in self.beside(*tokenizer_files.FILES)), self.folder)
            try:
                tokenizers = {"": tokenizer_files.load(folder)}
            except UserError as e:
                raise UserError(f"{e} {PUT_TOKENIZER}") from None
            if (folder / "target").is_dir():
                tokenizers["target"] = tokenizer_files.load(folder / "target")
        for side, tokenizer in tokenizers.items():
            size = getattr(self.config, "target_vocab_size", None) if side else self.config.vocab_size
            if (n := tokenizer.vocab_size) > (size := size or self.config.vocab_size):
                both = f"{path or self.folder / side}: this tokenizer has {n} tokens and the model {size}"
                own = "Leave --tokenizer out." if path else "gradus generate takes another: --tokenizer PATH."
                raise UserError(f"{both}: they do not belong together. {own}")
        self._read = tokenizers
        return tokenizers

    def load(self, precision: str = "fp32") -> nn.Module:
        """The model with its weights, in evaluation mode, on the accelerator if there is one. It is read once; the
        first call sets its precision (fp32, bf16 or fp16, of the weights too).

        Raises UserError for a folder of graphs, of weights that are quantized to something else, and for int8 and int4
        of any other; NotFinite for weights that are not finite.
        """
        if not self.export_info and precision not in ("fp32", "bf16", "fp16"):
            how = f"gradus quantize {self.name} writes a folder that has it"
            raise UserError(f"precision={precision!r:.40}: {self.name} has fp32, bf16 and fp16. {how}.")
        if self.model is None and self.export_info:
            from gradus.infer import quantized

            self.model = quantized.load(self, precision)
        if self.model is None:
            device = pick_device("auto")
            numbers = Precision(f"pure_{precision}" if precision != "fp32" else precision, device)
            self.model = models.load_plain(self.path, dtype=numbers.dtype, device=device)
            with_finite_weights(self, self.model)
        return self.model.eval()


def with_finite_weights(source: ModelSource, model: nn.Module) -> None:
    """Raises NotFinite for weights that are not finite: attention of several kernels gives finite outputs of them."""
    if where := weights_not_finite(model.named_parameters()):
        raise not_finite(source.name, source.path, where)


def find(name: str) -> ModelSource:
    """A run folder (its best checkpoint), a checkpoint, a folder in Hugging Face's or Meta's layout, llama2.c's .bin,
    or a hub name.

    Raises UserError where there is no model, and for a folder for engines that is not as it was written.
    """
    path = models.locate(name)
    export_info = read_export_info(path)
    folder = path.absolute().parent
    run = folder.parent if folder.name == "checkpoints" and (folder.parent / "recipe.yaml").is_file() else None
    config = models.config_of(path).trained(None)  # an adapter is merged
    return ModelSource(name, path, config, run and recipes.load(run, configure=None), export_info, run=run)


def sources(
    name: str, adapters: list[str] | None, engine: str | None = None, precision: str | None = None
) -> list[ModelSource]:
    """The model of that name, or for each of its adapters (folders) that model with it: they share the weights.

    Raises UserError as `find`, for an adapter of another base, and for an engine that has weights of its own."""
    if not adapters:
        return [dataclasses.replace(find(name), engine=engine, precision=precision)]
    engine, precision = engine or "torch", precision or "fp32"
    if (engine, precision) != ("torch", "fp32"):
        what = f"--engine {engine} --precision {precision}"
        raise UserError(f"--adapter: {what} has no weights to share. Give the adapter's folder as the model.")
    base = find(name)
    model, digest = base.load(), models.digest(base.path)
    out = [find(adapter) for adapter in adapters]
    for source in out:
        of = source.config.init
        if of is None or models.digest(models.locate(of)) != digest:
            whose = f"an adapter of {of}, not of {name}" if of else "not an adapter"
            raise UserError(f"--adapter {source.name}: {whose}. Give an adapter of {name}.")
        source.model = models.beside(model, source.path)
        with_finite_weights(source, source.model)
    return out


KEYS = {EXPORTED: {"format", "precision", "graphs", "told"}, QUANTIZED: {"as", "precision", "computes", "told"}}


def read_export_info(folder: Path) -> dict[str, Any] | None:
    """What a folder that `gradus export` or `quantize` wrote for engines says of itself; None for any other. Reads all
    of its files, about a second per GB.

    Raises UserError where one is not as it was when the folder was checked.
    """
    file = next((name for name in KEYS if (folder / name).is_file()), None)
    if file is None:
        return None
    problem = checksums.damage(folder, needs=file, listed=checksums.names(folder))
    export_info = None if problem else read_json(folder / file, CONFIG_FILE)
    if not problem and not (isinstance(export_info, dict) and export_info.keys() >= KEYS[file]):
        problem = f"{file} has another version"
    if problem:
        mend = f"Copy it again, or make it again with gradus {'export' if file == EXPORTED else 'quantize'}"
        raise UserError(f"{folder}: {problem}, so it cannot be verified. {mend}.")
    return export_info


def note(text: str) -> None:
    """Print a note for the user to standard error, where no program reads it."""
    say(f"note: {text}", sys.stderr)


def special(tokenizer: Tokenizer, *roles: str) -> int | None:
    """The id of the first of these roles (bos, eos, cls ...) that the tokenizer has."""
    ids: list[Any] = [getattr(tokenizer, f"{role}_id") for role in roles]
    return next((i for i in ids if i is not None), None)


def end_tokens(source: ModelSource, tokenizer: Tokenizer) -> list[int]:
    """The tokens that end a text: those of generation_config.json, else of a published config.json, else the
    tokenizer's. Raises UserError for ids that the model does not have."""
    usual = special(tokenizer, "bos" if source.path.is_file() else "eos", "sep")  # of llama2.c: the next one's begin
    n = getattr(source.config, "target_vocab_size", None) or source.config.vocab_size
    for file, asked in source.settings.items():
        configured = asked.get("eos_token_id") if file.name == GENERATION or source.recipe is None else None
        ends = [i for i in (configured if isinstance(configured, list) else [configured]) if i is not None]
        if not all(type(i) is int and 0 <= i < n for i in ends):
            said = f"eos_token_id: expected an id below {n:,} or a list of them, got {configured!r:.60}"
            raise UserError(f"{file}: {said}.")
        if ends:
            return ends
    return [i for i in [usual] if i is not None]


def decoder_start(source: ModelSource, tokenizer: Tokenizer) -> int | None:
    """The token that an encoder-decoder's answer starts with; None: the tokenizer has none."""
    if source.family.decoder_start == "padding":
        return special(tokenizer, "pad") or 0
    return special(tokenizer, "bos", "cls", "pad")


def repetition_penalty(source: ModelSource, applied: bool = True) -> float:
    """That of generation_config.json, else of a published config.json; 1 is none. A note tells of it, and of settings
    there that transformers applies and Gradus does not. applied: False where it is one of these. Raises UserError for
    one that is no positive number."""
    penalty = None
    for file, asked in source.settings.items():
        own = asked.pop("repetition_penalty", None) if applied else 1
        penalty = penalty or own
        if penalty is not None and (type(penalty) not in (int, float) or penalty <= 0):
            raise UserError(f"{file}: repetition_penalty={penalty!r:.40}: must be a positive number.")
        answers = UNAPPLIED.search if file.name != GENERATION else lambda key: not HARMLESS.search(key)
        unapplied = [(key, value) for key, value in asked.items() if answers(key)]
        if told := [f"{key}={v!s:.40}" for key, v in unapplied if v is True or v not in (None, 0, 1, [])]:
            note(f"{file}: not applied: {', '.join(told)}. gradus generate --help lists what can be set")
    if (penalty or 1) != 1:
        note(f"repetition_penalty={penalty} is applied, which the files beside the weights ask for")
    return penalty or 1


def encode(source: ModelSource, tokenizers: dict[str, Tokenizer], texts: list[str], fit: bool = True) -> Encoded:
    """Texts as a generating model reads them. fit=False: they may be longer than the model.

    Around a text stands what the tokenizer's files put there; around running text that a recipe trained on from new
    weights there was nothing. An empty text starts with the token that preceded texts in training: the end token after
    documents, else a line end. A task's sources end with the end token where the tokenizer's files say nothing.
    Raises InputError for an empty text where there is nothing to start with, and for one longer than the model.
    """
    tokenizer, config, recipe, family = tokenizers[""], source.config, source.recipe, source.family
    target = tokenizers.get("target", tokenizer)
    readable(texts, config.longest if fit else None)
    rows = tokenizer.encode_batch(texts)
    ends = end_tokens(source, target)
    if family.attention == "cross":
        if not all(rows):
            raise InputError(f"an empty text: {config.family} needs one to read. Give it after the model's name.")
        if recipe is not None:
            tokenizer.around(None, special(tokenizer, "eos", "sep"))
        sources = [tokenizer.with_special_tokens(row) for row in rows]
        if fit:
            fits(texts, sources, config.longest)
        start = decoder_start(source, target)
        if start is None:
            own = "Use the model's own (gradus generate: --tokenizer PATH)."
            raise UserError(f"the tokenizer has no begin token. {own}")
        for file, asked in source.settings.items() if recipe is None else ():
            other = asked.get("decoder_start_token_id", start) if file.name == GENERATION else None
            if other not in (start, None):
                raise UserError(f"{file}: decoder_start_token_id={other!s:.40}: Gradus starts an answer with {start}.")
        return Encoded([[start]] * len(rows), sources, ends)

    documents = recipe is None or in_documents(recipe)
    if documents:
        rows = [tokenizer.with_special_tokens(row) for row in rows]
    if not all(rows):
        first = special(tokenizer, "eos" if recipe is not None else "bos", "bos", "eos") if documents else None
        begin = tokenizer.encode("\n") if first is None else [first]
        if not begin:
            raise InputError("an empty prompt, and the tokenizer has no begin token. Give one after the model's name.")
        rows = [row or begin[-1:] for row in rows]
    if fit:
        fits(texts, rows, config.longest)
    return Encoded(rows, None, ends)


def readable(texts: list[str], longest: int | None) -> None:
    """Raises InputError for a text that is too long before it is encoded, which takes time and 150 bytes per character.
    longest: tokens (None: 65,536)."""
    longest = longest or 1 << 16
    for number, text in enumerate(texts, 1):
        if len(text) > TOKEN * longest:
            what = f"{len(text):,} characters, more than fit into {longest:,} tokens (at most {TOKEN} each)"
            raise InputError(f"text {number} ({text[:30] + '…'!r}) has {what}. Give a shorter one.")


def fits(texts: list[str], rows: list[list[int]], longest: int | None) -> None:
    for number, (text, row) in enumerate(zip(texts, rows), 1):
        if longest is not None and len(row) > longest:
            start = f"text {number} ({text if len(text) <= 30 else text[:30] + '…'!r})"
            raise InputError(f"{start} has {len(row):,} tokens, more than the {longest:,} that the model can read.")
