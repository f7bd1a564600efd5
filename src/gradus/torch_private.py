"""The private parts of PyTorch that Gradus uses: no other file of it names one.

What begins with an underscore (and torch.testing) may change in any release. Each entry here says what it is for.
All were tested on the releases in TESTED, where an entry does not say otherwise; tests/test_torch_private.py tests
them one by one, and that no other file names a private part. Before `torch<2.15` in pyproject.toml moves, run it.

This file imports what `import torch` imports anyway; all else is imported where it is used.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import io
import logging
import warnings
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo as uncompiled
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

if TYPE_CHECKING:
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh

TESTED = ("2.11", "2.14")

__all__ = [
    "FakeTensor",  # a tensor of a shape without memory
    "FakeTensorMode",  # makes all tensors fake: the plan traces a step in it
    "TorchDispatchMode",  # sees every operator that runs: the plan's recorder, the counter of what travels
    "tree_leaves",  # the tensors in an operator's arguments
    "uncompiled",  # torch.compiler.disable, which imports the compiler (half a second) when it is called first
    "unset_fake_temporarily",  # for what must have values although all tensors are fake
]

# ---------------------------------------------------------------- operators

_aten = torch.ops.aten
FLASH_CPU = _aten._scaled_dot_product_flash_attention_for_cpu
FLASH_CPU_BACKWARD = _aten._scaled_dot_product_flash_attention_for_cpu_backward
FLASH = _aten._scaled_dot_product_flash_attention
int8_product = torch._weight_int8pack_mm  # bf16 x (rows, in), int8 w (out, in), bf16 scale (out,) -> x @ w.T * scale
int4_product = torch._weight_int4pack_mm_for_cpu  # bf16 x, int4_pack's, inputs a group, (groups, out, 2) scale, middle
# A Linear's product in int8 with FBGEMM (Khudia et al. 2021), which needs AVX2: input (rows, in) fp32, linear_pack's.
# reduce_range: inputs of 7 bits. The second takes the step and the zero of inputs as well.
linear_dynamic = torch.ops.quantized.linear_dynamic  # (x, packed, reduce_range)
linear_static = torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32  # (x, step, zero, packed)
EFFICIENT = _aten._scaled_dot_product_efficient_attention
CUDNN = _aten._scaled_dot_product_cudnn_attention
FUSED_ATTENTION = (FLASH_CPU, FLASH, EFFICIENT, CUDNN)  # what scaled_dot_product_attention runs, forwards
ATTENTION_PREFIX = "_scaled_dot_product"  # how all of these are called, forwards and backwards


def int4_pack(numbers: Tensor) -> Tensor:
    """Of int32 (out, in), 0 to 15; in is a multiple of the group, out of 16. A processor's form."""
    return torch._convert_weight_to_int4pack_for_cpu(numbers, 1)


def linear_pack(weight: Tensor, scale: Tensor, bias: Tensor | None) -> Any:
    """Of int8 weight (out, in), scale (out,) and bias (out,): FBGEMM's form. With VNNI PyTorch would take oneDNN's,
    which linear_static does not know."""
    zero = torch.zeros_like(scale, dtype=torch.long)
    with warnings.catch_warnings():  # that quantized tensors will go, in 2.13: the products take no other
        warnings.simplefilter("ignore")
        numbers = torch._make_per_channel_quantized_tensor(weight, scale.double(), zero, 0)
    backend, before = torch.backends.quantized, torch.backends.quantized.engine
    try:
        backend.engine = "fbgemm"
        return torch.ops.quantized.linear_prepack(numbers, bias)
    finally:
        backend.engine = before


def has_fbgemm() -> bool:
    return "fbgemm" in torch.backends.quantized.supported_engines


def schema(operator: Any) -> torch.FunctionSchema:
    """Name and arguments of an operator: what a dispatch mode is given tells neither."""
    return operator._schema


def has_autograd_node() -> bool:
    """Whether the operator that runs belongs to a node of the backward pass: checkpointing computes again there."""
    return torch._C._current_autograd_node() is not None


def in_backward() -> bool:
    """Whether this thread runs a backward pass."""
    return torch._C._current_graph_task_id() >= 0


def without_dispatch() -> contextlib.AbstractContextManager:
    """Operators within are seen by no dispatch mode."""
    return torch._C._DisableTorchDispatch()


def fakes(mode: FakeTensorMode, device: torch.device) -> Callable[[Tensor], FakeTensor]:
    """FakeTensor(mode, ..., device) of plain meta tensors, four times faster: what its constructor sets is copied."""
    with without_dispatch():
        attributes = vars(FakeTensor(mode, torch.empty(0, device="meta"), device))

    def fake(plain: Tensor) -> FakeTensor:
        made = Tensor._make_subclass(FakeTensor, plain, False, dispatch_device=True, device_for_backend_keys=device)
        torch._C._set_throw_on_mutable_data_ptr(made)
        vars(made).update(attributes)
        return made

    return fake


# ---------------------------------------------------------------- tensors and modules


def storage_id(storage: torch.UntypedStorage) -> int:
    """The same for all views of one memory, also of fake tensors, whose data_ptr() is 0."""
    return storage._cdata


def memory_id(tensor: Tensor) -> int:
    """storage_id of the memory behind a plain tensor."""
    return tensor.untyped_storage()._cdata


def infinities(scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """What unscale_ found, a tensor for each device, to be summed over processes: PyTorch has that for FSDP1 alone."""
    return list(scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"].values())


def keep_gpu_busy(cycles: int) -> None:
    """Occupies the current CUDA stream, so that what is launched next is timed without its launch."""
    torch.cuda._sleep(cycles)


# ---------------------------------------------------------------- processes and meshes


def default_store() -> dist.Store:
    """The store in which the processes met: they leave each other notes there that no collective would wait for."""
    from torch.distributed import distributed_c10d

    return distributed_c10d._get_default_store()


def set_timeout(group: dist.ProcessGroup, seconds: float) -> None:
    """How long the group's collectives wait from now on."""
    from torch.distributed import distributed_c10d

    distributed_c10d._set_pg_timeout(datetime.timedelta(seconds=seconds), group)


def leave_group() -> None:
    """Destroy the default group, or what is left of one that could not be made: the next one has the first name again,
    by which its processes find each other."""
    import torch.distributed as dist
    from torch.distributed import distributed_c10d

    if dist.is_initialized():
        with contextlib.suppress(RuntimeError):
            dist.destroy_process_group()
    distributed_c10d._world.group_count = 0


def abort_nccl(group: dist.ProcessGroup) -> None:
    """Who waits in a collective of this group's GPUs waits no more. gloo has no abort that does anything."""
    group._get_backend(torch.device("cuda")).abort()


def group_of(value: Any) -> dist.ProcessGroup | None:
    """The process group that an argument of a collective operator names, as an object or by its name; else None."""
    from torch.distributed import ProcessGroup, distributed_c10d

    with contextlib.suppress(RuntimeError, TypeError, ValueError, LookupError):
        if isinstance(value, torch.ScriptObject):
            return ProcessGroup.unbox(value)
        if isinstance(value, str):
            return distributed_c10d._resolve_process_group(value)
    return None


def flatten_mesh(mesh: DeviceMesh, name: str) -> DeviceMesh:
    """All axes of a mesh as one axis."""
    return mesh._flatten(name)


def quiet_redistribution() -> None:
    """No warning that gathering a weight which two axes split takes two steps."""
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)


def local_shape_and_offset(shape: torch.Size, mesh: DeviceMesh, placements: tuple) -> tuple[tuple, tuple]:
    """Shape of this process's part of a DTensor, and where it begins in the whole."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    return compute_local_shape_and_global_offset(shape, mesh, placements)


def all_to_all(x: Tensor, received: list[int] | None, sent: list[int] | None, group: dist.ProcessGroup) -> Tensor:
    """Rows of x to the processes of a group, differentiable: the public all_to_all_single is not. Waits when its result
    is used."""
    from torch.distributed import _functional_collectives

    if not x.is_floating_point():
        return _functional_collectives.all_to_all_single(x, received, sent, group)
    return _functional_collectives.all_to_all_single_autograd(x, received, sent, group)


def all_gather(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """The x of all processes of a group, one behind the other along `dim`, differentiable."""
    from torch.distributed import _functional_collectives as collectives

    name = "all_gather_single_autograd"
    if not hasattr(collectives, name):  # 2.11, whose name later releases warn of
        name = "all_gather_tensor_autograd"
    return getattr(collectives, name)(x.contiguous(), dim, group)


@functools.cache
def is_awaited(kind: type) -> bool:
    """Whether this is the type of a functional collective's result, for which nobody has waited yet."""
    from torch.distributed._functional_collectives import AsyncCollectiveTensor

    return issubclass(kind, AsyncCollectiveTensor)


# ---------------------------------------------------------------- a world of any size in one process


def join_fake(rank: int, size: int) -> None:
    """This process as one of many that are not there: collectives return at once. PyTorch's own tests trace with it."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)


def forget_meshes() -> None:
    """DTensor remembers results by meshes that compare equal, though they may be of groups that are no more."""
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache

    _clear_sharding_prop_cache()


def chunking_of_fsdp() -> tuple[Any, str]:
    """(owner, name) of FSDP2's function that cuts a parameter into as many parts as there are processes."""
    from torch.distributed.fsdp._fully_shard import _fsdp_param

    return _fsdp_param, "_chunk_with_empty"


def trying_of_dtensor() -> tuple[Any, str]:
    """(owner, name) of DTensor's method that runs an operator on whole tensors, once for each kind of
    arguments, to learn the shapes of its results."""
    from torch.distributed.tensor._sharding_prop import ShardingPropagator

    return ShardingPropagator, "_propagate_tensor_meta_non_cached"


def compile_anew(model: torch.nn.Module, backend: str) -> None:
    """One graph for each kind of arguments, and room for many. All processes have the same collectives in the same
    order: none is moved by sizes, which may be known on one of them alone. What was compiled before is forgotten."""
    import torch._dynamo.config as config

    torch.compiler.reset()
    # a DTensor is in the key with its whole shape: without the rank, one would take the graph of another's part
    torch.compiler.config.cache_key_tag = f"rank {torch.distributed.get_rank()}"
    config.recompile_limit = 64
    fixed = {"reorder_for_peak_memory": False} if backend == "inductor" else None
    model.compile(fullgraph=True, backend=backend, options=fixed)


def constant_for_compiler(function: Any) -> Any:
    """torch.compiler.assume_constant_result, without importing the compiler."""
    function._dynamo_marked_constant = True
    return function


def ddp_buckets(parameters: list[Tensor], bucket_bytes: int) -> list[list[int]]:
    """DDP's buckets: indices of parameters."""
    import torch.distributed as dist

    return dist._compute_bucket_assignment_by_size(parameters, [bucket_bytes])[0]


def fsdp_parameters(module: nn.Module) -> Iterator[Any]:
    """FSDP2's own records of the parameters that a module gathers."""
    state = module._get_fsdp_state()
    for group in getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]:  # 2.13; 2.11
        if group:
            yield from group.fsdp_params


def unsharded_gradients(module: nn.Module) -> Iterator[Tensor]:
    """What FSDP2 keeps whole from one micro-batch to the next, to reduce it once."""
    for record in fsdp_parameters(module):
        whole = getattr(record, "_unsharded_param", None)  # after the first gathering
        for gradient in (record.unsharded_accumulated_grad, whole.grad if whole is not None else None):
            if gradient is not None:
                yield gradient


# ---------------------------------------------------------------- pipelines


def shape_votes() -> tuple[Any, str] | None:
    """(owner, name) of what pipeline stages do first: vote on whether all know their shapes. 2.13 only; on 2.11
    None."""
    from torch.distributed.pipelining import schedules

    name = "_warmup_p2p"
    return (schedules._PipelineSchedule, name) if hasattr(schedules._PipelineSchedule, name) else None


def set_shapes_known(stage: Any) -> None:
    """What that vote would set where all stages know their shapes. 2.13 only."""
    from torch.distributed.pipelining.stage import InferenceMode

    stage._inference_mode = InferenceMode.STATIC


def send_nothing_ahead(stage: Any) -> None:
    """2.11 sends ahead to open NCCL's connections; gloo needs none, and a process has none to itself. 2.13 does not."""
    stage._get_init_p2p_neighbors_ops = list


# ---------------------------------------------------------------- programs compiled ahead


def compile_ahead(program: torch.export.ExportedProgram, options: dict[str, Any]) -> memoryview:
    """A program that torch.export made as machine code: what a .pt2 file holds. Raises RuntimeError without a
    compiler."""
    from torch._inductor import aoti_compile_and_package

    file = io.BytesIO()  # PyTorch ends the process where it writes to a full disk itself
    aoti_compile_and_package(program, package_path=file, inductor_configs=options)
    return file.getbuffer()


def load_ahead(path: str) -> Any:
    """What takes the inputs of such a file and gives its outputs."""
    from torch._inductor import aoti_load_package

    return aoti_load_package(path)


# ---------------------------------------------------------------- classes whose private methods Gradus replaces

REPLACED: dict[str, tuple[str, ...]] = {
    # plan.trace: nothing is compiled there, and hiding a mode from the compiler takes its time at every operator
    "torch.utils._python_dispatch.TorchDispatchMode": ("_should_skip_dynamo", "ignore_compile_internals"),
}


def schedule_of(
    name: str, processes: int, stages: int, micro_batches: int, rank: int
) -> Iterator[tuple[str, int, int]]:
    """(pass, stage, micro-batch) in the order in which a process of a pipeline runs them: forward, backward, or of
    schedules that split it backward (of the inputs) and weights.

    name: interleaved or zero_bubble. stages: of a process.
    """
    from torch.distributed.pipelining import schedules

    kinds = {
        ("interleaved", stages): schedules.ScheduleInterleaved1F1B,
        ("zero_bubble", 2): schedules.ScheduleZBVZeroBubble,
    }
    schedule = object.__new__(kinds.get((name, stages), schedules.ScheduleInterleavedZeroBubble))
    rounds = max(1, micro_batches // processes)
    schedule.__dict__.update(
        pp_group_size=processes, n_local_stages=stages, num_stages=processes * stages, _n_microbatches=micro_batches,
        number_of_rounds=rounds, microbatches_per_round=micro_batches // rounds,
    )  # fmt: skip
    passes = {
        "FORWARD": "forward", "FULL_BACKWARD": "backward", "BACKWARD_INPUT": "backward", "BACKWARD_WEIGHT": "weights",
    }  # fmt: skip
    for action in schedule._calculate_single_rank_operations(rank):
        if action is not None:
            yield passes[action.computation_type.name], action.stage_index, action.microbatch_index
