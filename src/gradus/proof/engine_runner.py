"""A model in one engine and precision, timed in a process of its own: the runner of `gradus bench`."""

from __future__ import annotations

import dataclasses
import statistics
import time
from typing import Any

import torch

from gradus import limits
from gradus.errors import UserError
from gradus.infer import Encoded, engines, exported, find, predict
from gradus.infer.checked import compare
from gradus.infer.graphs import DTYPES
from gradus.measure import roofs
from gradus.measure.energy import Meter
from gradus.models.decoding import generate
from gradus.models.finite import finite
from gradus.proof.timing import Subject, Timed, Window

ENERGY_RUNS = 3
Inputs = Encoded | dict[str, torch.Tensor]


class EngineRuns:
    """Runs of a model in an engine: a forward pass over other random inputs each time, or the reading of a prompt and
    the greedy writing of `new` tokens, however the text ends.

    options: model (a path), engine, precision, batch, length (None: images), new (None: nothing is written), check
    (against PyTorch in fp32), accuracy (samples of the valid split; 0: not measured), asked (the user wants it).
    """

    def __init__(self, options: dict[str, Any]):
        self.options, self.batch, self.length, self.new = options, options["batch"], options["length"], options["new"]
        self.source, self.generator = find(options["model"]), torch.Generator().manual_seed(0)
        name, precision = options["engine"], options["precision"]
        kind = engines.kind(name)
        if issubclass(kind, exported.GraphEngine):
            exported.cached_folder(self.source, kind, precision)  # exports once: no part of the time of loading
        began = time.perf_counter()
        self.engine = engines.open(self.source, name, precision)
        self.load_seconds, self.samples = time.perf_counter() - began, 0
        self.raw: dict[str, list[float]] = {"latency": []}  # of each run
        self.raw |= {"first_token": []} if self.new else {}

    def inputs(self, batch: int | None = None) -> Inputs:
        """Random ones; batch: samples (None: as the options say)."""
        config, batch = self.source.config, batch or self.batch
        if config.reads == "images":
            shape = (batch, config.n_channels, config.image_size, config.image_size)
            return {"images": torch.randn(shape, generator=self.generator).to(self.engine.device)}
        ids = torch.randint(config.vocab_size, (batch, self.length), generator=self.generator)
        if not self.new:
            return {"ids": ids.to(self.engine.device)}
        if self.source.family.attention == "cross":
            return Encoded([[0]] * batch, ids.tolist(), None)
        return Encoded(ids.tolist(), None, None)

    @torch.no_grad()
    def step(self, inputs: Inputs) -> None:
        began = time.perf_counter()
        if isinstance(inputs, Encoded):
            tokens = generate(self.engine, inputs.prompts, max_new=self.new, sources=inputs.sources)
            next(tokens)
            self.raw["first_token"].append(time.perf_counter() - began)
            for _ in tokens:
                pass
        else:
            out = self.engine(**inputs)
            if self.engine.device.type != "cpu":
                torch.accelerator.synchronize()
        self.raw["latency"].append(time.perf_counter() - began)
        if not (self.samples or self.new or finite(out)):
            raise self.engine.not_finite(lambda model: model(**inputs))
        self.samples += self.batch

    @torch.no_grad()
    def finish(self, timed: Timed, window: Window) -> None:
        """Adds to the timed runs, after the process's peak was read: roofs, energy, the check, accuracy."""
        device, computes = self.engine.device, self.engine.computes
        timed.raw = {name: values[-len(timed.spent) :] for name, values in self.raw.items()}
        half = DTYPES.get(computes[:4], torch.float32)
        latency = statistics.median(timed.raw["latency"])  # without the making of inputs
        product_rate = max(roofs.product_rate(device, dtype) for dtype in {torch.float32, half})
        timed.values = {
            "samples_per_s": [self.batch / latency, "samples/s"],
            "time/step": [latency, "s"],
            "time/load": [self.load_seconds, "s"],
            "size/weights": [self.engine.weight_bytes(), "bytes"],
            "roof/bandwidth": [roofs.bandwidth(device), "bytes/s"],
            "roof/rate": [product_rate, "FLOP/s"],
        }
        timed.facts |= {"computes": computes, "cache_bytes": roofs.last_cache() if device.type == "cpu" else 0}
        self.measure_energy(timed)
        exported_before = bool(self.source.export_info)  # an export's check is kept with it
        if window.round == 1 and self.options["check"] and not exported_before:
            self.check(timed)
        if window.round == 1 and self.options["accuracy"]:
            self.measure_accuracy(timed)

    def measure_energy(self, timed: Timed) -> None:
        with Meter(self.engine.device) as meter:
            for _ in range(ENERGY_RUNS if meter.source else 0):
                self.step(self.inputs())
        if meter.joules:
            timed.values["energy/sample"] = [meter.joules / ENERGY_RUNS / self.batch, "J"]
            timed.facts["meter"] = meter.source

    def check(self, timed: Timed) -> None:
        """Outputs against PyTorch's in fp32."""
        reference = engines.Torch(dataclasses.replace(self.source, model=None), "fp32")
        inputs = self.inputs(2)
        rows = compare(self.engine, reference, inputs if isinstance(inputs, Encoded) else [inputs])
        timed.values |= {row.name: [row.value, ""] for row in rows if row.name != "check/computes"}

    def measure_accuracy(self, timed: Timed) -> None:
        """Metrics over the run's valid split, by the code of gradus evaluate."""
        options, limit = self.options, self.options["accuracy"]
        run_folder = str(self.source.path.parent.parent)
        words = ["layout.precision=fp32"]  # the engine does the rest
        words += [f"data.limit_valid={limit}"] if limit < limits.SAMPLES else []
        how = {"engine": options["engine"], "precision": options["precision"]}
        try:
            metrics = predict.evaluate(run_folder, words, "valid", options["model"], **how)
        except UserError as e:
            if options["asked"]:
                raise
            timed.facts["no_accuracy"] = str(e)
            return
        timed.values |= {name: [float(value), ""] for name, value in metrics.items()}


def engine_subject(recipe: None, options: dict[str, Any]) -> Subject:
    """The subject of the options of EngineRuns."""
    runs = EngineRuns(options)
    return Subject(
        runs.inputs, runs.step, lambda: runs.samples, runs.engine.device, memory=dict, finish=runs.finish
    )
