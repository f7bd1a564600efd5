"""Every private part of PyTorch does what it is used for, and no other file of Gradus names one.

After a change of PyTorch's version this file says which entry of gradus/torch_private.py no longer holds.
"""

from __future__ import annotations

import ast
import datetime
import importlib
import itertools
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard

import gradus
from gradus import torch_private
from gradus.parallel.fake import fake_world

SOURCE = Path(gradus.__file__).parent
VERSION = ".".join(torch.__version__.split(".")[:2])


def test_version():
    low, high = (tuple(map(int, v.split("."))) for v in torch_private.TESTED)
    assert low <= tuple(map(int, VERSION.split("."))) <= high, (
        f"PyTorch {VERSION}: gradus/torch_private.py was tested on {' and '.join(torch_private.TESTED)}. "
        "Run this file, mend what fails, and move TESTED and the bounds in pyproject.toml."
    )


# ---------------------------------------------------------------- nobody else

OTHERS = {  # private names of other libraries
    "_subparsers", "_group_actions", "_actions", "_fingerprint", "_replace", "_run_finalizers",
}  # fmt: skip


def private_names(nodes: list[ast.AST]) -> list[tuple[int, str]]:
    """(line, name) of attributes and imports that begin with one underscore, but of self, cls and super()."""
    found = []
    for node in nodes:
        if isinstance(node, ast.Attribute):
            private = node.attr.startswith("_") and ast.unparse(node.value) not in ("self", "cls", "super()", "os")
            names = [node.attr] if private else []
        elif isinstance(node, ast.ImportFrom):
            names = [*(node.module or "").split("."), *(a.name for a in node.names)]
        elif isinstance(node, ast.Import):
            names = [part for a in node.names for part in a.name.split(".")]
        else:
            continue
        found += [(node.lineno, name) for name in names if name.startswith("_") and not name.startswith("__")]
    return found


def test_no_other_file_names_a_private_part():
    texts = {file: file.read_text() for file in SOURCE.rglob("*.py") if file.name != "torch_private.py"}
    nodes = {file: list(ast.walk(ast.parse(text))) for file, text in texts.items()}
    ours = set()
    for node in itertools.chain.from_iterable(nodes.values()):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            ours.add(node.name)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and isinstance(node.value, ast.Name) and node.value.id == "self":
            ours.add(node.attr)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            ours.add(node.target.id)
    found = [
        f"{file.relative_to(SOURCE)}:{line}: {name}"
        for file, of_file in sorted(nodes.items())
        for line, name in private_names(of_file)
        if name not in ours | OTHERS
    ]
    assert not found, "private parts of PyTorch belong into gradus/torch_private.py, each with what it is for"
    assert not [file for file, text in texts.items() if "torch.testing" in text or ".testing._internal" in text]


def test_it_imports_nothing_that_torch_does_not():
    code = "import sys, torch; had = set(sys.modules); import gradus.torch_private; print(*sorted(set(sys.modules) - had))"
    new = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert new == ["gradus", "gradus.torch_private"]


def test_the_command_line_starts_without_torch():
    code = "import sys, gradus.__main__, gradus.cli; gradus.cli.parser(); sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


# ---------------------------------------------------------------- operators


@pytest.mark.parametrize("name", [name for name, value in vars(torch_private).items() if name.isupper() and "OpOverload" in type(value).__name__])
def test_operators_are_there(name):
    operator = getattr(torch_private, name)
    assert torch_private.schema(getattr(operator, "default", operator)).name.startswith("aten::_")


class Seen(torch_private.TorchDispatchMode):
    """What runs: names, and whether a backward pass and one of its nodes run it."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        at = torch_private.in_backward(), torch_private.has_autograd_node()
        self.found.append((torch_private.schema(function).name.split("::")[1], *at))
        return function(*args, **(kwargs or {}))


def test_a_mode_sees_every_operator_and_where_it_runs():
    x = torch.ones(2, 2, requires_grad=True)
    with Seen() as seen:
        y = x.exp().sum()
        y.backward()
        with torch_private.without_dispatch():
            torch.ones(3).sin_()
    assert ("exp", False, False) in seen.found and ("mul", True, True) in seen.found
    assert "sin_" not in [name for name, *_ in seen.found]


def test_attention_on_a_cpu_runs_the_operators_that_are_named():
    assert {op.__name__.startswith(torch_private.ATTENTION_PREFIX) for op in torch_private.FUSED_ATTENTION} == {True}
    q = torch.randn(1, 2, 4, 8, requires_grad=True)
    with Seen() as seen:
        nn.functional.scaled_dot_product_attention(q, q, q).sum().backward()
    names = [name for name, *_ in seen.found]
    assert torch_private.FLASH_CPU.__name__ in names and torch_private.FLASH_CPU_BACKWARD.__name__ in names
    with torch_private.FakeTensorMode():  # as the plan has a GPU's: shapes alone
        half = torch.empty(1, 2, 4, 8, dtype=torch.bfloat16)
        assert torch_private.FLASH(half, half, half, 0.0, True, False, scale=None)[0].shape == half.shape
        assert torch_private.EFFICIENT(half, half, half, None, True, 0.0, True, scale=None)[0].shape == half.shape


# ---------------------------------------------------------------- tensors and modules


def test_fake_tensors_have_shapes_and_no_memory():
    with torch_private.FakeTensorMode():
        x = torch.empty(10**9, 10**6)
        assert isinstance(x, torch_private.FakeTensor) and (x @ x[0]).shape == (10**9,)
        with torch_private.unset_fake_temporarily():
            assert int(torch.ones(2).sum()) == 2


def test_memory_is_told_apart():
    with torch_private.FakeTensorMode():
        x, y = torch.empty(4), torch.empty(4)
        assert torch_private.memory_id(x) == torch_private.memory_id(x[1:]) == torch_private.storage_id(x.untyped_storage())
        assert torch_private.memory_id(x) != torch_private.memory_id(y)


def test_leaves_are_found_in_nested_arguments():
    assert torch_private.tree_leaves((1, [2, {"a": 3}])) == [1, 2, 3]


def test_the_scaler_tells_its_infinities():
    weight = nn.Parameter(torch.ones(2))
    optimizer, scaler = torch.optim.SGD([weight]), torch.amp.GradScaler("cpu")
    weight.grad = scaler.scale(torch.tensor([1.0, float("inf")]))
    scaler.unscale_(optimizer)
    assert [float(found) for found in torch_private.infinities(scaler, optimizer)] == [1.0]


def test_fakes_are_as_the_constructor_makes_them():
    """Every attribute, and what PyTorch reads of a tensor: its device, and that its memory is not to be read."""
    cpu = torch.device("cpu")
    with torch_private.FakeTensorMode() as mode:
        fake = torch_private.fakes(mode, cpu)
        with torch_private.without_dispatch():
            plain = torch.empty_strided((4, 3), (1, 4), dtype=torch.bfloat16, device="meta")
        made, theirs = fake(plain), torch_private.FakeTensor(mode, plain, cpu)
        assert vars(made) == vars(theirs) and type(made) is type(theirs) and vars(made) is not vars(fake(plain))
        for t in (made, theirs):
            assert (t.device, t.shape, t.stride(), t.dtype, t.requires_grad) == (cpu, (4, 3), (1, 4), torch.bfloat16, False)
            assert (t @ t.T).shape == (4, 4) and torch_private.memory_id(t) == torch_private.memory_id(plain)
            with pytest.raises(RuntimeError, match="data pointer"):
                t.data_ptr()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
def test_a_gpu_is_kept_busy():
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    torch_private.keep_gpu_busy(10_000_000)
    end.record()
    end.synchronize()
    assert begin.elapsed_time(end) > 1


# ---------------------------------------------------------------- processes


@pytest.fixture
def world():
    with fake_world(4, rank=1) as world:
        yield world


def test_groups_are_found_by_object_and_name(world):
    group = dist.new_group([0, 1])
    assert torch_private.group_of(group.group_name).size() == 2
    assert torch_private.group_of("no such group") is None and torch_private.group_of(3) is None
    found = []

    class Arguments(torch_private.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            found.extend(torch_private.group_of(a) for a in args)
            return function(*args, **(kwargs or {}))

    with Arguments():
        dist.all_reduce(torch.zeros(1), group=group)
    assert [g.size() for g in found if g is not None] == [2]


def test_processes_leave_notes_in_the_store(world):
    store = torch_private.default_store()
    assert hasattr(store, "set") and hasattr(store, "check") and hasattr(store, "wait")


def test_a_group_waits_as_long_as_it_is_told():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        torch_private.set_timeout(dist.group.WORLD, 7.0)
        assert dist.group.WORLD._get_backend(torch.device("cpu")).options._timeout.total_seconds() == 7.0
        torch_private.abort_nccl(dist.group.WORLD)  # gloo's, which does nothing
    finally:
        dist.destroy_process_group()


def test_a_group_after_one_that_could_not_be_made_has_the_first_name():
    """Else it would never find processes whose groups have all been made."""
    store = dist.HashStore()
    with pytest.raises(RuntimeError):
        dist.init_process_group("gloo", store=dist.PrefixStore("a", store), rank=0, world_size=2, timeout=datetime.timedelta(seconds=1))
    torch_private.leave_group()
    dist.init_process_group("gloo", store=dist.PrefixStore("b", store), rank=0, world_size=1)
    try:
        assert dist.group.WORLD.group_name == "0"
    finally:
        torch_private.leave_group()
    assert not dist.is_initialized()


def test_meshes(world):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    assert torch_private.flatten_mesh(mesh["a", "b"], "ab").size() == 4
    shape, offset = torch_private.local_shape_and_offset(torch.Size([5]), mesh["b"], (Shard(0),))
    assert (tuple(shape), tuple(offset)) == ((2,), (3,))
    torch_private.quiet_redistribution()
    assert importlib.import_module("torch.distributed.tensor._redistribute").logger.getEffectiveLevel() >= 40
    DTensor.from_local(torch.ones(2), mesh["a"], [Shard(0)]).sum()
    torch_private.forget_meshes()


def test_rows_travel_there_and_gradients_back(world):
    x = torch.ones(4, 3, requires_grad=True)
    out = torch_private.all_to_all(x, [1, 2, 1, 1], [1, 1, 1, 1], dist.group.WORLD)
    assert out.shape == (5, 3)
    out.sum().backward()
    assert x.grad.shape == x.shape
    whole = torch_private.all_gather(x, 1, dist.group.WORLD)
    assert whole.shape == (4, 12)
    whole.sum().backward()
    assert x.grad.shape == x.shape
    counts = torch_private.all_to_all(torch.ones(4, dtype=torch.long), None, None, dist.group.WORLD)
    assert torch_private.is_awaited(type(counts)) and counts.add(0).shape == (4,) and not torch_private.is_awaited(torch.Tensor)


def test_fsdp_cuts_as_it_is_replaced():
    owner, name = torch_private.chunking_of_fsdp()
    assert [len(part) for part in getattr(owner, name)(torch.zeros(5), 4, 0)] == [2, 2, 1, 0]


def test_fsdp_keeps_whole_gradients_where_they_are_looked_for(world):
    layer = nn.Linear(4, 4)
    fully_shard(layer, mesh=init_device_mesh("cpu", (4,)))
    assert len(list(torch_private.fsdp_parameters(layer))) == 2 and not list(torch_private.unsharded_gradients(layer))
    layer.set_requires_gradient_sync(False)
    layer(torch.ones(1, 4)).sum().backward()
    assert sorted(g.shape for g in torch_private.unsharded_gradients(layer)) == [(4,), (4, 4)]


def test_buckets_of_ddp():
    assert torch_private.ddp_buckets([torch.zeros(10), torch.zeros(10), torch.zeros(10)], 80) == [[0, 1], [2]]


def test_pipelines_are_told_what_they_would_vote_on():
    from torch.distributed.pipelining import PipelineStage

    stage = PipelineStage.__new__(PipelineStage)
    if votes := torch_private.shape_votes():
        assert callable(getattr(*votes))
        torch_private.set_shapes_known(stage)
        assert stage._inference_mode.name == "STATIC"
    else:
        assert VERSION == "2.11" and hasattr(PipelineStage, "_get_init_p2p_neighbors_ops")
    torch_private.send_nothing_ahead(stage)
    assert stage._get_init_p2p_neighbors_ops() == []


@pytest.mark.parametrize("path", torch_private.REPLACED)
def test_methods_that_are_replaced_are_there(path):
    module, _, kind = path.rpartition(".")
    owner = getattr(importlib.import_module(module), kind)
    assert [name for name in torch_private.REPLACED[path] if not callable(getattr(owner, name, None))] == []


@pytest.mark.skipif(not torch_private.has_fbgemm(), reason="this PyTorch has no FBGEMM")
def test_integer_products_of_a_linear():
    """Where inputs and weights are whole numbers the product is exact, and the engine stays what it was."""
    weight, bias = torch.randint(-127, 128, (16, 32), dtype=torch.int8), torch.randn(16)
    x = torch.randint(0, 128, (3, 32)).float()
    x[:, :2] = torch.tensor([0.0, 127.0])
    before = torch.backends.quantized.engine
    packed = torch_private.linear_pack(weight, torch.full((16,), 0.5), bias)
    wanted = x @ (0.5 * weight.float()).t() + bias
    torch.testing.assert_close(torch_private.linear_static(x, 1.0, 0, packed), wanted)
    torch.testing.assert_close(torch_private.linear_dynamic(x, packed, True), wanted)
    assert torch.backends.quantized.engine == before


def test_products_of_few_bits():
    """Numbers that bf16 holds exactly, so that only the result is rounded."""
    x = torch.randint(-4, 5, (1, 64)).bfloat16()
    weight, scale = torch.randint(-8, 8, (32, 64), dtype=torch.int8), torch.full((32,), 0.5).bfloat16()
    wanted = x.float() @ weight.float().t() * 0.5
    torch.testing.assert_close(torch_private.int8_product(x, weight, scale).float(), wanted, rtol=1e-2, atol=1e-2)
    groups = torch.tensor([0.5, 0.0]).expand(2, 32, 2).contiguous().bfloat16()  # (groups, out, scale and middle)
    packed = torch_private.int4_pack(weight.int() + 8)
    torch.testing.assert_close(torch_private.int4_product(x, packed, 32, groups).float(), wanted, rtol=1e-2, atol=1e-2)
