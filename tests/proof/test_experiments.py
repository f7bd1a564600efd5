"""Every experiment can be read, its page is what its committed rows say, and the index names each. A script beside the studies writes what is
no study; its page is what it says too."""

from __future__ import annotations

import dataclasses
import math
import re
import runpy
from pathlib import Path

import pytest

from gradus import models
from gradus.cli import main
from gradus.data import tokenizers
from gradus.errors import UserError
from gradus.parallel import processes
from gradus.plan.answer import Request, answer
from gradus.proof import engine_runner, harness, results, study_file, study_store
from gradus.proof.study import unit_of
from gradus.proof.timing import Timed, Window, time_it
from gradus.recipe.schema import BertConfig
from gradus.rows import Row, read_rows
from gradus.torch_private import has_fbgemm

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted((ROOT / "experiments").glob("*.yaml"))
PAGES = ROOT / "docs/experiments"
RECIPES = ROOT / "src/gradus/recipe/library"


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_it_can_be_read_and_its_page_is_its_rows(file):
    study, told = study_file.load(file)
    assert told.about.startswith("# "), "what the source did, and what is changed"
    assert f"make experiment NAME={file.stem}" in file.read_text(encoding="utf-8")
    rows, page = ROOT / "experiments/results" / f"{file.stem}.jsonl", PAGES / f"{file.stem}.md"
    if not rows.exists():
        assert not page.exists() or f"<!-- {file.stem} -->\nnot yet run\n<!-- end of {file.stem} -->" in page.read_text(encoding="utf-8")
        return
    table = "\n".join(results.markdown(read_rows(rows), told.columns))
    first, last, text = f"<!-- {file.stem} -->\n", f"<!-- end of {file.stem} -->\n", page.read_text(encoding="utf-8")
    assert f"{first}{table}\n{last}" in text
    if file.stem != "claimed-ranges":  # it has a table of its own, below
        before, after = study_file.around_table(ROOT / "none", file, told)
        assert text == before + table + "\n" + after, "the page says what the study file says"
    assert {r["configuration"] for r in read_rows(rows)} == {c.name for c in study.configurations}


PLANNED = [file for file in FILES if any(r["kind"] == "planned" for r in read_rows(ROOT / "experiments/results" / f"{file.stem}.jsonl"))]


@pytest.mark.docs
@pytest.mark.parametrize("file", PLANNED, ids=lambda file: file.stem)
def test_what_a_page_says_is_planned_is_today_s_plan(file):
    """For a source's devices, with the digits of the page. What was planned of the machine that measured belongs to its run, and is not planned again."""
    study, told = study_file.load(file)
    kept = read_rows(ROOT / "experiments/results" / f"{file.stem}.jsonl")
    plan = [row for c in study.configurations for row in harness.source_rows(c)]
    plan += study_store.planned_ratios(study, plan)
    today = {(row.conditions["configuration"], row.name): row.value for row in plan if row.conditions["kind"] == "planned"}
    assert {(r["configuration"], r["name"]) for r in kept if r["kind"] == "planned"} == set(today)
    again = [{**r, "value": today[r["configuration"], r["name"]]} if r["kind"] == "planned" else r for r in kept]
    table = "\n".join(results.markdown(again, told.columns))
    assert table in (PAGES / f"{file.stem}.md").read_text(encoding="utf-8"), f"gradus study experiments/{file.name}: the plan is now\n{table}"


@pytest.mark.docs
def test_what_the_lectures_page_says_is_planned_is_today_s_plan():
    """In the layout that the page names; that the plan would choose it, and the number of devices for 30 days, take it a minute and are not planned again."""
    made = runpy.run_path(str(ROOT / "experiments/gpt3-by-formula.py"))
    kept = [r for r in read_rows(made["ROWS"]) if r.get("kind") == "planned" and "layout" in r]
    layout = tuple(kept[0]["layout"].split())
    today = answer(dataclasses.replace(made["RUN"], overrides=layout))
    for r in kept:
        assert today.value(r["name"]) == pytest.approx(r["value"], rel=1e-3), f"{r['name']}: python experiments/gpt3-by-formula.py"


def test_the_index_names_each():
    """By its title, which says what it shows; and every page is an experiment."""
    index, pages = (PAGES / "README.md").read_text(encoding="utf-8"), {page.stem: page for page in PAGES.glob("*.md") if page.stem != "README"}
    scripts = [file for file in (ROOT / "experiments").glob("*.py") if "__main__" in file.read_text(encoding="utf-8")]  # the others hold runners
    assert set(pages) <= {file.stem for file in (*FILES, *scripts)}
    for stem, page in pages.items():
        title = page.read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ")
        assert f"- [{title}]({stem}.md)\n" in index, f"docs/experiments/README.md: no {title}"


def test_the_page_of_claims_is_what_committed_rows_say():
    made = runpy.run_path(str(ROOT / "experiments/claimed-ranges.py"))
    table = made["FIRST"] + "\n".join(made["table"]()) + "\n" + made["LAST"]
    assert table in (PAGES / "claimed-ranges.md").read_text(encoding="utf-8"), "python experiments/claimed-ranges.py"


def test_no_figure_stands_where_a_source_prints_none():
    """The article's log (of what it decoded there are words, and no figure), the exercise's accuracy, the chapter's trade of chunk sizes."""

    def said(study: str) -> set[str]:
        return {r["name"] for r in read_rows(ROOT / f"experiments/results/{study}.jsonl") if r["kind"] == "source"}

    assert "valid/exact_match" not in said("copy-task-as-coded") and "tokens_per_s" not in said("copy-task-as-coded")
    assert said("bert-on-imdb") == {"samples_per_s", "steps_per_s", "time/run", "train/loss"}
    assert not said("chunked-attention")


def test_claims_are_told_from_rows(tmp_path):
    made = runpy.run_path(str(ROOT / "experiments/claimed-ranges.py"))
    place = made["told"].__globals__
    assert made["told"]("none", "a")() == "not measured yet: [none](none.md)"
    place["HERE"] = tmp_path
    (tmp_path / "results").mkdir()
    common = {"kind": "measured", "processes": 2, "cpu": "CPU", "threads": 1, "at": {"x": "b"}, "configuration": "b", "against": "a"}
    rows = [Row("ratio", 1.5, conditions=common), Row("ratio/memory", 0.25, conditions=common), Row("memory/rest", 3, conditions=common),
            Row("memory/rest", 6, conditions={**common, "configuration": "a"})]  # fmt: skip
    (tmp_path / "results/s.jsonl").write_text("".join(row.json() + "\n" for row in rows), encoding="utf-8")
    assert made["told"]("s", "b", also=("memory/rest", "activations and the rest"))() == "b: speed × 1.50, tensors × 0.25, activations and the rest × 0.50 (CPU, 1 thread; [s](s.md))"
    assert made["told"]("s", "b", each=True)() == "b: efficiency 0.75 (CPU, 1 thread per process; [s](s.md))"


def test_the_lectures_page_is_its_rows():
    made = runpy.run_path(str(ROOT / "experiments/gpt3-by-formula.py"))
    found = read_rows(made["ROWS"])
    assert made["page"](found) == made["PAGE"].read_text(encoding="utf-8"), "python experiments/gpt3-by-formula.py"
    assert made["CHART"].read_text(encoding="utf-8").startswith("<svg")
    of = {(r["name"], r.get("kind"), r.get("model"), r.get("factor")): r["value"] for r in found}
    for name in made["SIZES"]:
        assert of["parameters/total/all", "formula", name, None] == of["parameters/total", "built", name, None]
        assert of["parameters/n_mlp", "formula", name, None] == of["parameters/n_mlp", "built", name, None]
    assert [of["devices", "formula", None, factor] for factor in (6, 8)] == [760, 1013]
    sent = {r["link"]: r["value"] for r in found if r["name"] == "link/all-reduce of 8"}
    assert [r["value"] / 1e15 for r in found if r["name"] == "node/peak"] == [72, 36, 18], "with sparsity; dense in FP8, in bf16"
    assert sent["InfiniBand NDR"] == pytest.approx(2 * 7 / 8 * 350e9 / 50e9)


def test_the_page_of_sources_has_the_figures_of_our_pages():
    """What docs/sources.md says is planned or measured stands on a page that the row links to, or the row of the same page above it."""
    page, linked, checked = PAGES.parent / "sources.md", [], 0
    for line in page.read_text(encoding="utf-8").splitlines():
        if line.startswith("| ") and line.count("|") == 6 and not line.startswith("| their result"):
            *_, planned, measured, where = (cell.strip() for cell in line.split("|")[1:-1])
            found = [(page.parent / link.partition("#")[0]).read_text(encoding="utf-8") for link in re.findall(r"\]\(([^)]+)\)", where)]
            linked = (linked[:1] if where.startswith("the same") else []) + found
            for figure in re.findall(r"(?<![\w.-])\d[\d,]*\.?\d*(?:e-\d+)?", re.sub(r"`[^`]*`|\w*[A-Z]+\d+|\d+ tokens", "", f"{planned} {measured}")):
                assert any(figure.rstrip(",.") in text for text in linked), f"{line}\n{figure} is on no page that it links to"
                checked += 1
    assert checked > 60


@pytest.mark.slow
def test_the_road_is_planned_in_hours_an_epoch():
    """As `gradus plan` says of the first row, with the number of images of an epoch."""
    study, _ = study_file.load(ROOT / "experiments/vit-epoch-planned.yaml")
    first = next(c.reference for c in study.configurations if c.name == "L/16 1 × A40 fp32, batch 32")
    values = first.figures()
    step = answer(Request(str(RECIPES / "cifar10-vit-l16.yaml"), ("data.path=null", "layout.device=cuda", "layout.precision=fp32"), "1xA40")).value("time/step")
    assert values["time/step"] == pytest.approx(step, rel=1e-6)
    assert values["time/epoch"] == pytest.approx(math.ceil(50_000 / 32) * step / 3600, rel=1e-3) and unit_of("time/epoch") == "h"


def test_the_vertex_posts_columns_agree():
    """Images/s, hours and dollars of an epoch, and the machines' prices, each with the digits that are printed."""
    study, _ = study_file.load(ROOT / "experiments/vit-on-vertex-ai.yaml")
    assert len(study.configurations) == 14
    for c in study.configurations:
        hours, price = c.source["time/epoch"], c.reference.price
        assert hours == pytest.approx(50_000 / c.source["samples_per_s"] / 3600, abs=2e-8), c.name
        assert c.source["cost/epoch"] == pytest.approx(hours * price, abs=1e-4), c.name
    kept = {(r["configuration"], r["name"]): r["value"] for r in read_rows(ROOT / "experiments/results/vit-on-vertex-ai.jsonl") if r["kind"] == "planned"}
    for c in study.configurations:
        assert kept[c.name, "cost/epoch"] == pytest.approx(kept[c.name, "time/epoch"] * c.reference.price)


def test_llamas_prompt_through_metas_layout(shared_data):
    """The page is its rows, and the rows are what the script finds now."""
    made = runpy.run_path(str(ROOT / "experiments/llama-in-metas-layout.py"))
    kept = read_rows(made["ROWS"])
    assert made["page"](kept) == made["PAGE"].read_text(encoding="utf-8"), "python experiments/llama-in-metas-layout.py"
    found = [row.known() for row in made["rows"](shared_data / "stories260K")]
    fp32 = [r for r in found if r.get("precision") == "fp32"]
    assert [r["value"] for r in fp32] == [r["value"] for r in kept if r.get("precision") == "fp32"] and len(fp32) == 6
    assert all(r["same prompt"] and r["equal"] == r["tokens"] and r["max_abs_delta"] == 0 for r in fp32)
    assert fp32[-1]["value"].startswith(" a little girl named Lily.")


# ------------------------------------------------------------ the studies of inference, small

SMALL = ["model.n_layers=1", "model.d_model=32", "model.n_heads=2", "model.d_ff=64", "model.vocab_size=40", "layout.threads=1"]


@pytest.fixture
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("GRADUS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(processes, "run_program", lambda words, *_, **__: (main(words[words.index("gradus") + 1 :]), ""))  # a model is quantized here
    for name in ("bandwidth", "product_rate"):
        monkeypatch.setattr(engine_runner.roofs, name, lambda *_: 1e9)


def one_step(file: str, name: str, words: list[str], **options) -> Timed:
    """Of one configuration of a study, as runners.own_steps takes it, in this process."""
    made, _ = study_file.load(ROOT / "experiments" / file, words)
    c = next(c for c in made.configurations if c.name == name)
    runner, _, function = c.runner.rpartition(":")
    window = Window(1, 0, 0)
    subject = runpy.run_path(runner)[function](c.recipe, {**c.options, **options})
    timed = time_it(subject, window)
    subject.finish(timed, window)
    return timed


def test_a_text_with_the_cache_and_without(own_cache):
    without, with_it = (one_step("kv-cache.yaml", f"100 tokens {how} cache", SMALL, new=9) for how in ("without", "with"))
    n_bytes = 2 * 9 * 32 * 4  # keys and values of 9 tokens
    assert with_it.values["memory/cache"] == with_it.planned["memory/cache"] == [n_bytes, "bytes"] and "memory/cache" not in without.values
    assert without.values["same_tokens"] == with_it.values["same_tokens"] == [1.0, ""] and without.samples == 9
    sample = study_store.Sample(1, [with_it])
    assert sample.planned["memory/cache"] == [n_bytes, "bytes"] and "planned" not in sample.record(), "it is the process's"


@pytest.mark.skipif(not has_fbgemm(), reason="this processor has no FBGEMM")
@pytest.mark.parametrize("how", ["PyTorch fp32", "dynamic quantization"])
def test_a_pass_of_random_weights(how, own_cache):
    timed = one_step("inference-ladder.yaml", how, SMALL, length=5)
    assert timed.samples == 1 and timed.values["time/step"][0] > 0 and "valid/accuracy" not in timed.values
    assert ("check/cosine" in timed.values) is (how == "PyTorch fp32")


def test_an_engine_that_is_not_here_is_told(own_cache, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name, *_: None)
    with pytest.raises(UserError, match="not installed here: tensorrt"):
        one_step("inference-ladder.yaml", "TensorRT", SMALL)


@pytest.mark.slow
def test_a_text_of_a_trained_run(own_cache, no_plan, tmp_path, monkeypatch):
    """With its metrics in every engine, and quantized."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "wikitext-2").mkdir()
    for split in ("train", "valid", "test"):
        (tmp_path / "wikitext-2" / f"{split}.txt").write_text("one two three four\n" * 60)
    small = [*SMALL, "model.vocab_size=null", "model.seq_len=16", "tokenizer.kind=byte", "train.epochs=null", "train.steps=2", "schedule.warmup_steps=1", "layout.device=cpu"]
    assert main(["train", "wikitext2-gpt", *small, "data.path=wikitext-2", "batch.samples=2", "log.dir=runs/gpt"]) == 0
    words = ["model.preset=null", *small, "data.path=wikitext-2"]
    of = {how: one_step("kv-cache.yaml", "100 tokens with cache", words, new=9, run="runs/gpt", **options).values
          for how, options in {"torch": {}, "torchscript": {"engine": "torchscript"}, "int8": {"quantized": "int8"}}.items()}  # fmt: skip
    assert of["torch"]["same_tokens"] == of["torchscript"]["same_tokens"] == [1.0, ""]
    perplexity = {how: values["test/perplexity"][0] for how, values in of.items()}
    assert perplexity["torchscript"] == pytest.approx(perplexity["torch"], rel=1e-5)
    assert perplexity["int8"] == pytest.approx(perplexity["torch"], rel=0.05) and perplexity["int8"] != perplexity["torch"]
    assert of["int8"]["size/weights"][0] < of["torch"]["size/weights"][0] and "memory/cache" not in of["torchscript"]


@pytest.mark.slow
@pytest.mark.skipif(not has_fbgemm(), reason="this processor has no FBGEMM")
def test_a_trained_run_with_its_accuracy(own_cache, no_plan, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = ["a fine film", "a slow one"]
    (tmp_path / "sst2").mkdir()
    for file in ("train", "dev"):
        (tmp_path / "sst2" / f"{file}.tsv").write_text("sentence\tlabel\n" + "".join(f"{words[i % 2]} {i}\t{i % 2}\n" for i in range(24)))
    tokenizer = tokenizers.train_bpe([" ".join(words)], 270)
    models.save(models.build(BertConfig(vocab_size=tokenizer.vocab_size, n_layers=1, d_model=32, n_heads=2, d_ff=64, seq_len=128)), tmp_path / "bert")
    tokenizer.save(tmp_path / "bert")
    small = ["model.init=bert", "data.path=sst2", "train.epochs=null", "train.steps=2", "schedule.warmup_steps=1", "batch.samples=4", "layout.device=cpu"]
    for name, qat in (("sst2", "false"), ("sst2-qat", "true")):
        assert main(["train", "sst2-bert", *small, f"train.qat={qat}", f"log.dir=runs/{name}"]) == 0
    given = ["model.init=runs/sst2", "data.path=sst2", "layout.threads=1"]
    for name in ("PyTorch fp32", "dynamic int8", "static int8", "int8 from QAT", "4-bit weights"):
        found = one_step("classifier-in-every-engine.yaml", name, given, length=7).values
        assert 0 <= found["valid/accuracy"][0] <= 1 and found["size/weights"][0] > 0 and ("points_lost" in found) is ("PyTorch" not in name)
