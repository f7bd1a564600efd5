"""Checkpoints of several processes: written by n, read by m, in any layout; never half of one; out to the Hugging Face layout."""

# ruff: noqa: E402

from __future__ import annotations

import functools
import json
import os
import shutil
import signal
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[1] / "parallel")]  # also in the processes that a test starts
import common
import distributed

from gradus import models
from gradus.cli import main
from gradus.data.tokenizers import train_bpe
from gradus.errors import EnvironmentFault, UserError
from gradus.layers import Block
from gradus.models.weights import checksums
from gradus.train import checkpoint, sharded
from gradus.train.optim import load_state_tensors

# 47 tokens, 66 and 3 rows are divided by neither 2 × 2 nor 4; the last of 4 processes has none of 3
FAMILIES = {
    "gpt": {"vocab_size": 47, "d_ff": 66, "n_layers": 2},
    "t5": {"vocab_size": 47, "d_ff": 66, "n_layers": 2, "tie_output": True},
    "vit": {"n_classes": 3, "n_layers": 1},
    "llama": {"vocab_size": 47, "n_layers": 1, "n_experts": 3},
}


def whole(family: str) -> nn.Module:
    return common.build(family, **FAMILIES[family])


def state_of(weight: Tensor) -> dict[str, Tensor]:
    """Optimizer state that follows from the weight, element by element: parts of it are the state of parts."""
    return {"exp_avg": weight * 2 + 1, "exp_avg_sq": weight * weight, "step": torch.tensor(7.0)}


def cut(model: nn.Module, mesh) -> None:
    """Every parameter split over the mesh by its first or its last dimension; tied ones stay tied."""
    made: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, p in module._parameters.items():
            if p is not None:
                dim = 0 if isinstance(module, nn.Embedding) or name == "bias" else p.ndim - 1
                made.setdefault(id(p), nn.Parameter(distribute_tensor(p.detach(), mesh, [Shard(dim)])))
                module._parameters[name] = made[id(p)]


@functools.cache
def mesh_of(*sizes: int):
    return init_device_mesh("cpu", sizes, mesh_dim_names=("shard", "tensor")[: len(sizes)])


def lay_out(model: nn.Module, layout: str) -> nn.Module:
    """tensor: every parameter cut. shard: FSDP. both: one over the other. hybrid: FSDP in two replicas. none: one process."""
    if layout == "none":
        return model
    mesh = mesh_of(2, 2) if layout in ("both", "hybrid") else mesh_of(dist.get_world_size())
    if layout in ("tensor", "both"):
        cut(model, mesh["tensor"] if layout == "both" else mesh)
    if layout != "tensor":
        over = mesh["shard"] if layout == "both" else mesh
        for block in [m for m in model.modules() if isinstance(m, Block)]:
            fully_shard(block, mesh=over)
        fully_shard(model, mesh=over)
    return model


def local(p: Tensor) -> Tensor:
    with torch.no_grad():
        return p.to_local() if isinstance(p, DTensor) else p.detach()


def tensors_of(model: nn.Module, rank: int) -> dict[str, Tensor]:
    tensors = {f"rng.cpu.{rank}": torch.full((5,), rank, dtype=torch.uint8)}
    for name, p in model.named_parameters(remove_duplicate=False):  # what is tied under each of its names
        tensors[f"model.{name}"] = p
        for kind, value in state_of(local(p)).items():
            tensors[f"{kind}.{name}"] = sharded.like(p, value)
    return tensors


def note_beside(folder: Path) -> None:
    (folder / "training.json").write_text(json.dumps({"step": 7}))


def write(world, target: Path, family: str, layout: str) -> None:
    model = lay_out(whole(family), layout)
    tensors = tensors_of(model, world.rank)
    pending = sharded.save(target, model.config, tensors, note_beside, None)
    with torch.no_grad():  # as the next steps do: what was saved is what was there when save returned
        for tensor in tensors.values():
            local(tensor).zero_()
    assert pending.finish() == target
    assert pending.done()


def verify(world, source: Path, family: str, layout: str) -> None:
    model = lay_out(whole(family), layout)
    true = {name: p.detach().clone() for name, p in whole(family).named_parameters()}
    with torch.no_grad():
        for p in model.parameters():
            local(p).fill_(-1.0)
    state = sharded.load_state(source, dict(model.named_parameters()))
    sharded.load(source, {f"model.{name}": p for name, p in model.named_parameters()})
    for name, p in model.named_parameters():
        full = p.full_tensor() if isinstance(p, DTensor) else p
        assert torch.equal(full, true[name]), name
        for kind, value in state_of(local(p)).items():
            assert torch.equal(state[f"{kind}.{name}"], value), (kind, name)
    assert len(state) == 3 * len(true)


def chain(world, folder: str, source: str | None, target: str, layouts: tuple[str, ...]) -> None:
    for family in FAMILIES:
        for layout in layouts:
            if source is not None:
                verify(world, Path(folder, f"{source}-{family}"), family, layout)
        write(world, Path(folder, f"{target}-{family}"), family, layouts[0])


@pytest.mark.slow
def test_written_by_any_number_of_processes_read_by_any_other(tmp_path):
    """4 → 2 → 1 → 4, in five layouts, bit for bit."""
    distributed.run(4, chain, str(tmp_path), None, "from4", ("both",))
    assert not list(tmp_path.glob(".writing-*"))
    distributed.run(2, chain, str(tmp_path), "from4", "from2", ("shard", "tensor"))
    for family in FAMILIES:  # one process, without a process group
        before = whole(family)
        for source in ("from4", "from2"):
            verify(None, tmp_path / f"{source}-{family}", family, "none")
            n = int(source[-1])
            rng = {key: stored.read() for key, stored in sharded.read(tmp_path / f"{source}-{family}").items() if key.startswith("rng")}
            assert {key: set(value.tolist()) for key, value in rng.items()} == {f"rng.cpu.{r}": {r} for r in range(n)}
            again = models.load(tmp_path / f"{source}-{family}")
            assert again.config == before.config
            assert all(torch.equal(a, b) for a, b in zip(again.parameters(), before.parameters(), strict=True))
        # a checkpoint of one process as train.checkpoint writes it
        model, target = whole(family), tmp_path / f"from1-{family}"
        models.save(model, target)
        save_file(
            {f"{k}.{name}": v for name, p in model.named_parameters() for k, v in state_of(p.detach()).items()}, target / "training.safetensors"
        )
    distributed.run(4, chain, str(tmp_path), "from1", "back4", ("hybrid", "shard", "tensor", "both"))
    for family in FAMILIES:
        verify(None, tmp_path / f"back4-{family}", family, "none")
        stored, named = sharded.read(tmp_path / f"back4-{family}"), dict(whole(family).named_parameters())
        assert len(stored) == 4 * len(named) + 4, "what is tied is stored once, beside the generators' states"
        files = list((tmp_path / f"back4-{family}" / "sharded").iterdir())
        assert len(files) == 4 and all(f.suffix == ".safetensors" for f in files)
    head = torch.zeros(47, 32)
    sharded.load(tmp_path / "back4-gpt", {"model.head.weight": head})  # as the last stage of a pipeline asks for it
    assert torch.equal(head, whole("gpt").token_embedding.weight)


def several(world, folder: str) -> list[str]:
    write(world, Path(folder, "from2-gpt"), "gpt", "shard")
    text_checkpoint(world, folder)
    dist.barrier()
    Path(folder, "full").mkdir(exist_ok=True)
    return fails(world, f"{folder}/full")


@pytest.fixture(scope="module")
def by_two(tmp_path_factory) -> tuple[Path, list]:
    """What two processes wrote and were told: `from2-gpt`, a checkpoint; `gpt` and `llama`, runs; `full`, on a disk that was full at first."""
    folder = tmp_path_factory.mktemp("two")
    return folder, distributed.run(2, several, str(folder))


@pytest.fixture
def from2(by_two, tmp_path) -> Path:
    return shutil.copytree(by_two[0] / "from2-gpt", tmp_path / "from2-gpt")


def test_one_process_goes_on_with_the_optimizer_of_many(from2):
    """The same next step as without the checkpoint between."""
    curves = []
    for resumed in (False, True):
        model = whole("gpt")
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        state = {f"{k}.{name}": v for name, p in model.named_parameters() for k, v in state_of(p.detach().clone()).items()}
        if resumed:
            with torch.no_grad():
                for p in model.parameters():
                    p.zero_()
            models.load_weights(model, from2)
            state = sharded.load_state(from2, dict(model.named_parameters()))
        load_state_tensors(model.named_parameters(), optimizer, state)
        ids = common.batch("gpt", 0)["ids"] % 47
        sum(common.losses("gpt", model, {"ids": ids, "labels": ids}).values()).backward()
        optimizer.step()
        curves.append([p.detach().clone() for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*curves, strict=True))


# ---------------------------------------------------------------- failures


def fails(world, folder: str) -> list[str]:
    """A full disk on the second process, then on the first in three places; what every process is told."""
    model, told = lay_out(whole("gpt"), "shard"), []
    tensors, target = tensors_of(model, world.rank), Path(folder, "step-00000001")

    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    def attempt(fill=note_beside) -> None:
        with pytest.raises(EnvironmentFault) as e:
            sharded.save(target, model.config, tensors, fill).finish()
        told.append(str(e.value))
        dist.barrier()
        assert not list(Path(folder).iterdir())
        dist.barrier()

    for culprit in (1, 0):
        with pytest.MonkeyPatch.context() as patch:
            if world.rank == culprit:
                patch.setattr(sharded.Writer, "write_data", full)
            attempt()
    with pytest.MonkeyPatch.context() as patch:
        if world.rank == 0:
            patch.setattr(os, "replace", full)
        attempt()
    attempt(fill=full)
    with pytest.MonkeyPatch.context() as patch:
        if world.rank == 1:
            patch.setattr(sharded.Writer, "write_data", lambda self, plan, planner: nothing_written(plan))
        with pytest.raises(UserError, match="do not share this folder"):
            sharded.save(target, model.config, tensors, note_beside).finish()
    dist.barrier()
    sharded.save(target, model.config, tensors, note_beside).finish()
    assert sharded.save(target, model.config, tensors, full).finish() == target  # it is there: nothing is written again
    return told


def nothing_written(plan):
    """As on a host with a disk of its own: DCP is told that all is well, and no file arrives where rank 0 looks."""
    from torch.distributed.checkpoint.storage import WriteResult

    future = torch.futures.Future()
    future.set_result([WriteResult(item.index, 0, None) for item in plan.items])
    return future


def test_a_full_disk_is_one_line_on_every_process_and_leaves_nothing(by_two):
    folder, answers = by_two
    assert answers[0] == answers[1]
    for line in answers[0]:
        assert "the disk is full" in line and "--resume" in line and "\n" not in line
    verify(None, folder / "full" / "step-00000001", "gpt", "none")


def killed(world, folder: str, moment: str) -> None:
    model = lay_out(whole("gpt"), "shard")
    target = Path(folder, "step-00000002")

    def die(*args, **kwargs):
        os.kill(os.getpid(), signal.SIGKILL)

    real = os.replace
    moments = {"before the rename": die, "after the rename": lambda a, b: (real(a, b), die())}
    if world.rank == 0 and moment in moments:
        os.replace = moments[moment]
    if world.rank == 1 and moment == "while writing":
        os.fsync = die  # its file is written, others may be
    pending = sharded.save(target, model.config, tensors_of(model, world.rank), note_beside)
    if moment == "at once":
        die()
    pending.finish()


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["at once", "while writing", "before the rename", "after the rename"])
def test_a_kill_at_any_instant_leaves_the_whole_checkpoint_or_none(tmp_path, moment):
    kept = checkpoint.Checkpoints(tmp_path, keep=2)
    with pytest.raises(AssertionError, match=r"died|rank \d of 2"):
        distributed.run(2, killed, str(tmp_path), moment)
    if moment == "after the rename":
        verify(None, kept.latest(), "gpt", "none")
    else:
        assert kept.latest() is None and all(p.name.startswith(".writing-step-00000002-") for p in tmp_path.iterdir())
    distributed.run(2, again, str(tmp_path))  # what was left is no hindrance
    verify(None, kept.latest(), "gpt", "none")
    assert not list(tmp_path.glob(".writing-*"))


def again(world, folder: str) -> None:
    write(world, Path(folder, "step-00000002"), "gpt", "shard")


def test_every_part_has_a_checksum(from2):
    source = from2
    parts = sorted(str(p.relative_to(source)) for p in source.rglob("*.safetensors"))
    assert len(parts) == 2 and {*parts, "config.json", "training.json"} == set(checksums.read(source))
    assert [checksums.damage(source, lambda names, rank=rank: names[rank::2], "training.json") for rank in range(2)] == [None, None]
    for name in (*parts, "config.json", "training.json"):
        file = source / name
        whole_file = file.read_bytes()
        for damaged in (None, b"", whole_file[:-9], whole_file[:-9] + b"123456789"):
            file.unlink() if damaged is None else file.write_bytes(damaged)
            problems = [checksums.damage(source, lambda names, rank=rank: names[rank::2], "training.json") for rank in range(2)]
            assert len(list(filter(None, problems))) == 1 and name in "".join(filter(None, problems))
            if name != "training.json":
                with pytest.raises(UserError, match=name):
                    models.load(source)
        file.write_bytes(whole_file)
    verify(None, source, "gpt", "none")


def test_a_damaged_or_foreign_checkpoint_is_told_by_name(from2):
    source = from2
    model = whole("gpt")
    with pytest.raises(UserError, match=r"momentum\.head\.weight not in it"):
        sharded.load(source, {"momentum.head.weight": model.head.weight})
    with pytest.raises(UserError, match=r"model\.norm\.weight is \(32,\) there and \(31,\) here"):
        sharded.load(source, {"model.norm.weight": torch.zeros(31)})
    files = sorted((source / "sharded").iterdir())
    whole_file = files[1].read_bytes()
    files[1].write_bytes(whole_file[:-10])
    (source / checksums.FILE).unlink()
    with pytest.raises(UserError, match="not a whole safetensors file"):
        models.load(source)
    files[1].unlink()
    with pytest.raises(UserError):
        models.load(source)
    files[1].write_bytes(whole_file)
    files[0].unlink()
    with pytest.raises(UserError, match=r"parts of .* are missing"):
        sharded.read(source)


# ---------------------------------------------------------------- out


EXPORTED = {"llama": {"n_experts": 3}}


def exports(world, folder: str) -> None:
    for family in ("gpt", "llama", "t5"):
        changes = EXPORTED.get(family, {})
        for layout in ("both", "shard"):
            model = lay_out(common.build(family, **changes), layout)
            sharded.export(dict(model.named_parameters()), model.config, Path(folder, f"{family}-{layout}"))
        # stages of a pipeline: every process has some parameters whole, the last one the head that is tied to the first one's table
        model = common.build(family, **changes)
        named = list(model.named_parameters())
        mine = {name: p for i, (name, p) in enumerate(named) if i * world.size // len(named) == world.rank}
        if family == "gpt" and world.rank == world.size - 1:
            mine["head.weight"] = model.head.weight
        sharded.export(mine, model.config, Path(folder, f"{family}-stages"), group=dist.group.WORLD)
    with pytest.MonkeyPatch.context() as patch:
        if world.rank == 0:
            patch.setattr("safetensors.torch.save_file", _full)
        with pytest.raises(EnvironmentFault, match="the disk is full"):
            sharded.export(mine, model.config, Path(folder, "full"), group=dist.group.WORLD)
    assert not Path(folder, "full").exists()


def _full(*args, **kwargs):
    raise OSError(28, "No space left on device")


@pytest.mark.slow
def test_a_live_model_is_written_as_a_gathered_one_would_be(tmp_path):
    distributed.run(4, exports, str(tmp_path))
    for family in ("gpt", "llama", "t5"):
        models.save(common.build(family, **EXPORTED.get(family, {})), tmp_path / family)
        expected = load_file(tmp_path / family / "model.safetensors")
        for layout in ("both", "shard", "stages"):
            found = tmp_path / f"{family}-{layout}"
            assert json.loads((found / "config.json").read_text()) == json.loads((tmp_path / family / "config.json").read_text())
            tensors = load_file(found / "model.safetensors")
            assert tensors.keys() == expected.keys() and all(torch.equal(tensors[k], expected[k]) for k in expected)


def text_checkpoint(world, folder: str) -> None:
    tokenizer = train_bpe(["to be or not to be"] * 3, 270)
    for family in ("gpt", "llama"):
        model = lay_out(common.build(family, vocab_size=tokenizer.vocab_size), "shard")
        tensors = {f"model.{name}": p for name, p in model.named_parameters()} | {"rng.cpu": torch.get_rng_state()}
        target = Path(folder, family, "checkpoints", "step-00000001")
        sharded.save(target, model.config, tensors, lambda aside: (note_beside(aside), tokenizer.save(aside))).finish()


def test_export_of_a_run_loads_in_transformers(by_two, tmp_path, capsys):
    transformers = pytest.importorskip("transformers")
    for family in ("gpt", "llama"):
        shutil.copytree(by_two[0] / family, tmp_path / family)
        run, to = tmp_path / family, tmp_path / f"{family}-out"
        assert main(["export", str(run), "--to", str(to), "--shard-gb", "2e-5"]) == 0
        out = capsys.readouterr().out
        assert str(run / "checkpoints" / "step-00000001") in out
        assert out.splitlines()[-1] == f"transformers loads this as {'GPT2LMHeadModel' if family == 'gpt' else 'LlamaForCausalLM'}"
        assert len(list(to.glob("model-*.safetensors"))) > 1
        theirs = transformers.AutoModelForCausalLM.from_pretrained(to).eval()
        ids = torch.tensor([transformers.AutoTokenizer.from_pretrained(to)("to be or not")["input_ids"]])
        ours = models.load(run).eval()
        with torch.no_grad():
            assert torch.allclose(theirs(ids).logits, ours(ids), atol=1e-5)
        # again, from what was exported: the same tensors
        assert main(["export", str(to), "--to", str(tmp_path / f"{family}-again")]) == 0
        once, twice = models.load(to), models.load(tmp_path / f"{family}-again")
        assert all(torch.equal(a, b) for a, b in zip(once.parameters(), twice.parameters(), strict=True))
    models.save(common.build("gpt", n_experts=4), tmp_path / "experts")
    assert main(["export", str(tmp_path / "experts"), "--to", str(tmp_path / "experts-out")]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("transformers does not know this architecture (experts in a GPT; set model.n_experts=null") and last.endswith("gradus loads it")
    step = tmp_path / "gpt" / "checkpoints" / "step-00000001"
    for to, why in ((step, "holds the checkpoint that is read"), (tmp_path / "gpt", "holds the checkpoint"), (tmp_path, "holds the checkpoint")):
        assert main(["export", str(step), "--to", str(to)]) == 2
        assert why in capsys.readouterr().err
    assert main(["export", str(tmp_path / "gpt-out"), "--to", str(step)]) == 2
    assert "a checkpoint of a run" in capsys.readouterr().err
