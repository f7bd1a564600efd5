import re
from itertools import pairwise

import pytest

from gradus import torch_private
from gradus.cli import main
from gradus.parallel import stages
from gradus.plan import answer, engine, peak, picture
from gradus.plan.step import bubble_share
from gradus.plan.work import COMPONENTS
from gradus.recipe.schema import Layout

GPT = ["model.n_layers=4", "model.d_model=32", "model.n_heads=2", "model.d_ff=64", "batch.samples=8", "layout.micro_batch=2"]


@pytest.fixture(scope="module", params=[["layout.pipeline=2"], ["layout.shard=2"], []], ids=" ".join)
def planned(request):
    n = 2 if request.param else 1
    return answer.answer(answer.Request("gpt2-small", [*GPT, *request.param], on=f"{n}xA100-80GB"))


def test_the_parts_of_the_fullest_bar_are_the_plans_rows(planned):
    found = planned.plan.processes
    memories = [engine.memory_of([p]) for p in found]
    fullest = max(memories, key=lambda m: m.allocated)
    parts = picture.parts(fullest, list(COMPONENTS))
    assert sum(parts.values()) == planned.value("memory/device")
    assert {name: parts[name] for name in COMPONENTS} == {name: planned.value(f"memory/{name}") for name in COMPONENTS}


def test_the_fullest_moment_of_the_step_is_the_plans_peak(planned):
    p = max(planned.plan.processes, key=lambda p: peak.peak_of(p).bytes)
    moments = peak.over_step(p)
    fullest = max(moments, key=lambda m: m.of.sum())
    assert fullest.of.round().astype(int).tolist() == [planned.value(f"memory/{name}") for name in COMPONENTS]
    assert fullest.phase == peak.peak_of(p).at
    assert all(a.at < b.at for a, b in pairwise(moments))
    assert {"forward", "loss", "backward"} <= {m.phase for m in moments}
    drawn = picture.draw(planned).svg()
    assert f"peak, {answer.size(peak.peak_of(p).bytes)}" in " ".join(re.findall(r"<text[^>]*>([^<]*)</text>", drawn))
    assert ("<title>process 0: backward 4, " in drawn) == (planned.recipe.layout.pipeline > 1)


def test_the_last_moment_leaves_gradients_but_no_activations():
    """Of one process: what stays is weights, optimizer, gradients, and the batches."""
    planned = answer.answer(answer.Request("gpt2-small", [*GPT, "layout.micro_batch=null"], on="A100-80GB"))
    p = planned.plan.processes[0]
    last = dict(zip(COMPONENTS, peak.over_step(p)[-1].of))
    assert last["gradients"] == last["weights"] and last["optimizer"] > 2 * last["weights"]
    assert last["activations"] == p.case.batches.nbytes and last["logits"] + last["transient"] < 100


SHAPES = [(2, 4), (4, 8), (4, 16)]


class Recorder:
    """A stage that sends and computes nothing."""

    def __init__(self, rank: int, n: int):
        self.stage_index, self.num_stages, self.is_first, self.is_last = rank, n, rank == 0, rank == n - 1
        self.did = []

    def forward_one_chunk(self, i, *args, **kwargs):
        self.did.append(("forward", i))

    def backward_one_chunk(self, i, *args, **kwargs):
        self.did.append(("backward", i))

    def __getattr__(self, name):
        return (lambda *args, **kwargs: []) if name.startswith("get_") else (lambda *args, **kwargs: None)


def run_by_torch(schedule: str, processes: int, rank: int, micro: int) -> list[tuple[str, int]]:
    """What torch's schedule of one stage per process does with a stage, step by step."""
    from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe

    kind = {"1f1b": Schedule1F1B, "gpipe": ScheduleGPipe}[schedule]
    skipped = dict.fromkeys(("_initialize_stage", "_maybe_compute_loss", "_maybe_get_loss", "_update_losses"), lambda *args: None)
    stage, theirs = Recorder(rank, processes), object.__new__(type("Schedule", (kind,), skipped))
    theirs._check_inputs = lambda *args: ([()] * micro, [{}] * micro)
    theirs.__dict__.update(_stage=stage, _num_stages=processes, _n_microbatches=micro, _has_backward=True, scale_grads=False)
    theirs._step_microbatches([()] * micro, [{}] * micro)
    return stage.did


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
@pytest.mark.parametrize(("processes", "micro"), SHAPES)
def test_of_one_stage_each_order_is_torchs_and_idle_share_the_closed_form(schedule, processes, micro):
    done = picture.timed(Layout(pipeline=processes, schedule=schedule), micro)
    for rank, own in enumerate(done):
        assert [(a.kind, a.micro_batch) for a in own] == run_by_torch(schedule, processes, rank, micro)
        assert all(a.stage == rank for a in own)
    assert picture.idle(done) == pytest.approx((processes - 1) / micro) == bubble_share(schedule, processes, 1, micro)


OTHERS = [(schedule, n) for schedule in ("interleaved", "zero_bubble") for n in (1, 2, 4) if (schedule, n) != ("interleaved", 1)]


@pytest.mark.parametrize(("schedule", "virtual"), OTHERS)
@pytest.mark.parametrize(("processes", "micro"), SHAPES)
def test_of_several_stages_order_is_torchs_and_idle_share_the_plans(schedule, virtual, processes, micro):
    layout = Layout(pipeline=processes, schedule=schedule, stages=virtual)
    done = picture.timed(layout, micro)
    for rank, own in enumerate(done):
        theirs = list(torch_private.schedule_of(schedule, processes, virtual, micro, rank))
        assert [(a.kind, a.stage, a.micro_batch) for a in own] == theirs
        assert all(a.stop <= b.start for a, b in pairwise(own))
    assert picture.idle(done) == pytest.approx(bubble_share(schedule, processes, virtual, micro))
    ended = {(a.kind, a.stage, a.micro_batch): a for own in done for a in own}
    for (kind, stage, i), a in ended.items():
        before = {"forward": ("forward", stage - 1, i), "backward": ("backward", stage + 1, i), "weights": ("backward", stage, i)}
        assert before[kind] not in ended or ended[before[kind]].stop <= a.start


def test_a_large_pipeline_is_cut_and_says_so():
    layout = Layout(pipeline=64, schedule="1f1b")
    drawn = picture.schedule(layout, 4096)
    assert "Counted for 1,024 of 4,096 micro-batches." in drawn.description
    assert "The first and the last 8 of 64 processes are drawn." in drawn.description
    assert re.search(r"The first 200 of [\d,]+ units are drawn\.", drawn.description)
    assert "process 7:" in drawn.body and "process 8:" not in drawn.body and "process 63:" in drawn.body
    assert stages.needed(layout, 1024) == 1024


def test_the_verb_writes_it_and_says_where(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = ["plan", "gpt2-small", *GPT, "--on", "A100-80GB"]
    assert main([*words, "--picture"]) == 0
    assert capsys.readouterr().out.endswith("gpt2-small-plan.svg: the plan drawn\n")
    assert main([*words, "--json", "--picture", "a/b.svg"]) == 0
    out, err = capsys.readouterr()
    assert err.endswith("a/b.svg: the plan drawn\n") and out.startswith("{") and "drawn" not in out
    texts = [(tmp_path / name).read_text() for name in ("gpt2-small-plan.svg", "a/b.svg")]
    assert texts[0] == texts[1] and texts[0].startswith("<svg") and "prefers-color-scheme:dark" in texts[0]


@pytest.mark.parametrize(("words", "told"), [
    (["--search", "--picture"], "--picture has no effect with --search. Leave it out."),
    (["--explain", "memory/device", "--picture"], "--picture has no effect with --explain. Leave it out."),
    (["--web", "--picture"], "--picture has no effect with --web. Leave it out."),
    (["--picture", "a.png"], "--picture=a.png: a picture is an SVG, whose name ends in .svg."),
    (["--picture", "model.n_layers=2"], "--picture=model.n_layers=2: a picture is an SVG"),
    (["--picture="], "--picture=: an empty path."),
])  # fmt: skip
def test_what_has_no_effect_or_no_name_is_refused(words, told, capsys):
    assert main(["plan", "gpt2-small", "--on", "A100-80GB", *words]) == 2
    err = capsys.readouterr().err
    assert told in err and err.count("\n") == 1


def test_a_path_that_cannot_be_written_is_told(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file" / "a.svg", tmp_path / "folder.svg"):
        (tmp_path / "folder.svg").mkdir(exist_ok=True)
        assert main(["plan", "gpt2-small", *GPT, "--picture", str(path)]) == 2
        err = capsys.readouterr().err.splitlines()
        assert len([line for line in err if line.startswith("error: ")]) == 1 and str(path) in err[-1]
