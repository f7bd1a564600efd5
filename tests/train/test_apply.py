"""What is applied from outside changes where and how fast, never what: compile, the log's switches, the schedule."""

from __future__ import annotations

import math
import shutil
import subprocess
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gradus import models
from gradus import recipe as recipes
from gradus.errors import UserError
from gradus.parallel.apply import apply
from gradus.parallel.device import pick_device
from gradus.parallel.precision import Precision
from gradus.recipe.schema import GPTConfig, Layout, Schedule
from gradus.train.schedule import learning_rate

CONFIG = GPTConfig(vocab_size=50, n_layers=2, d_model=16, n_heads=2, seq_len=16)


@pytest.mark.slow
@pytest.mark.skipif(not (shutil.which("g++") or shutil.which("clang++")), reason="compiling needs a C++ compiler")
def test_compiled_blocks_give_the_same_gradients():
    ids = torch.randint(50, (2, 16))
    grads = []
    for mode in ("none", "default"):
        torch.manual_seed(0)
        model = apply(models.build(CONFIG), Layout(compile=mode)).model
        assert list(model.state_dict()) == list(models.build(CONFIG).state_dict())
        model(ids).square().mean().backward()
        grads.append([p.grad for p in model.parameters()])
    for a, b in zip(*grads):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


def test_checkpointing_keeps_less():
    """Activations kept for the backward pass: none > selective > full, and attention alone in between."""
    kept = {}
    ids = torch.randint(50, (2, 16))
    for mode in ("none", "attention", "selective", "full"):
        model = apply(models.build(CONFIG), Layout(checkpointing=mode)).model
        seen: dict[int, int] = {}

        def pack(t, seen=seen):
            seen[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
            return t

        weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            model(ids)
        kept[mode] = sum(size for place, size in seen.items() if place not in weights)
    assert kept["none"] > kept["attention"] > kept["full"]
    assert kept["none"] > kept["full"]


@given(
    name=st.sampled_from(["constant", "linear", "cosine"]),
    warmup=st.integers(0, 50),
    last=st.integers(51, 500),
    final=st.floats(0, 1),
    step=st.integers(1, 600),
)
def test_rates_rise_to_the_base_and_never_leave_their_bounds(name, warmup, last, final, step):
    schedule = Schedule(name=name, warmup_steps=warmup, **({"final": final} if name != "constant" else {}))
    rate = learning_rate(schedule, 2.0, step, last, 64)
    assert 0 <= rate <= 2.0 + 1e-12
    if warmup:
        assert learning_rate(schedule, 2.0, warmup, last, 64) == pytest.approx(2.0)
    if name != "constant":
        assert learning_rate(schedule, 2.0, last, last, 64) == pytest.approx(2.0 * final)


def test_schedules_equal_transformers_and_the_paper():
    from transformers import get_cosine_schedule_with_warmup, get_linear_schedule_with_warmup

    for name, theirs in (("linear", get_linear_schedule_with_warmup), ("cosine", get_cosine_schedule_with_warmup)):
        optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.3)
        scheduler = theirs(optimizer, 10, 100)
        for step in range(1, 100):
            optimizer.step()
            scheduler.step()
            assert learning_rate(Schedule(name=name, warmup_steps=10), 0.3, step, 100, 64) == pytest.approx(scheduler.get_last_lr()[0], rel=1e-9)
    # the copy task of the sources: 5.5e-6 early, 1.1e-3 at step 400
    noam = Schedule(name="noam", warmup_steps=400)
    assert learning_rate(noam, 0.5, 2, 400, 512) == pytest.approx(5.5e-6, rel=0.01)
    assert learning_rate(noam, 0.5, 400, 400, 512) == pytest.approx(1.1e-3, rel=0.01)
    for step in (1, 100, 4000, 10_000):
        want = 512**-0.5 * min(step**-0.5, step * 4000**-1.5)
        assert learning_rate(Schedule(name="noam", warmup_steps=4000), 1.0, step, 10_000, 512) == pytest.approx(want)


def test_an_absent_device_is_refused():
    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    with pytest.raises(UserError, match=r"layout\.device=cuda: there is none here"):
        pick_device("cuda")


def test_pure_half_casts_the_weights():
    model = Precision("pure_bf16", torch.device("cpu")).cast(models.build(CONFIG))
    assert all(p.dtype == torch.bfloat16 for p in model.parameters())


@pytest.mark.slow
def test_tensorboard_gets_the_rows(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    from gradus.train.run import train

    small = ["model.n_layers=1", "model.d_model=16", "model.n_heads=2", "model.d_ff=32", "data.n_train=64", "data.n_valid=8", "schedule.warmup_steps=2",
             "batch.samples=16", "train.steps=4", "layout.device=cpu", "log.every=1", "log.tensorboard=true", "evaluate.samples=0"]  # fmt: skip
    train(recipes.load("copy-task", [*small, f"log.dir={tmp_path / 'run'}"]))
    board = EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    board.Reload()
    assert len(board.Scalars("train/loss")) == 4 and all(math.isfinite(e.value) for e in board.Scalars("train/loss"))


@pytest.mark.slow
def test_a_bad_sample_is_named_and_the_run_ends_in_one_line(tmp_path):
    (tmp_path / "train.tsv").write_text("sentence\tlabel\na film\t0\na good film\t7\n")
    (tmp_path / "dev.tsv").write_text("sentence\tlabel\na film\t0\n")
    command = [sys.executable, "-m", "gradus", "train", "sst2-bert", "model.init=null", "model.preset=null", "model.family=bert", "model.n_layers=1", "model.d_model=16",
               "model.n_heads=2", "model.d_ff=32", "tokenizer.kind=byte", f"data.path={tmp_path}", f"data.cache={tmp_path / 'cache'}",
               "schedule.warmup_steps=0"]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert "row 2" in done.stderr and "label 7" in done.stderr
