"""The first screen of `gradus plan`: four answers with what drives them, and notes, whole, in lines of 80 columns; the rest behind --all.

Over the grid of presets and devices the traced parts stand in closed form: what is looked at is the text, and a trace of each would take an hour.
"""

from __future__ import annotations

import dataclasses
import io
import re
import shlex
import time
from types import SimpleNamespace

import pytest

from gradus import cli, hardware, models
from gradus.plan import answer, roofline, show, store
from gradus.plan.answer import Request
from gradus.plan.figures import AT_PEAK, figure
from gradus.plan.process import Memory
from gradus.plan.profiles import NAMES
from gradus.plan.work import Op, Work
from gradus.recipe.axes import needed
from gradus.recipe.presets import PRESETS
from gradus.rows import Row

TINY = ("model.n_layers=2", "model.d_model=256", "model.n_heads=4", "model.d_ff=1024", "model.seq_len=256", "data.max_len=256", "batch.samples=64")
SPLIT = ("batch.samples=1024", "layout.precision=fp32", "layout.param_dtype=bf16", "layout.reduce_dtype=bf16", "layout.reshard=false", "layout.micro_batch=1",
         "layout.checkpointing=full", "layout.shard=8")  # fmt: skip
REQUESTS = {
    "no device": Request("", ("layout.micro_batch=1",)),
    "one": Request("", ("layout.micro_batch=1",), "H100", 1e9),
    "small": Request("", ("layout.micro_batch=1",), "T4", 1e12),
    "no price": Request("", ("layout.micro_batch=1",), "P100", 1e9, 3000),
    "eight": Request("", SPLIT, "8xA100-80GB", 300e9),
    "late": Request("", SPLIT, "64xA100-40GB", 3e12, 0.01),
    "this": Request("", ("layout.micro_batch=1", "layout.precision=fp32"), "this", 1e9),
}
FAMILIES = list({fields["family"]: name for name, fields in PRESETS.items()}.values())
ADVICE = ["--on 1024xA100-PCIe-40GB layout.precision=fp32 layout.micro_batch=1 layout.checkpointing=full layout.shard=1024 layout.reshard=false "
          "layout.param_dtype=bf16 layout.tensor=8: it fits, 39.1 GB a device (92%)", "--on 64xGB300: it fits as it is (97%)"]  # fmt: skip

SCORES = roofline.fitted()["each model left out"]
RUNS = sum(row[0] for name, row in SCORES.items() if name.startswith(("old", "new")) and "mean of" not in name)


@pytest.fixture
def closed(monkeypatch, tmp_path):
    """What is traced, by rules of thumb; and a calibrated machine."""

    def memory_of(recipe):
        each = 4 * models.count(recipe.model)["total"] // needed(recipe.layout)
        parts = dict.fromkeys(NAMES, 0) | {"weights": each, "gradients": each, "optimizer": 2 * each, "activations": 10**9}
        held = {name: parts[name] for name in ("weights", "gradients", "optimizer")}
        total = sum(parts.values())
        return Memory(parts, total, int(total * 1.03), 10**9, 0, "backward", held, 10**9, [])

    def work_of(recipe, n):
        samples = recipe.batch.samples or 1
        flops = 6.0 * models.count(recipe.model)["total"] * 512 * samples / n
        side = round((flops / 2) ** (1 / 3))
        dtype = recipe.layout.precision.removeprefix("pure_")
        ops = [Op("matmul", "mm", dtype, "forward", flops, 6.0 * side**2, (1, side, side, side)), Op("memory", "add", dtype, "backward", 0.0, flops / 1e3)]
        return Work(ops, [Op("memory", "adamw", "fp32", "optimizer", 0.0, 1e9)], [], 1, 1, 1, "1f1b", samples, samples * 512, flops * n, 1e6)

    def plan(case):
        return SimpleNamespace(case=case, memory=memory_of(case.recipe), work=work_of(case.recipe, case.n))

    monkeypatch.setattr("gradus.plan.engine.plan", plan)
    monkeypatch.setattr("gradus.plan.search.best_layout", lambda case, cluster, stated=(): plan(case.at(case.layout.model_copy(update={"shard": cluster.n, "param_dtype": "bf16"}))))
    monkeypatch.setattr("gradus.plan.search.fewest_in_time", lambda case, *given, **how: SimpleNamespace(n=2, plan=plan(case.at(n=2))))
    monkeypatch.setattr("gradus.plan.counts.flops", lambda case: [figure(f"flops/{k}", 1e18, "FLOP/step") for k in ("model", "hardware")])
    monkeypatch.setattr(answer, "_advice", lambda *given: ADVICE)
    device = dataclasses.replace(hardware.find("H100"), name="a processor of 64 cores", aliases=("this", "here", "cpu"), kind="cpu", node=1, network=None)
    hardware.add_device(device, tmp_path / "hardware.yaml")
    monkeypatch.setenv("GRADUS_HARDWARE", str(tmp_path / "hardware.yaml"))


def held(lines: list[str], last: str = show.MORE) -> list[str]:
    """The lines of a first screen, once their width and end are looked at."""
    assert max(map(len, lines)) <= 80 and lines[-1] == last, "\n".join(lines)
    return lines


def on_one_screen(name: str) -> dict[str, list[str]]:
    """Request → its screen, of those that the preset allows."""
    found = {}
    for key, request in REQUESTS.items():
        made = answer.answer(dataclasses.replace(request, recipe=name))
        lines = held(list(show.screen(made)))
        text = re.sub(r"\s+", " ", " ".join(lines))
        assert all(f"note: {' '.join(note.split())}" in text.replace(" \\ ", " ") for note in made.notes), text
        assert all(word in text for word in made.headline[1].split()[:8])
        dtype = made.recipe.layout.param_dtype
        assert not dtype or (f"fp32 master weights, {dtype} compute (FSDP mixed precision)" in made.headline[0] and f"layout.param_dtype={dtype}" in made.layout_keys)
        assert not (dtype and made.chosen and "layout.precision" in made.layout_keys), "said once"
        if made.fits is False:
            assert "NO FIT" in text and "it fits as it is" in text and "how much" not in text and "$" not in text
        elif request.on:
            assert "limited by " in text and "how long" in text and "% of a step" in text
            assert bool(re.search(r" at \$[\d.]+ per device-hour[; ]", text)) == (key not in ("no price", "this")), text
            assert f"of a step: 80 % interval, from {RUNS} published runs of other software; Gradus's own step has not run on a GPU" in text
            assert ("Of totals: a range, with " in text) == ("budget/time" in {row.name for row in made.rows})
        found[key] = lines
    return found


@pytest.mark.parametrize("name", FAMILIES)
def test_the_first_screen_holds_every_note_in_80_columns(closed, name):
    assert len(on_one_screen(name)) == len(REQUESTS)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in PRESETS if name not in FAMILIES][::3])
def test_the_first_screen_of_every_preset_holds_every_note(closed, name):
    assert len(on_one_screen(name)) == len(REQUESTS)


@pytest.mark.parametrize(("parts", "said"), [
    ({"matmul": (3.0, 2.4), "memory": (1.0, None)}, "limited by matrix products at 80% of the peak, 60% of a step"),
    ({"matmul": (3.0, 0.06), "memory": (1.0, None)}, "limited by matrix products too thin: 2% of the peak, 60% of a step"),
    ({"attention": (3.0, 0.6)}, "limited by fused attention at 20% of the peak, 60% of a step"),
    ({"launch": (3.5, None), "matmul": (1.0, 0.1)}, "limited by kernel launches, 70% of a step"),
    ({"bubble": (2.0, None)}, "limited by pipeline bubble, 40% of a step"),
    ({"comm/shard": (2.5, None), "matmul": (2.4, 2.0)}, "limited by FSDP's gathers and sums, 50% of a step"),
    ({"comm/context": (2.5, None)}, "limited by communication along context, 50% of a step"),
])  # fmt: skip
def test_what_limits_a_step_is_the_part_that_takes_most(parts, said):
    rows = [figure(f"time/{name}", seconds, "s", inputs={AT_PEAK: ideal, "calls": 3}, of="step") for name, (seconds, ideal) in parts.items()]
    assert show._limit(rows, 5.0) == said


def test_a_cost_is_of_the_time_at_one_price_and_of_the_extremes_behind_all(closed, capsys):
    request = dataclasses.replace(REQUESTS["one"], recipe="gpt2-small")
    made = answer.answer(request)
    first, everything = (re.sub(r"\s+", " ", " ".join(show.screen(made, more))) for more in (False, True))
    low, high = (made.value("budget/cost", case=case) / made.value("budget/time", case=case) for case in ("low", "high"))
    assert low == pytest.approx(high) and "cost_extremes $" not in first and "cost_extremes $" in everything
    extremes = show._interval(show._cases(made.rows, "budget/cost_extremes"))
    assert extremes in everything and extremes not in first
    own = answer.answer(dataclasses.replace(request, price=2.1))
    assert own.value("budget/cost", case="high") == pytest.approx(2.1 * own.value("budget/device_hours", case="high"))
    assert own.value("budget/cost_extremes") is None and " at $2.10 per device-hour; " in own.headline[-1]
    unknown = answer.answer(dataclasses.replace(REQUESTS["no price"], recipe="gpt2-small", price=2.1))
    assert unknown.value("budget/cost", case="expected") and "no price" not in unknown.headline[-1]
    for words, said in (([], "--price: devices of which kind"), (["--devices"], "--price has no effect with --devices"), (["--on", "H100", "--price", "0"], "positive")):
        assert cli.run(["plan", "gpt2-small", "--price", "2.1", *words]) == 2 and said in capsys.readouterr().err


def test_what_failures_cost_is_said_where_one_is_expected_or_asked_for(closed, capsys):
    request = dataclasses.replace(REQUESTS["eight"], recipe="gpt2-small", tokens=1e9)
    short = answer.answer(request)
    assert not any(line.startswith("goodput") for line in short.headline) and short.value("budget/goodput", case="low") > 0.99
    asked = answer.answer(dataclasses.replace(request, mtbf=50 * 3600.0))
    line = next(line for line in asked.headline if line.startswith("goodput"))
    assert asked.headline.index(line) == 3 and ": a failure each 6.25 h, 10 min [5 .. 20] to recover; a checkpoint (1.49 GB, 1.49 s) every " in line
    every = next(row for row in asked.rows if row.name == "budget/checkpoint_every")
    assert f"(set train.checkpoint_every={every.conditions['steps']}; Young 1974: 4.32 min, Daly 2006: 4.3 min)" in line
    assert asked.value("budget/time", case="expected") > short.value("budget/time", case="expected")
    stated = answer.answer(dataclasses.replace(request, mtbf=50 * 3600.0, overrides=(*SPLIT, "train.checkpoint_every=7")))
    assert "(train.checkpoint_every=7; Young" in stated.headline[3]
    long = answer.answer(dataclasses.replace(REQUESTS["eight"], recipe="llama2-7b", tokens=3e13))
    assert ": a failure each 264 days [154 .. 428], " in long.headline[3]


def test_mtbf_on_the_command_line(closed, capsys):
    words = ["plan", "gpt2-small", "--tokens", "1e9", "layout.micro_batch=1"]
    assert cli.run([*words, "--on", "H100", "--mtbf", "2 days", "--explain", "between_failures"]) == 0
    said = capsys.readouterr().out
    assert "budget/between_failures (expected) = 2 days" in said and "seconds of one device = 172,800" in said and "source: --mtbf" in said
    for more, why in (
        (["--mtbf", "50h"], "--mtbf: devices of which kind? Give --on"),
        (["--on", "H100", "--mtbf", "50"], "--mtbf: '50': 'no unit' is not a unit of time. Known: days, h, min, s, years. Write for example 50000h"),
        (["--on", "H100", "--mtbf=-3h"], "--mtbf: '-3h': -3 is not a positive number."),
        (["--on", "H100", "--mtbf", "50h", "--devices"], "--mtbf has no effect with --devices"),
        (["--on", "H100", "--mtbf", "50h", "--serve"], "--mtbf has no effect with --serve"),
        (["--on", "H100", "--mtbf", "50h", "--web"], "--mtbf has no effect with --web"),
        (["--on", "H100", "--mtbf", "1min"], "--mtbf: a failure each 60 s on 1 device leaves"),
    ):
        assert cli.run([*words, *more]) == 2 and why in capsys.readouterr().err, more
    endless = ["plan", "gpt2-small", "--on", "H100", "layout.micro_batch=1", "train.steps=null", "train.epochs=1", "--mtbf", "50h"]
    assert cli.run(endless) == 2 and "--mtbf: without its data" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("low", "expected", "high", "said"),
    [
        (0.5, 0.8, 0.9, "met by 8 × A100"),
        (0.5, 0.8, 1.5, "met by 8 × A100 as expected, not at the high end of the range (36 h)"),
        (0.5, 1.2, 1.5, "NOT met by 8 × A100; 12 or more would (leave the number out of --on to have it found)"),
    ],
)
def test_a_deadline_is_of_the_expected_time_and_then_of_the_high_one(low, expected, high, said):
    days = {"low": low, "expected": expected, "high": high}
    rows = [Row("budget/time", value * 86_400, "s", None, {"case": case}) for case, value in days.items()]
    rows += [Row("budget/devices", 12, "", None, {"case": case}) for case in days]
    made = SimpleNamespace(rows=rows, n=8, cluster=SimpleNamespace(device=SimpleNamespace(name="A100")))
    assert show._deadline(made, SimpleNamespace(days=1.0)) == [f"deadline  1 days: {said}"]


def test_what_looks_odd_is_a_note(closed):
    def notes(name: str, on: str) -> str:
        return "\n".join(answer.answer(Request(name, (), on)).notes)

    assert "a device would hold the whole state, 1.99 GB" in notes("gpt2-small", "8xA100") and "whole state" not in notes("gpt3-175b", "1024xA100")
    short = answer.answer(Request("gpt2-small", ("layout.micro_batch=1",), "H100", 2e7)).notes
    assert "a run of 39 steps is short to learn in: a smaller batch.samples has more" in short and not any("short to learn in" in note for note in answer.answer(
        Request("gpt2-small", ("layout.micro_batch=1",), "H100", 2e8)).notes)  # fmt: skip
    assert re.search(r"the loader must deliver [\d,]+ images/s", notes("vit-l16", "8xA100")) and "loader" not in notes("gpt2-small", "8xA100")


def test_an_interval_says_what_it_is_of():
    device = hardware.find("H100")
    assert f"{RUNS} published runs of other software; Gradus's own step has not run on a GPU" in show.brackets(device)
    assert "lost time" not in show.brackets(device)
    calibrated = show.brackets(dataclasses.replace(device, kind="cpu", measured={}))
    assert f"{RUNS} published runs of other software on GPUs; operations: measured here" in calibrated and "has not run" not in calibrated


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(("stream", "rows_only", "said"), [
    (io.StringIO, False, r"(planning llama: 0 s, parts of models traced: \d+ of about 9,000\n){2,}"), (io.StringIO, True, ""),
    (Terminal, True, r"(\r\x1b\[Kplanning llama: 0 s, parts of models traced: \d+ of about 9,000){2,}\r\x1b\[K"),
])  # fmt: skip
def test_a_plan_that_takes_long_says_how_far_it_is(monkeypatch, capsys, tmp_path, stream, rows_only, said):
    assert show.SILENCE == 3.0, "s"
    monkeypatch.setattr(show, "SILENCE", 0.02)
    monkeypatch.setattr(show, "AGAIN", {True: 0.03, False: 0.03})
    monkeypatch.setattr(store, "progress", store.Progress(expected=9000))
    monkeypatch.setattr("sys.stderr", stream := stream())
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("GRADUS_CACHE", str(tmp_path))

    def plan() -> str:
        with show.progress("llama", rows_only):
            store.stored("profiles", "a part", lambda: time.sleep(0.2))
            time.sleep(0.1)  # and something else
        return stream.getvalue()

    written = plan()
    assert re.fullmatch(said, written) and not capsys.readouterr().out
    assert plan() == written, "what is on disk is not traced"
    monkeypatch.setattr(show, "SILENCE", 60)
    with show.progress("llama", rows_only):
        store.stored("profiles", "another", lambda: None)
    assert stream.getvalue() == written, "a quick one says nothing"


def test_a_broken_layout_line_is_still_one_command(closed):
    made = answer.answer(dataclasses.replace(REQUESTS["eight"], recipe="gpt2-small"))
    lines = [line for line in show.screen(made) if line.startswith("layout ") or (line.startswith(" ") and "layout." in line)]
    assert len(lines) > 1 and all(line.endswith(" \\") for line in lines[:-1])
    pasted = "\n".join(lines).removeprefix("layout").replace("\\\n", "")  # as a shell reads it
    assert shlex.split(pasted) == shlex.split(made.layout_keys)
    tried = show.fold(f"try       {ADVICE[0]}")
    assert " ".join(shlex.split("\n".join(tried).removeprefix("try").replace("\\\n", ""))) == ADVICE[0]
    assert all(line.endswith("\\") for line in tried if "layout." in line and ":" not in line)


def test_notes_are_wrapped_and_never_cut():
    notes = ["training settings: Brown et al. 2020 (table 2.1; and appendix B, gpt3-175b: 300B tokens, batches of 0.5M to 3.2M tokens, and so on), section 3: more",
             "16 devices are enough (in whole nodes, of which each has eight devices, and so on and on) and more than one line"] * 6  # fmt: skip
    lines = held(show.first_screen(["answer"] * 10, notes, [show.MORE]))
    assert lines[:11] == ["answer"] * 10 + [""] and "..." not in "\n".join(lines) and sum(line.startswith("note: ") for line in lines) == 12
    assert all(" ".join(" ".join(lines).split()).count(note) == 6 for note in notes)
    assert show.first_screen(["answer"], [], [show.MORE]) == ["answer", show.MORE]


def test_the_ends_of_an_interval_have_its_unit():
    rows = [figure("budget/time", value, "s", case=case) for case, value in (("low", 58.1), ("expected", 61.2), ("high", 7300.0))]
    assert show._interval(show._cases(rows, "budget/time")) == "61.2 s [58.1 .. 7,300]"
    energy = [figure("budget/energy", value, "J", case=case) for case, value in (("low", 3210.0), ("expected", 5976.0), ("high", 21_240.0))]
    assert show._interval(show._cases(energy, "budget/energy")) == "1.66 Wh [0.892 .. 5.9]"


@pytest.mark.parametrize(("name", "on"), [("vit-b16", None), ("t5-small", "A100"), ("llama2-7b", "T4"), ("gpt2-small", "H100"), ("bert-base-uncased", "A10")])
def test_use_fits_a_terminal(capsys, name, on):
    words = ["plan", name, "--serve", *(["--on", on] if on else [])]
    assert cli.run(words) == 0
    lines = held(capsys.readouterr().out.splitlines(), "--all for components, --json for rows")
    assert cli.run([*words, "--all"]) == 0
    everything = capsys.readouterr().out
    assert "\nserving\n" in everything and len(everything.splitlines()) > len(lines)


@pytest.mark.slow
def test_components_stand_behind_all(capsys):
    words = ["plan", "gpt2-small", *TINY, "layout.micro_batch=8", "--on", "A100", "--tokens", "1e9", "--days", "1"]
    assert cli.run(words) == 0
    first = held(capsys.readouterr().out.splitlines())
    text = re.sub(r"\s+", " ", " ".join(first))
    assert [line.split("  ")[0] for line in first if re.match(r"(fits|how|deadline|layout) ", line)] == ["fits", "how long", "deadline", "how much", "layout"]
    assert re.search(r"MFU \d+%; limited by [^,]+, \d+% of a step", text) and " per device-hour (quoted: $" in text and re.search(r"fits .* GB per device \(\d+%; \w+ \d+%, \w+ \d+%\)", text)
    assert "memory\n" not in "\n".join(first) and "activations  " not in "\n".join(first)
    assert cli.run([*words, "--all"]) == 0
    everything = capsys.readouterr().out
    assert everything.startswith("\n".join(line for line in first[:3])) and "  activations  " in everything
    assert all(f"\n{group}\n" in everything for group in ("parameters", "flops", "memory", "time", "budget", "energy"))
    for more in (["--json"], ["--explain", "time/step"], ["--search"]):
        assert cli.run([*words[:-2], *more, "--all"]) == 2
        assert "--all has no effect" in capsys.readouterr().err


def test_nothing_is_wider_than_a_terminal_and_no_word_is_broken(closed, capsys):
    words = ["plan", "gpt2-small", "layout.micro_batch=1", "--on", "H100", "--tokens", "1e9"]
    for asked in (words, [*words, "--all"], [*words, "--explain", "energy/step"], ["plan", "--accuracy"], ["plan", "gpt2-small", "--devices"],
                  ["plan", "gpt2-small", "--devices", "--all"], ["plan", "llama2-7b", "--optimal"], ["plan", "llama2-7b", "--serve", "--all"], ["models"],
                  ["models", "gpt2-small"], ["hardware", "A100"]):  # fmt: skip
        assert cli.run(asked) == 0
        lines = capsys.readouterr().out.splitlines()
        assert len(lines) > 5 and max(map(len, lines)) <= 80, (asked, max(lines, key=len))
    long = "note: " + " ".join(["of-eighteen-letters"] * 9) + f" layout.precision=bf16 layout.{'x' * 80}=1 layout.tensor=2"
    folded = list(show.printed([long]))
    assert " ".join(line.removesuffix("\\").strip() for line in folded) == long and folded[1].startswith("      of-")


def test_a_terminal_shows_the_verdict_in_colour(monkeypatch):
    lines = ["fits      1 GB of 2", "NO FIT    3 GB of 2 GB (1 GB too much)", "nothing fits here"]
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.delenv("NO_COLOR", raising=False)
    green, red, nothing = show.printed(lines)
    assert green.startswith("\x1b[32mfits\x1b[0m ") and red.startswith("\x1b[31mNO FIT\x1b[0m") and "\x1b[31m1 GB too much" in red and "\x1b[31m" in nothing
    monkeypatch.setenv("NO_COLOR", "1")
    assert list(show.printed(lines)) == lines
