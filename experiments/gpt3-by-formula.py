"""A lecture's formulas for GPT-3 beside the built model and the plan: rows, page and chart. `python experiments/gpt3-by-formula.py`, a minute on two cores; nothing is measured.

Needs the extra [report] for the chart. The page is rendered from the rows alone: `page(rows)`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from gradus import files, hardware, models, pictures
from gradus.errors import UserError
from gradus.hardware.tables import gib
from gradus.plan.answer import Request, answer
from gradus.plan.collectives import ring_factor
from gradus.recipe.presets import config_of
from gradus.rows import Row, read_rows
from gradus.text import size

HERE = Path(__file__).resolve().parent
ROWS, PAGE = HERE / "results/gpt3-by-formula.jsonl", HERE.parent / "docs/experiments/gpt3-by-formula.md"
CHART = PAGE.with_name("devices-by-year.svg")
GPT3, TOKENS, RATE, MONTH = 175e9, 300e9, 160e12, 30 * 86_400  # of the lecture: parameters, tokens, FLOP/s of a GPU, s
SIZES = ("gpt2-small", "gpt2-medium", "gpt2-large", "gpt2-xl", "gpt3-175b")
STATES = {  # the lecture's part → (GB, bytes per parameter, as the plan calls it)
    "weights, fp32": (700, 4), "first moment of Adam": (700, 4), "second moment of Adam": (700, 4), "weights, fp16": (350, 2), "gradients, fp16": (350, 2),
}  # fmt: skip
LINKS = {  # → what the lecture says
    "NVLink 3": "600 GB/s", "NVLink 4": "900 GB/s", "NVLink 5": "1.8 TB/s", "NVLink 6": "3,600 GB/s", "PCIe 5 x16": "128 GB/s", "InfiniBand NDR": "400 Gb/s",
    "ConnectX-7": "400 Gb/s", "RoCE 400G": "400 Gb/s",
}  # fmt: skip
CARDS = {  # → memory that the lecture says
    "P100": "16 GB HBM2", "V100-32GB": "32 GB", "A100-40GB": "40 GB HBM2E", "A100-80GB": "80 GB HBM2E", "A800": "80 GB", "H100": "80 GB HBM3", "H800": "80 GB",
}  # fmt: skip
NODE, NODE_SAYS = "B300", 72e15  # Blackwell, of the lecture: FLOP/s
LINE_OF_CARDS = ("P100", "V100-16GB", "A100-80GB", "H100-SXM", "B200", "B300")
RUN = Request("gpt3-175b", on="1024xA100-80GB", tokens=TOKENS)
LINE = "gradus plan gpt3-175b --tokens 300e9 --on 1024xA100-80GB"
Record = dict[str, Any]


def rows() -> Iterator[Row]:
    """All that the page shows."""
    for name in SIZES:
        config = config_of(name)
        n = models.count(config)
        d, f, layers, words, places = config.d_model, config.d_ff or 4 * config.d_model, config.n_layers, config.vocab_size, config.seq_len
        about = {"model": name, "d": d, "layers": layers, "vocabulary": words, "places": places}
        layer = models.count(config.model_copy(update={"n_layers": 2}))["total"] - models.count(config.model_copy(update={"n_layers": 1}))["total"]
        formulas = {
            "n_embed": words * d, "n_mlp": 2 * f * d + f + d, "layer/source": 12 * d**2 + 5 * d, "layer/with norms and all biases": 12 * d**2 + 13 * d,
            "total/source": words * d + layers * (12 * d**2 + 5 * d), "total/all": (words + places) * d + layers * (12 * d**2 + 13 * d) + 2 * d,
        }  # fmt: skip
        built = {"n_embed": n["embeddings"] - places * d, "n_mlp": n["feedforward"] // layers, "layer": layer, "total": n["total"]}
        yield from (Row(f"parameters/{key}", value, "parameters", None, {**about, "kind": "formula"}) for key, value in formulas.items())
        yield from (Row(f"parameters/{key}", value, "parameters", None, {**about, "kind": "built"}) for key, value in built.items())
    yield Row("devices", 800, "devices", None, {"kind": "source"})
    for factor in (6, 8):
        yield Row("devices", math.ceil(factor * GPT3 * TOKENS / (RATE * MONTH)), "devices", None, {"kind": "formula", "factor": factor})
    month = answer(Request("gpt3-175b", on="A100-80GB", tokens=TOKENS, days=30))
    for case in ("low", "expected", "high"):
        yield Row("devices", month.value("budget/devices", case=case), "devices", None, {"kind": "planned", "case": case, "whole nodes": month.n})
    made = answer(RUN)
    keep = ("memory/", "parameters/total", "time/step", "time/mfu")
    yield from (Row(r.name, r.value, r.unit, None, {"kind": "planned", "layout": made.layout_keys}) for r in made.rows if r.name.startswith(keep))
    for name, said in LINKS.items():
        link = hardware.links()[name]
        found = {"payload": 350e9 / link.bandwidth, "all-reduce of 8": ring_factor("all_reduce", 8) * 350e9 / link.bandwidth}
        found |= {"all-reduce of 800": ring_factor("all_reduce", 800) * 350e9 / link.bandwidth}
        yield Row("link/bandwidth", link.bandwidth, "bytes/s", None, {"link": name, "source says": said})
        yield from (Row(f"link/{key}", value, "s", None, {"link": name}) for key, value in found.items())
    blackwell = hardware.find(NODE)
    yield Row("node/peak", NODE_SAYS, "FLOP/s", None, {"node": NODE, "kind": "source"})
    yield from (Row("node/peak", blackwell.node * blackwell.peaks[kind], "FLOP/s", None, {"node": NODE, "devices": blackwell.node, "in": kind}) for kind in ("fp8", "bf16"))
    for device in hardware.devices().values():
        if device.kind == "gpu" and device.year:
            links = {"link": device.link and device.link.name, "network": device.network and device.network.name}
            speeds = {"link/bandwidth": device.link and device.link.bandwidth, "network/bandwidth": device.network and device.network.bandwidth}
            peak = device.peaks.get("bf16") or device.peaks.get("fp16")
            about = {"device": device.name, "year": device.year, "type": device.memory_type, **links}
            for key, value in {"peak": peak, "memory": device.memory, "bandwidth": device.bandwidth, **speeds}.items():
                if value:
                    yield Row(f"device/{key}", value, {"peak": "FLOP/s", "memory": "bytes"}.get(key, "bytes/s"), None, about)


# ------------------------------------------------------------ the page


def table(head: Sequence[str], body: Sequence[Sequence[Any]]) -> list[str]:
    return ["| " + " | ".join(head) + " |", "|---|" + "---:|" * (len(head) - 1), *("| " + " | ".join(map(str, cells)) + " |" for cells in body), ""]


def page(found: Sequence[Record]) -> str:
    """The page, of the rows' records."""

    def of(name: str, **conditions: Any) -> Any:
        return next((r["value"] for r in found if r["name"] == name and all(r.get(k) == v for k, v in conditions.items())), None)

    def counted(name: str, kind: str, model: str) -> str:
        return f"{of(f'parameters/{name}', kind=kind, model=model):,}"

    shapes = {r["model"]: r for r in found if r["name"] == "parameters/total" and r["kind"] == "built"}
    parts = [["n_embed", "n_embed"], ["n_mlp", "n_mlp"], ["layer/source", "layer"], ["layer/with norms and all biases", "layer"]]
    sums = [
        [name, f"{r['layers']} × {r['d']:,}", *(counted(key, "formula", name) for key in ("total/source", "total/all")), counted("total", "built", name),
         f"{of('parameters/total', kind='built', model=name) / of('parameters/total/source', model=name) - 1:.2%}"]
        for name, r in shapes.items()
    ]  # fmt: skip
    planned = {r["name"].removeprefix("memory/"): r["value"] for r in found if r["name"].startswith("memory/")}
    layout = next(r["layout"] for r in found if "layout" in r)
    month = {r["case"]: r for r in found if r["name"] == "devices" and "case" in r}
    total = of("parameters/total", kind="planned")
    links = [[r["link"], r["source says"] or "-", f"{r['value'] / 1e9:,.5g} GB/s",
              *(f"{of(f'link/{key}', link=r['link']):.2f} s" for key in ("payload", "all-reduce of 8", "all-reduce of 800"))]
             for r in found if r["name"] == "link/bandwidth"]  # fmt: skip
    cards = [[name, said, f"{gib(of('device/memory', device=real))} {next(r['type'] for r in found if r.get('device') == real)}"]
             for name, said in CARDS.items() if (real := hardware.find(name).name)]  # fmt: skip
    years = sorted({r["device"]: r for r in found if "device" in r}.values(), key=lambda r: (r["year"], r["device"]))
    figures = [
        [r["device"], r["year"], *((f"{value / unit:,.5g}" if value else "-") for key, unit in
         (("peak", 1e12), ("memory", 2**30), ("bandwidth", 1e9), ("link/bandwidth", 1e9), ("network/bandwidth", 1e9))
         for value in [of(f"device/{key}", device=r["device"])])]
        for r in years
    ]  # fmt: skip
    said, *dense = (next(r for r in found if r["name"] == "node/peak" and r.get(key) == word) for key, word in (("kind", "source"), ("in", "fp8"), ("in", "bf16")))
    fp8, bf16 = (r["value"] / 1e15 for r in dense)
    return "\n".join([
        "# GPT-3 by a lecture's formulas: 0.02 % of its parameters are left out, and 800 GPUs should be 760 or 1,013", "",
        "**The source** (Fudan University's lecture on distributed training, \"Transformer: a quick view\") counts parameters by formulas, the GPUs that GPT-3 needs, its memory by component, and the 350 GB of gradients that every step moves, and shows how devices",
        "and links grew. None of it is an experiment, so nothing is measured here: each figure stands beside the built model, the plan or the hardware file. [Errata](../errata.md) explains",
        "the differences. `make experiment NAME=gpt3-by-formula` writes this page, its chart and its rows (`experiments/results/gpt3-by-formula.jsonl`) again.", "",
        "## Parameters", "",
        "`gradus models gpt2-small gpt3-175b` counts the built models. The source has `n_embed` = V d, `n_MLP` = 2 d_ff d + d_ff + d, a layer 12 d² + 5 d, in all V d + L (12 d² + 5 d). A layer with its",
        "two norms and every bias has 12 d² + 13 d; with positions and the last norm the sum is exact: (V + s) d + L (12 d² + 13 d) + 2 d. For gpt2-small:", "",
        *table(["part", "formula", "built"], [[a, counted(a, "formula", "gpt2-small"), counted(b, "built", "gpt2-small")] for a, b in parts]),
        *table(["model", "L × d", "source's sum", "exact sum", "built", "left out by the source"], sums),
        "## How many GPUs for GPT-3 in 30 days", "",
        f"300e9 tokens, 160 TFLOP/s reached by each GPU. The source says {of('devices', kind='source')}. 6 N D operations give {of('devices', factor=6)}, 8 N D, with the forward pass that",
        f"checkpointing repeats, {of('devices', factor=8):,}: 160 TFLOP/s was reached with it and includes it. `gradus plan gpt3-175b --tokens 300e9 --days 30 --on A100-80GB`, which plans the step and",
        f"adds failures (goodput), says {month['expected']['value']:,} A100s ({month['low']['value']:,} to {month['high']['value']:,}), and in whole nodes that its layout divides {month['expected']['whole nodes']:,}.", "",
        *table(["GPUs", "source says", "6 N D", "8 N D", "planned", "planned, in whole nodes"],
               [["GPT-3, 300e9 tokens, 30 days", of("devices", kind="source"), of("devices", factor=6), f"{of('devices', factor=8):,}",
                 f"{month['expected']['value']:,}", f"{month['expected']['whole nodes']:,}"]]),
        "The formulas take the 160 TFLOP/s as given. The plan does not: its step reaches its own rate, the run loses time, and whole nodes are rented.", "",
        "## Memory of GPT-3, by component", "",
        f"Totals, whatever the layout. The source counts 175e9 parameters; the built model has {total:,}.", "",
        *table(["component", "source says", "bytes per parameter", "of the built model"],
               [[name, f"{gb} GB", n, f"{n * total / 1e9:,.0f} GB"] for name, (gb, n) in STATES.items()]
               + [["sum", f"{sum(gb for gb, _ in STATES.values()):,} GB", sum(n for _, n in STATES.values()), f"{16 * total / 1e9:,.0f} GB"]]),
        f"Activations and buffers, for which the source gives no figure, depend on the layout. `{LINE}`, on one of its devices:", "",
        *table(["component", "planned"], [[name, size(value)] for name, value in planned.items() if value]),
        f"The layout, which the plan chose: `{layout}`.", "",
        "## 350 GB of gradients over each link", "",
        "`gradus hardware \"NVLink 5\"` shows a link with its source. Bandwidths are for one direction; the source gives NVLink and PCIe for both directions together, InfiniBand and RoCE for one. An all-reduce",
        "sends 2 (k − 1) / k of the payload over each GPU's link: times are at the full bandwidth, without latency and without overlap.", "",
        *table(["link", "source says", "one direction", "the payload", "all-reduce of 8", "all-reduce of 800"], links),
        "## Memory of GPUs", "",
        "An \"80 GB\" card has 80 GiB. H100 and H800 are the SXM cards.", "",
        *table(["card", "source says", "hardware file"], cards),
        "## Devices and links over the years", "",
        "From the hardware file (`gradus hardware`): dense peaks in bf16, or in fp16 where a device has no bf16; links in one direction, per device; network: its share between nodes.", "",
        f"The lecture gives Blackwell {said['value'] / 1e15:.0f} PFLOPS: that is a node of {dense[0]['devices']} {said['node']} in FP8 with sparsity. Dense, as training is, the node has {fp8:.0f} PFLOP/s in FP8 and",
        f"{bf16:.0f} in bf16 (`gradus hardware {said['node']}`). It ends with Rubin, whose NVLink 6 it gives 3,600 GB/s: the hardware file has the link, 1,800 GB/s in one direction",
        "(`gradus hardware \"NVLink 6\"`), and no Rubin card, so nothing is planned for one.", "",
        f"![Peak, memory bandwidth and links of GPUs by year, logarithmic]({CHART.name})", "",
        *table(["device", "announced", "TFLOP/s", "GiB", "memory GB/s", "link GB/s", "network GB/s"], figures),
    ]).strip() + "\n"  # fmt: skip


def chart(found: Sequence[Record]) -> pictures.Picture:
    """Each device by its year: computing, memory, links; one line of cards joined, and named below."""
    panels = []
    panes = (("device/peak", 1e12, "dense peak, TFLOP/s"), ("device/bandwidth", 1e9, "memory, GB/s"), ("device/link/bandwidth", 1e9, "links, GB/s one way"))
    for name, unit, title in panes:
        of = {r["device"]: (r["year"], r["value"] / unit) for r in found if r["name"] == name}
        curves = {
            "other GPUs, within a node": pictures.Curve([*of.values()], pictures.COLOURS[6], mark=pictures.MARKS[0], joined=False),
            "the cards named": pictures.Curve([of[device] for device in LINE_OF_CARDS], pictures.COLOURS[0], mark=pictures.MARKS[0]),
        }
        if name == "device/link/bandwidth":
            network = {r["device"]: (r["year"], r["value"] / unit) for r in found if r["name"] == "device/network/bandwidth"}
            points = [network[device] for device in LINE_OF_CARDS]
            curves["these cards, between nodes"] = pictures.Curve(points, pictures.COLOURS[1], True, pictures.MARKS[1])
        named = {of[device][0]: device.partition("-")[0] for device in LINE_OF_CARDS}
        years = f"announced in {', '.join(str(of[device][0]) for device in LINE_OF_CARDS)}"
        panels.append(pictures.lines(curves, title, x=years, width=470, zero=False, log="y", named=named))
    return pictures.beside(panels, "GPUs by the year of their announcement")


def main() -> None:
    files.write_text(ROWS, "".join(row.json() + "\n" for row in rows()))
    found = read_rows(ROWS)
    files.write_text(PAGE, page(found))
    chart(found).save(CHART)
    print(f"rows: {ROWS}\npage: {PAGE}\nchart: {CHART}")


if __name__ == "__main__":
    try:
        main()
    except UserError as e:
        raise SystemExit(f"error: {e}") from None
