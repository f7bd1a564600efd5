"""Planted mistakes, one a line of LIST, and the test of `make test` that sees each: what a faster test must not lose.

python tests/mutations.py            tries all, in a copy of src, and says which were not caught (exit code 1)
python tests/mutations.py 3 17       these alone
python tests/mutations.py plan ddp   those of a room or a layout
"""

from __future__ import annotations

import multiprocessing
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

import pytest

REPOSITORY = Path(__file__).resolve().parents[1]
ROOMS = ("layers", "recipe", "hardware", "models", "data", "parallel", "tasks", "train", "measure", "infer", "plan", "proof", "report", "launch", "cli", "api", "rows", "files")  # fmt: skip
LAYOUTS = (
    "ddp", "shard", "tensor", "sequence parallel", "pipeline", "context", "expert", "local updates", "accumulation",
    "full checkpointing", "attention checkpointing", "compile", "bf16", "pure bf16", "fp16",
)  # fmt: skip


class Mutation(NamedTuple):
    """`old`, which stands once in src/gradus/`file`, becomes `new`. layout: of LAYOUTS, where it is of one. test: below tests/."""

    file: str
    old: str
    new: str
    test: str
    layout: str = ""


M = Mutation
LIST = (
    # ---- layouts
    M("parallel/replicate.py", "self.scale = float(dist.get_world_size(group))", "self.scale = 1.0",
      "parallel/test_layouts.py::test_one_layout_of_each_axis", "ddp"),
    M("parallel/gloo.py", "output_tensor += part", "output_tensor -= part",
      "parallel/test_shard.py::test_gathers_and_scatters_are_gloos", "shard"),
    M("parallel/shard.py", "module.set_gradient_divide_factor(1.0)", "module.set_gradient_divide_factor(2.0)",
      "parallel/test_layouts.py::test_one_layout_of_each_axis", "shard"),
    M("parallel/shard.py", "and sum(m.weight is other.weight for other in layers) == 1]", "]",
      "parallel/test_shard.py::test_ends", "shard"),
    M("parallel/tensor.py", ".masked_fill(elsewhere[..., None], 0.0)", "",
      "parallel/test_layouts.py::test_one_layout_of_each_axis", "tensor"),
    M("parallel/tensor.py", "head.weight = tied.weight", "pass",
      "parallel/test_layouts.py::test_one_layout_of_each_axis", "tensor"),
    M("parallel/tensor.py", "dist.all_reduce(flat, group=parameters[0].device_mesh.get_group())", "pass",
      "parallel/test_layouts.py::test_one_layout_of_each_axis", "sequence parallel"),
    M("parallel/engine.py", "            self.pipeline.reduce_tied()", "            pass",
      "parallel/test_layouts.py::test_one_layout_of_each_axis", "pipeline"),
    M("parallel/pipeline.py", "(result if int(index) < run.n_real else result * 0.0)", "result",
      "parallel/test_pipeline.py::test_evaluation_heads_few_batches_checkpointing_and_autocast", "pipeline"),
    M("parallel/context.py", "total = torch.logaddexp(before, part_lse)", "total = torch.maximum(before, part_lse)",
      "parallel/test_layouts.py::test_one_layout_of_each_axis", "context"),
    M("parallel/context.py", "if self.causal and j > i:", "if self.causal and j >= i:",
      "parallel/test_layouts.py::test_one_layout_of_each_axis", "context"),
    M("parallel/expert.py", "return all_to_all(rows[order.argsort()], to, back, self.group)",
      "return all_to_all(rows[order], to, back, self.group)",
      "parallel/test_expert.py::test_experts_on_two_processes", "expert"),
    M("parallel/replicate.py", "return step % self.every == 0 or step == self.last_step", "return True",
      "train/test_metrics.py::test_workers_sync_every_so_many_steps_and_count_then", "local updates"),
    M("parallel/engine.py", "self.replicas.sync_on(i == len(micro_batches) - 1)", "self.replicas.sync_on(True)",
      "parallel/test_fake.py::test_replicas_sum_on_the_last_micro_batch_alone", "accumulation"),
    M("train/step.py", "sums[kind] / counts[kind] for kind", "sums[kind] / batch['counts'][kind] / len(micro_batches) for kind",
      "train/test_step.py::test_accumulation_gives_one_loss_and_one_gradient", "accumulation"),
    M("parallel/apply.py", 'kind = Attention if mode == "attention" else Block', "kind = Attention",
      "parallel/test_apply.py::test_checkpointing_keeps_less", "full checkpointing"),
    M("parallel/apply.py", 'kind = Attention if mode == "attention" else Block', "kind = Block",
      "parallel/test_apply.py::test_checkpointing_keeps_less", "attention checkpointing"),
    M("parallel/apply.py", 'return bool(shutil.which(os.environ.get("CXX") or ("clang++" if sys.platform == "darwin" else "g++")))', "return True",
      "proof/test_optimizations.py::test_what_cannot_be_had_is_left_out", "compile"),
    M("parallel/precision.py", "return torch.autocast(self.device.type, self.dtype)", "return contextlib.nullcontext()",
      "train/test_step.py::test_half_precision_follows_fp32", "bf16"),
    M("parallel/precision.py", "return model.to(self.dtype) if self.pure else model", "return model",
      "parallel/test_precision.py::test_pure_half_casts_the_weights", "pure bf16"),
    M("parallel/precision.py", "return self.scaler.scale(loss) if self.scaler else loss", "return loss",
      "train/test_step.py::test_fp16_scales_its_loss", "fp16"),
    M("parallel/engine.py", "squares = [self.sum(norms[axes].float() ** 2, *axes) for axes in sorted(norms)]",
      "squares = [norms[axes].float() ** 2 for axes in sorted(norms)]",
      "parallel/test_layouts.py::test_one_layout_of_each_axis", "shard"),
    M("models/values.py", "values[name].part(offset, shape)", "values[name].part((0,) * len(offset), shape)",
      "parallel/test_materialise.py::test_every_process_has_the_numbers_that_one_would_have"),
    # ---- rooms
    M("layers/masks.py", "same = segments[:, None, :, None] == segments", "same = segments[:, None, :, None] >= segments",
      "models/test_gpt.py::test_packed_equals_unpacked"),
    M("layers/positions.py", "offset = (distance < 0).long() * n_buckets", "offset = (distance > 0).long() * n_buckets",
      "layers/test_positions.py::test_relative_buckets_are_t5s"),
    M("layers/moe.py", "weights = weights / weights.sum(-1, keepdim=True)", "weights = weights * 1.0",
      "layers/test_moe.py::test_as_a_loop_over_tokens"),
    M("layers/cache.py", "device=positions.device) <= positions[:, None, :, None]", "device=positions.device) < positions[:, None, :, None]",
      "layers/test_attention.py::test_cache_equals_no_cache_for_ragged_rows"),
    M("recipe/axes.py", "for nearer in AXES[i + 1 :]", "for nearer in AXES[i:]",
      "plan/test_cut.py::test_a_cut_is_near_what_is_traced_in_its_place"),
    M("recipe/conflicts.py", "return (word(value) in self.values) != self.negated", "return word(value) in self.values",
      "recipe/test_check.py::test_what_does_not_fit_together_is_named_with_the_fix"),
    M("hardware/units.py", '"Gb/s": 1e9 / 8', '"Gb/s": 1e9', "hardware/test_units.py::test_quantities"),
    M("hardware/units.py", "if not math.isfinite(number) or number <= 0:", "if not math.isfinite(number):",
      "hardware/test_kinds.py::test_a_wrong_entry_is_named"),
    M("models/decoding.py", "start = (lengths - window).clamp_min(0)", "start = (lengths - window + 1).clamp_min(0)",
      "models/test_decoding.py::test_a_sliding_window_reads_the_last_tokens_as_if_they_were_the_first"),
    M("data/loader.py", "SeedSequence([seed, epoch], spawn_key=(index,))", "SeedSequence([seed, epoch])",
      "data/test_loader.py::test_what_is_drawn_depends_on_seed_epoch_and_index_alone"),
    M("data/collate.py", "keep = np.arange(longest if to is None else to) < lengths[:, None]",
      "keep = np.arange(longest if to is None else to) <= lengths[:, None]", "data/test_collate.py"),
    M("tasks/base.py", 'return metric in ("accuracy", "next_sentence_accuracy", "exact_match", "bleu")',
      'return metric in ("accuracy", "exact_match", "bleu")', "train/test_step.py::test_more_next_sentences_right_is_better"),
    M("tasks/masked_lm.py", "random = chosen[roll >= 0.9]", "random = chosen[roll >= 0.8]", "train/test_golden.py"),
    M("train/schedule.py", "min(step**-0.5, step * warmup**-1.5)", "max(step**-0.5, step * warmup**-1.5)",
      "train/test_schedule.py::test_schedules_equal_transformers_and_the_paper"),
    M("train/optim.py", 'return parameter.ndim >= 2 and not special and not name.endswith("bias")', 'return parameter.ndim >= 1 and not name.endswith("bias")',
      "train/test_step.py::test_step_equals_a_plain_pytorch_loop"),
    M("train/checkpoint.py", "candidates.append((value if higher else -value, evaluated", "candidates.append((value, evaluated",
      "train/test_checkpoint.py::test_best_after_a_kill_is_what_was_evaluated"),
    M("measure/energy.py", '.startswith(("package", "dram"))', '.startswith(("package", "dram", "core"))',
      "measure/test_energy.py::test_rapl_adds_packages_and_memory_and_nothing_twice"),
    M("measure/flops.py", "return operations / tokens", "return operations / len(chosen)",
      "measure/test_flops.py::test_a_run_is_counted_by_its_own_tokens"),
    M("infer/generate.py", "fitting = context - longest + 1", "fitting = context - longest",
      "infer/test_generate.py::test_the_room_left_is_used_and_said"),
    M("layers/small.py", "return (weight / scale[:, None]).round()", "return (weight / scale[:, None] / 8).round().mul(8).clamp(-127, 127)",
      "infer/test_quantize.py::test_a_head_that_shares_its_weight_with_the_embedding"),  # fewer bits
    M("layers/lora.py", "self.a(self.dropout(x)) * self.scale", "self.a(self.dropout(x))", "models/test_peft.py::test_peft_reads_ours"),
    M("models/adapt.py", "linear.scale * linear.b", "linear.b", "models/test_peft.py::test_what_is_saved_is_loaded_and_merged"),
    M("models/adapt.py", "parameter.requires_grad_(name not in frozen)", "parameter.requires_grad_(True)",
      "parallel/test_adapters.py::test_at_first_it_is_the_base_and_the_base_stays"),
    M("parallel/tensor.py", "(grad_placements=(Partial(),))) * module.scale", "()) * module.scale",
      "parallel/test_adapters.py::test_one_layout_of_each_axis", "tensor"),
    M("layers/word_loss.py", "shift - (1 - smoothing) * here", "shift - here", "parallel/test_chunked_loss.py::test_loss_and_gradients_are_those_of_whole_logits"),
    M("infer/quantized.py", "self.step, self.zero = float(step), int(zero)", "self.step, self.zero = float(step), 0",
      "infer/test_quantize.py::test_static_computes_what_training_saw"),
    M("plan/collectives.py", '{"all_reduce": 2 * part, "send": 1.0', '{"all_reduce": part, "send": 1.0',
      "plan/test_step.py::test_an_all_reduce_between_nodes_by_hand"),
    M("plan/step.py", "share = (stages - 1) / max(micro_batches, 1)", "share = stages / max(micro_batches, 1)",
      "plan/test_step.py::test_bubble"),
    M("plan/compose.py", "return layout.shard if expert else layout.shard * layout.expert * layout.context", "return layout.shard",
      "plan/test_compose.py::test_a_process_holds_its_part_of_a_parameter"),
    M("plan/engine.py", "return max(traffic.assign_owners(every, replicas)) if", "return min(traffic.assign_owners(every, replicas)) if",
      "plan/test_engine.py::test_of_replicas_that_step_a_part_each_that_which_steps_most_is_planned"),
    M("plan/pass_tracing.py", "layer.k.numel() + layer.v.numel()", "layer.k.numel()", "plan/test_serving.py::test_a_cache_has_keys_and_values_of_the_key_heads_alone"),
    M("plan/budget.py", "joules = device_hours * HOUR * watts * pue", "joules = device_hours * HOUR * watts",
      "plan/test_budget.py::test_published_energy_and_carbon_are_their_own_book_keeping"),
    M("proof/memory_budget.py", "-(-processes // local_processes) if kind", "processes if kind",
      "proof/test_run_energy.py::test_a_host_has_one_set_of_processors_and_each_process_a_gpu"),
    M("proof/ladder_search.py", "faster = trial.low > 1 and trial.ratio >= 1 + MARGIN and not longer", "faster = trial.ratio >= 1 + MARGIN and not longer",
      "proof/test_ladder_search.py::test_what_pays"),
    M("proof/pairs.py", "(self.predicted - self.measured) / self.measured", "(self.predicted - self.measured) / self.predicted",
      "proof/test_prove.py::test_several_runs_are_one_table"),
    M("proof/timing.py", "return done or steps >= 10 * self.steps", "return done", "proof/test_timing.py::test_a_window_has_enough_by_number_and_time"),
    M("report/look.py", "alike[range(len(ids)), ids] = -2", "alike[range(len(ids)), ids] = 2", "report/test_look.py::test_nearest_words"),
    M("report/look.py", "data[sample]", "data[0]", "report/test_look.py::test_a_sample_is_an_image_of_the_runs_validation_split"),
    M("report/runs.py", 'steps=max((rows[-1]["step"]', 'steps=min((rows[0]["step"]',
      "report/test_report.py::test_an_unfinished_run_shows_where_it_stands_under_its_recipe"),
    M("launch/slurm.py", "return ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds",
      "return ((int(days or 0) + hours) * 60 + minutes) * 60 + seconds", "launch/test_slurm.py::test_time_limits"),
    M("launch/slurm.py", "for code, why in ((128 + _signal(args)[0], saved),", "for code, why in ((_signal(args)[0], saved),",
      "launch/test_slurm.py::test_what_the_script_does"),
    M("cli.py", "return exit_code(e)\n    except MemoryError", "return 2\n    except MemoryError",
      "test_cli.py::test_a_fault_of_the_machine_has_an_exit_code_of_its_own"),
    M("api.py", "kwargs[name] = value.bool()", "kwargs[name] = value",
      "test_api.py::test_attention_mask_means_what_it_does_in_transformers"),
    M("rows.py", "os.truncate(self.path, min(position, self.path.stat().st_size))", "pass",
      "train/test_checkpoint.py::test_a_run_goes_on_from_the_checkpoint_before_the_damaged_one"),
    M("files.py", "os.fsync(handle)", "pass", "test_files.py::test_a_folder_is_on_the_disk_before_it_has_its_name"),
)  # fmt: skip


def room(mutation: Mutation) -> str:
    return mutation.file.split("/")[0].removesuffix(".py")


def caught(mutation: Mutation, copy: Path) -> bool:
    """Whether the test fails where src is `copy`, with the mistake in it. In a fork, which has the large libraries already."""
    file = copy / "gradus" / mutation.file
    text = file.read_text(encoding="utf-8")
    file.write_text(text.replace(mutation.old, mutation.new), encoding="utf-8")
    child = multiprocessing.get_context("fork").Process(target=run_test, args=(mutation.test, copy))
    child.start()
    child.join()
    file.write_text(text, encoding="utf-8")
    return child.exitcode == pytest.ExitCode.TESTS_FAILED


def run_test(name: str, copy: Path) -> None:
    os.environ.update(PYTHONPATH=str(copy), GRADUS_CACHE=str(copy / "cache"), PYTHONDONTWRITEBYTECODE="1")  # of a file that comes back
    sys.path.insert(0, str(copy))
    sys.dont_write_bytecode = True
    os.chdir(REPOSITORY)
    with open(copy / "log", "w") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
        os._exit(pytest.main(["-x", "-m", "not slow and not docs", "-p", "no:cacheprovider", f"tests/{name}"]))


def main(words: list[str]) -> int:
    import torch.distributed.fsdp  # noqa: F401  (for the forks)

    known = {word for number, m in enumerate(LIST, 1) for word in (str(number), room(m), m.layout) if word}
    if unknown := set(words) - known:
        sys.exit(f"{', '.join(sorted(unknown))}: not a number, room or layout of the list: {', '.join(sorted(known))}")
    missed = 0
    with tempfile.TemporaryDirectory() as folder:
        copy = shutil.copytree(REPOSITORY / "src", Path(folder) / "src")
        for number, mutation in enumerate(LIST, 1):
            if words and not {str(number), room(mutation), mutation.layout} & set(words):
                continue
            fine = caught(mutation, copy)
            missed += not fine
            print(f"{number:3} {'caught' if fine else 'NOT CAUGHT'}: {mutation.layout or room(mutation)}: {mutation.file}, {mutation.test}", flush=True)
    print(f"{missed} not caught")
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
