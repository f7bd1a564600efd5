"""Runners of the studies beside this file: FUNCTION(recipe, options) → timing.Subject.

writing: a step is a text that a decoder writes, with the cache of keys and values or without. forward: a step is a pass through an encoder in any
engine, as a configuration of `gradus bench`. Models of the recipe's shape have random weights (seed 0) and are kept in $GRADUS_CACHE/experiments.
in_jax: a step of a ViT's training by JAX.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import runpy
import shlex
import statistics
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from gradus import files, hardware, models
from gradus.errors import UserError, need
from gradus.infer import engines, find, predict, quantized, sidecar
from gradus.measure.profile import endless
from gradus.models.decoding import generate
from gradus.parallel.processes import run_program
from gradus.plan.serving import BYTES, serving, usage_of
from gradus.proof.engine_runner import engine_subject
from gradus.proof.timing import Subject, Timed, Window
from gradus.recipe.schema import ModelConfig, Recipe
from gradus.train.session import open_session


def kept(*what: Any) -> Path:
    """The folder of the cache that belongs to this description."""
    to = files.cache_dir() / "experiments" / hashlib.sha256(json.dumps(what, sort_keys=True, default=str).encode()).hexdigest()[:16]
    to.parent.mkdir(parents=True, exist_ok=True)
    return to


def shape(config: ModelConfig) -> Path:
    """A model of this shape with random weights, written once."""
    to = kept(config.model_dump())
    if not to.is_dir():
        with files.aside(to) as aside:
            models.save(models.build(config, seed=0), aside)
    return to


def given(recipe: Recipe) -> list[str]:
    """What a run is evaluated with: the data, as many of them, and these threads, not those that it was trained with."""
    settings = {"data.path": recipe.data.path, "data.limit_valid": recipe.data.limit_valid, "layout.threads": recipe.layout.threads}
    return [f"{key}={value}" for key, value in settings.items() if value]


def metrics(run: str, recipe: Recipe, split: str, *checkpoint: str, **how: str) -> dict[str, list[Any]]:
    """A run's metrics over a whole split, by the code of `gradus evaluate`; how: engine and precision."""
    found = predict.evaluate(run, [*given(recipe), "layout.precision=fp32"], split, *checkpoint, **how)
    return {name: [float(value), ""] for name, value in found.items()}


# ------------------------------------------------------------ with the cache and without


def writing(recipe: Recipe, options: dict[str, Any]) -> Subject:
    """options: new (tokens, after a prompt of one), cache (true, or false), engine, precision; run: a run's model, with the metrics of split (test),
    instead of random weights, and quantized: how (its precision is then that of the folder). A sample is a token."""
    new, cached, precision = options["new"], options.get("cache", True), options.get("precision", "fp32")
    run, how, name = options.get("run"), options.get("quantized"), options.get("engine", "torch")
    plain = models.locate(run) if run else shape(recipe.model)
    at = made(run, given(recipe), plain, how) if how else plain
    source = find(str(at))
    precision = source.export_info["precision"] if how else precision
    engine, seen, texts = engines.open(source, name, precision), [0], [[]]

    def write(n: int) -> list[int]:
        return [int(token) for token in itertools.islice(generate(engine, [[1]], max_new=new, cache=cached), n)]

    def step(_: None) -> None:
        texts[0] = write(new)
        seen[0] += new

    def finish(timed: Timed, window: Window) -> None:
        equal = statistics.mean(a == b for a, b in zip(texts[0], greedy(plain, new), strict=True))
        timed.values |= {"time/first_call": [first, "s"], "same_tokens": [equal, ""], "size/weights": [engine.weight_bytes(), "bytes"]}
        timed.planned |= planned(engine.config, new, cached, precision)
        if run and window.round == 1:
            timed.values |= metrics(run, recipe, options.get("split", "test"), str(at), engine=name, precision=precision)
        if cached and hasattr(engine, "cache") and precision in BYTES:
            held = sum(part.nbytes for layer in engine.cache.layers for part in (layer.k, layer.v))
            timed.values["memory/cache"] = [held, "bytes"]
            timed.planned["memory/cache"] = [usage_of(engine.config, 1, new).own * BYTES[precision], "bytes"]

    began = time.perf_counter()
    write(min(3, new))  # compiles, where the engine does
    first = time.perf_counter() - began
    agree = lambda disturbed: disturbed and cached  # noqa: E731  # a text without the cache takes too long to be taken again
    return Subject(lambda: None, step, lambda: seen[0], memory=dict, agree=agree, facts={"computes": engine.computes}, finish=finish)


def greedy(at: Path, new: int) -> list[int]:
    """The tokens of PyTorch in fp32 with the cache, computed once."""
    file = kept("greedy", engines.cache_key(find(str(at))), new)
    if not file.is_file():
        files.write_json(file, [int(token) for token in generate(models.load(at).eval(), [[1]], max_new=new)])
    return json.loads(file.read_text())


def planned(config: ModelConfig, new: int, cached: bool, precision: str) -> dict[str, list[Any]]:
    """The lower bound of `gradus plan --serve` for the whole text, from 16 of its lengths; nothing where the machine is not calibrated."""
    try:
        on = hardware.cluster("this")
        lengths = sorted({round(1 + i * (new - 1) / 15) for i in range(16)})
        found = [{row.name: row.value for row in serving(config, seq_len=n, precision=precision, on=on)} for n in lengths]
        token = statistics.mean(rows["serving/decode_time" if cached else "serving/prefill_time"] for rows in found)
    except (UserError, KeyError):  # not calibrated, a peak that is not known, a model that does not fit
        return {}
    return {"time/step": [new * token, "s"], "samples_per_s": [1 / token, "samples/s"]}


# ------------------------------------------------------------ a pass in any engine


def forward(recipe: Recipe, options: dict[str, Any]) -> Subject:
    """options: batch, length, engine, precision; or instead of these two quantized: dynamic, static, qat or int4; accuracy (true, or false).

    Of the run that model.init names, with the metrics of its whole valid split by the code of `gradus evaluate`; qat: of the run beside it whose
    name ends in -qat. Without model.init of the recipe's shape."""
    run, how, name, precision = recipe.model.init, options.get("quantized"), options.get("engine", "torch"), options.get("precision", "fp32")
    engines.installed(engines.kind(name))
    run = f"{run}-qat" if run and how == "qat" else run
    at = models.locate(run) if run else shape(recipe.model)
    if how:
        at = made(run, given(recipe), at, how)
        precision = find(str(at)).export_info["precision"]
    cell = {"model": str(at), "engine": name, "precision": precision, "new": None, "check": not how and options["batch"] == 1, "accuracy": 0, "asked": False, **options}
    subject = engine_subject(None, {**cell, "precision": precision})

    def finish(timed: Timed, window: Window) -> None:
        bench_finish(timed, window)
        if not (run and window.round == 1 and options.get("accuracy", True)):
            return
        if how:
            table = json.loads((at / quantized.FILE).read_text())["table"]
            timed.values |= {name: [after, ""] for name, (_, after) in ((n, p) for n, p in table.items() if n.startswith("valid/"))}
            timed.values["points_lost"] = [table["difference"][0], ""]
            timed.facts["paired"] = table["difference"]
        else:
            timed.values |= metrics(run, recipe, "valid", engine=name, precision=precision)

    bench_finish, subject.finish = subject.finish, finish
    return subject


def made(run: str | None, words: list[str], at: Path, how: str) -> Path:
    """The quantized model, made once: of a run by `gradus quantize --force`, which sets it beside the run; of random weights with ranges of inputs
    that are made up, since time does not depend on them."""
    to, kind = kept(how, engines.cache_key(find(str(at)))), "static" if how == "qat" else how
    if to.is_dir():
        return to
    if run is None:
        model = models.load(at).eval()
        with sidecar.folder(to) as folder:
            about = quantized.write(folder, model, kind, {name: [-4.0, 4.0] for name in quantized.linears(model)})
            files.write_json(folder / quantized.FILE, about | {"told": "random weights, not checked"})
        return to
    if how == "qat" and not (at / "qat.json").is_file():
        raise UserError(f"{run}: no run with train.qat=true.")
    asked = ["quantize", run, *words, "--as", kind, "--to", str(to), "--force"]
    if code := run_program([sys.executable, "-m", "gradus", *asked])[0]:  # in a process of its own: its memory is not the engine's
        raise UserError(f"gradus {shlex.join(asked)} ended with code {code}. What it printed last says why.")
    return to


# ------------------------------------------------------------ a step by JAX


def in_jax(recipe: Recipe, options: dict[str, Any]) -> Subject:
    """options: jit (true, or false: one operation after the other), devices (virtual ones, which share each batch).

    Steps of vit_jax.py on the recipe's batches, from the weights that its run begins with. check/logits: of a batch, by the weights trained here,
    what Gradus's model says against what JAX's does, as a share of the largest. Raises UserError for a recipe whose step is another."""
    check_plain(recipe)
    check_shared(recipe.batch.samples or 0, n := options.get("devices", 1))
    jax, optax = (need(package, "jax", "experiments/vit_jax.py") for package in ("jax", "optax"))
    written = SimpleNamespace(**runpy.run_path(str(Path(__file__).with_name("vit_jax.py"))))
    os.environ["PJRT_NPROC"] = str(torch.get_num_threads())  # the threads of XLA's pool, which has one for each device at least:
    if hasattr(os, "sched_setaffinity"):  # so many processors for all of them
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: torch.get_num_threads()])
    if n > 1:
        jax.config.update("jax_num_cpu_devices", n)
    mesh = jax.sharding.Mesh(jax.devices("cpu")[:n], ("data",))
    whole, shared = (jax.NamedSharding(mesh, jax.P(*axes)) for axes in ((), ("data",)))
    session, folder = open_session(recipe), tempfile.TemporaryDirectory()
    models.save(session.build(), folder.name)
    params, config = written.load(Path(folder.name))
    optimizer = optax.sgd(recipe.optimizer.lr, recipe.optimizer.momentum)
    params, state = jax.device_put((params, optimizer.init(params)), whole)
    step, logits = written.step_of(config, optimizer), lambda *given: written.vit(*given, config)
    if options.get("jit", True):
        step, logits = jax.jit(step, donate_argnums=(0, 1)), jax.jit(logits)
    source, seen = endless(session.loader), 0

    def batch() -> list[Any]:
        nonlocal seen
        found = next(source)
        seen += found.samples
        check_shared(found.samples, n)
        given = session.task.to_device(found.micro_batches[0], session.device)
        return jax.device_put([given[k].numpy() for k in ("images", "labels")], shared)

    def take(given: list[Any]) -> float:
        nonlocal params, state
        params, state, loss = jax.block_until_ready(step(params, state, *given))
        return float(loss)

    def finish(timed: Timed, window: Window) -> None:
        images = batch()[0]
        written.save(params, Path(folder.name))
        with torch.no_grad():
            wanted = models.load(folder.name).eval()(torch.tensor(jax.device_get(images))).numpy()
        timed.values["check/logits"] = [float(abs(jax.device_get(logits(params, images)) - wanted).max() / abs(wanted).max()), ""]

    facts = {"precision": "fp32", "devices": n, "loss_unit": session.task.loss_unit, "jax": jax.__version__, "optax": optax.__version__}
    return Subject(batch, take, lambda: seen, memory=dict, facts=facts, finish=finish)


def check_shared(samples: int, devices: int) -> None:
    """Raises UserError for a batch, or the last one of an epoch, that cannot be split evenly."""
    if samples % devices:
        raise UserError(f"{devices} devices cannot share a batch of {samples}. Set batch.samples to a multiple of {devices}, data.limit to one of that.")


def check_plain(recipe: Recipe) -> None:
    """Raises UserError for what vit_jax.py's step would leave out."""
    r = recipe
    wanted = {"optimizer.name": (r.optimizer.name, "sgd"), "schedule.name": (r.schedule.name, "constant"), "schedule.warmup_steps": (r.schedule.warmup_steps, 0),
              "train.clip_norm": (r.train.clip_norm, None), "train.freeze": (bool(r.train.freeze), False), "train.qat": (r.train.qat, False), "adapter": (r.adapter, None),
              "task.label_smoothing": (r.task.label_smoothing, 0), "data.mixup": (r.data.mixup, 0), "data.cutmix": (r.data.cutmix, 0),
              "model.pool": (r.model.pool, "class_token"), "model.dropout": (r.model.dropout, 0), "layout.precision": (r.layout.precision, "fp32"),
              "model.patches": (r.model.patches, "convolution"), "layout.micro_batch": (r.layout.micro_batch, None),
              "layout.compile": (r.layout.compile, "none"), "layout.checkpointing": (r.layout.checkpointing, "none")}  # fmt: skip
    wrong = [f"{key}={right}" for key, (value, right) in wanted.items() if value != right]
    if wrong:
        raise UserError(f"the step in vit_jax.py is a plain one of SGD in fp32. Set {' '.join(wrong).replace('None', 'null')}.")
