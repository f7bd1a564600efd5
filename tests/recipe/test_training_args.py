"""Hugging Face TrainingArguments read as a recipe's keys: what is mapped, and that nothing is passed over in silence."""

from __future__ import annotations

import dataclasses
import json

import pytest

from gradus.errors import UserError
from gradus.parallel import check
from gradus.recipe import load
from gradus.recipe.schema import Layout
from gradus.recipe.training_args import from_training_args

HANDS_ON = {
    "output_dir": "./output",
    "evaluation_strategy": "epoch",
    "num_train_epochs": 2,
    "per_device_train_batch_size": 16,
    "per_device_eval_batch_size": 16,
    "learning_rate": 5e-5,
    "fp16": False,
    "logging_strategy": "no",
    "save_strategy": "no",
    "report_to": "none",
    "disable_tqdm": True,
}


def test_arguments_may_stand_in_the_file_as_they_are(tmp_path):
    path = tmp_path / "arguments.json"
    path.write_text(json.dumps({**HANDS_ON, "zzzz": 3}))
    ours, notes = from_training_args(path)
    path.write_text(json.dumps({"TrainingArgs": {**HANDS_ON, "zzzz": 3}}))
    assert (ours, notes) == from_training_args(path)
    path.write_text(json.dumps({"max_steps": "many"}))
    with pytest.raises(UserError, match=r'arguments\.json: max_steps: expected a whole number, got "many"\.'):
        from_training_args(path)


@pytest.fixture
def read(tmp_path):
    """(what the file maps to, its notes)"""

    def read(*processes, **arguments):
        path = tmp_path / "config.json"
        path.write_text(json.dumps({"TrainingArgs": arguments}), encoding="utf-8")
        return from_training_args(path, *processes)

    return read


def test_the_hands_ons_file(read):
    ours, notes = read(**HANDS_ON)
    assert ours == {
        "log.dir": "./output", "train.epochs": 2, "optimizer.lr": 5e-5, "evaluate.batch": 16, "batch.samples": 16, "layout.micro_batch": 16,
        "layout.precision": "fp32", "evaluate.every": None, "train.checkpoint_every": None, "log.tensorboard": False, "log.wandb": None,
    }  # fmt: skip
    assert [note.split("=")[0] for note in notes] == ["per_device_train_batch_size", "logging_strategy", "save_strategy", "disable_tqdm"]
    recipe = load("imdb-bert", **ours)
    assert (recipe.train.epochs, recipe.batch.samples, recipe.log.dir, recipe.optimizer.lr) == (2.0, 16, "./output", 5e-5)
    assert load("imdb-bert", ["train.epochs=1", "layout.precision=bf16"], **ours).train.epochs == 1  # the command line wins


@pytest.mark.parametrize(
    ("arguments", "ours"),
    [
        ({"per_device_train_batch_size": 8, "gradient_accumulation_steps": 4}, {"batch.samples": 32, "layout.micro_batch": 8}),
        ({"max_steps": 100, "num_train_epochs": 3}, {"train.steps": 100}),
        ({"max_steps": -1, "num_train_epochs": 3}, {"train.epochs": 3}),
        ({"weight_decay": 0.1, "adam_epsilon": 1e-6, "adam_beta2": 0.95},
         {"optimizer.weight_decay": 0.1, "optimizer.eps": 1e-6, "optimizer.betas": [0.9, 0.95]}),
        ({"adam_beta1": 0.8}, {"optimizer.betas": [0.8, 0.999]}),
        ({"optim": "adamw_torch_fused"}, {"optimizer.name": "adamw"}),
        ({"optim": "sgd", "adam_beta1": 0.8, "adam_epsilon": 1e-8}, {"optimizer.name": "sgd"}),
        ({"max_grad_norm": 0.5}, {"train.clip_norm": 0.5}),
        ({"max_grad_norm": 0}, {"train.clip_norm": None}),
        ({"lr_scheduler_type": "cosine", "warmup_steps": 10}, {"schedule.name": "cosine", "schedule.final": 0.0, "schedule.warmup_steps": 10}),
        ({"lr_scheduler_type": "constant_with_warmup", "warmup_steps": 10}, {"schedule.name": "constant", "schedule.warmup_steps": 10}),
        ({"lr_scheduler_type": "constant", "warmup_steps": 10}, {"schedule.name": "constant", "schedule.warmup_steps": 0}),
        ({"warmup_ratio": 0.1, "max_steps": 101}, {"train.steps": 101, "schedule.warmup_ratio": 0.1}),
        ({"warmup_steps": 0.1, "max_steps": 101}, {"train.steps": 101, "schedule.warmup_ratio": 0.1}),
        ({"warmup_ratio": 0.1, "warmup_steps": 5, "max_steps": 100}, {"train.steps": 100, "schedule.warmup_steps": 5}),
        ({"warmup_ratio": 0.1}, {"schedule.warmup_ratio": 0.1}),
        ({"warmup_steps": 0}, {"schedule.warmup_steps": 0}),
        ({"fp16": True}, {"layout.precision": "fp16"}),
        ({"bf16": True, "fp16": False}, {"layout.precision": "bf16"}),
        ({"bf16": False}, {"layout.precision": "fp32"}),
        ({"tf32": True}, {"layout.tf32": True}),
        ({"eval_strategy": "steps", "eval_steps": 50}, {"evaluate.every": 50}),
        ({"eval_strategy": "steps", "logging_steps": 20}, {"evaluate.every": 20, "log.every": 20}),
        ({"eval_strategy": "steps"}, {"evaluate.every": 500}),
        ({"evaluation_strategy": "steps", "eval_steps": 0.25, "max_steps": 101}, {"train.steps": 101, "evaluate.every": 26}),
        ({"eval_strategy": "no"}, {}),
        ({"eval_strategy": False}, {}),
        ({"eval_on_start": True}, {"evaluate.at_start": True}),
        ({"logging_strategy": "steps", "logging_steps": 5}, {"log.every": 5}),
        ({"logging_steps": 7}, {"log.every": 7}),
        ({"save_strategy": "steps", "save_steps": 30, "save_total_limit": 1}, {"train.checkpoint_every": 30, "train.keep": 1}),
        ({"save_strategy": "epoch"}, {}),
        ({"report_to": "tensorboard"}, {"log.tensorboard": True, "log.wandb": None}),
        ({"report_to": ["wandb"], "project": "p"}, {"log.tensorboard": False, "log.wandb": "p"}),
        ({"report_to": "all"}, {"log.tensorboard": True, "log.wandb": "huggingface"}),
        ({"seed": 7}, {"train.seed": 7}),
        ({"label_smoothing_factor": 0.1}, {"task.label_smoothing": 0.1}),
        ({"dataloader_num_workers": 4, "dataloader_prefetch_factor": 3}, {"data.workers": 4, "data.prefetch": 3}),
        ({"dataloader_prefetch_factor": 3}, {}),
        ({"dataloader_pin_memory": False}, {"data.pin": False}),
        ({"gradient_checkpointing": True}, {"layout.checkpointing": "full"}),
        ({"torch_compile": True}, {"layout.compile": "default"}),
        ({"torch_compile_mode": "max-autotune"}, {"layout.compile": "max-autotune"}),
        ({"group_by_length": True}, {"data.pad": "bucket"}),
        ({"train_sampling_strategy": "group_by_length"}, {"data.pad": "bucket"}),
        ({"use_cpu": True}, {"layout.device": "cpu"}),
        ({"learning_rate": None, "max_grad_norm": None}, {}),
    ],
)  # fmt: skip
def test_what_is_mapped(read, arguments, ours):
    found, notes = read(**arguments)
    assert found == ours
    # what left no trace in the recipe has a note, unless it says the default of nothing
    silent = {"num_train_epochs", "max_steps", "warmup_ratio", "warmup_steps", "adam_beta1", "adam_epsilon"}
    if not ours and any(value is not None for value in arguments.values()):
        assert len(notes) == 1 and notes[0].startswith(next(iter(arguments)) + "=")
    elif not silent & set(arguments) and "per_device_train_batch_size" not in arguments:
        assert notes == []


@pytest.mark.parametrize(
    ("arguments", "note"),
    [
        ({"zzzz": [1]}, "zzzz=[1]: it has no counterpart here and is ignored"),
        ({"optim": "adafactor"}, "optim=adafactor: the recipe's stays. There are adamw, adam and sgd (optimizer.name)"),
        ({"optim": "adamw_torch_8bit"},
         "optim=adamw_torch_8bit: the recipe's stays. There are adamw, adam and sgd (optimizer.name)"),
        ({"lr_scheduler_type": "polynomial"},
         "lr_scheduler_type=polynomial: the recipe's stays. "
         "There are constant, linear, cosine and noam (schedule.name)"),
        ({"eval_strategy": "steps", "eval_steps": 0.1}, "eval_steps=0.1: the number of steps depends on the data. Set evaluate.every, or max_steps"),
        ({"gradient_accumulation_steps": 4},
         "gradient_accumulation_steps=4: it needs per_device_train_batch_size. Or set batch.samples and layout.micro_batch"),
        ({"report_to": "mlflow"},
         "report_to=mlflow: there are tensorboard and wandb; metrics.jsonl is always written"),
        ({"eval_steps": 5}, "eval_steps=5.0: no effect without eval_strategy=steps. Set evaluate.every"),
        ({"push_to_hub": True}, "push_to_hub=true: nothing is uploaded"),
        ({"use_liger_kernel": True},
         "use_liger_kernel=true: it has no counterpart here and is ignored"),
        ({"max_steps": 9, "num_train_epochs": 2}, "num_train_epochs=2: max_steps=9 is used instead"),
    ],
)  # fmt: skip
def test_what_is_not_mapped_is_named_with_what_to_do(read, arguments, note):
    assert read(**arguments)[1] == [note]


def test_a_misspelt_name_is_refused_and_none_of_theirs_is(read):
    with pytest.raises(UserError, match=r"TrainingArgs\.lerning_rate: not a name of TrainingArguments\. Did you mean learning_rate\?"):
        read(lerning_rate=1)
    for field in dataclasses.fields(pytest.importorskip("transformers").TrainingArguments):
        read(**{field.name: None})


def test_a_batch_of_each_device_is_of_all_of_them(read):
    """As their names say: times the accumulation, times the processes that see samples of their own."""
    eight = {"per_device_train_batch_size": 8}
    for processes, layout, samples in ((1, Layout(), 8), (4, Layout(), 32), (8, Layout(tensor=2), 32), (8, Layout(pipeline=2, context=2), 16)):
        ours, notes = read(processes, None, layout, **eight)
        assert ours == {"batch.samples": samples, "layout.micro_batch": 8} and f"batch.samples={samples}: 8 × " in notes[0]
    assert read(4, gradient_accumulation_steps=2, **eight)[0] == {"batch.samples": 64, "layout.micro_batch": 8}
    assert read(4, None, Layout(expert=2), fsdp=True, **eight)[0] == {"batch.samples": 32, "layout.micro_batch": 8, "layout.shard": 2}
    ours, notes = read(4, None, Layout(), True, **eight)  # a run that goes on
    assert ours == {"layout.micro_batch": 8} and "keeps its batch" in notes[0]


ZERO = "zero_optimization"


@pytest.mark.parametrize(
    ("arguments", "ours"),
    [
        ({"fsdp": True}, {"layout.shard": 8}),
        ({"fsdp": "full_shard auto_wrap"}, {"layout.shard": 8}),
        ({"fsdp": ["full_shard", "offload"]}, {"layout.shard": 8, "layout.offload": True}),
        ({"fsdp": "shard_grad_op"}, {"layout.shard": 8, "layout.reshard": False}),
        ({"fsdp": "hybrid_shard"}, {"layout.shard": 4}),
        ({"fsdp": "hybrid_shard_zero2"}, {"layout.shard": 4, "layout.reshard": False}),
        ({"fsdp": ""}, {}),
        ({"fsdp": True, "fsdp_config": {"activation_checkpointing": True, "fsdp_reshard_after_forward": False}},
         {"layout.shard": 8, "layout.checkpointing": "full", "layout.reshard": False}),
        ({"fsdp": True, "fsdp_config": {"cpu_offload": True}}, {"layout.shard": 8, "layout.offload": True}),
        ({"deepspeed": {ZERO: {"stage": 1}}}, {"layout.shard_optimizer": True}),
        ({"deepspeed": {ZERO: {"stage": 2}}}, {"layout.shard": 8, "layout.reshard": False}),
        ({"deepspeed": {ZERO: {"stage": 3, "offload_param": {"device": "cpu"}}, "bf16": {"enabled": True}, "gradient_clipping": 1.0}},
         {"layout.shard": 8, "layout.offload": True, "layout.precision": "bf16", "train.clip_norm": 1.0}),
        ({"deepspeed": {ZERO: {"stage": 0}, "train_batch_size": "auto"}}, {}),
        ({"ddp_bucket_cap_mb": 50, "ddp_timeout": 1800}, {"layout.bucket_mb": 50, "layout.timeout": 1800}),
        ({"ddp_backend": "mpi"}, {"layout.replicate": "manual", "layout.transport": "mpi"}),
    ],
)  # fmt: skip
def test_layouts_are_taken_over(read, arguments, ours):
    """8 processes, 4 on this host. What comes out is a layout that 8 processes can have."""
    found, notes = read(8, 4, **arguments)
    assert found == ours and notes == []
    check.validate(load("copy-task", **found), 8)


@pytest.mark.parametrize(
    ("processes", "arguments", "ours", "note"),
    [
        (1, {"fsdp": True}, {}, "fsdp=full_shard: one process has nothing to share with. Start several: --processes 2 or a launcher"),
        (1, {"deepspeed": {ZERO: {"stage": 1}}}, {}, "deepspeed, ZeRO stage 1: one process has nothing to share with."),
        (1, {"ddp_bucket_cap_mb": 50}, {}, "ddp_bucket_cap_mb=50.0: no effect here"),
        (2, {"fsdp": "no_shard"}, {}, "fsdp=no_shard: replicas of whole weights, as without it"),
        (2, {"fsdp_config": {"version": 2}}, {}, 'fsdp_config={"version": 2}: no effect without fsdp'),
        (2, {"fsdp": True, "fsdp_config": {"min_num_params": 1000}}, {"layout.shard": 2}, "fsdp_config (min_num_params): sharding is FSDP2"),
        (2, {"fsdp": True, "fsdp_config": {"xla": True}}, {"layout.shard": 2}, "fsdp_config.xla=true: it has no counterpart here"),
        (2, {"deepspeed": {ZERO: {"stage": 3, "offload_param": {"device": "nvme"}}}}, {"layout.shard": 2}, "deepspeed.offload_param=nvme: only"),
        (2, {"deepspeed": {"optimizer": {"type": "AdamW"}}}, {}, 'deepspeed.optimizer={"type": "AdamW"}: it has no counterpart here'),
        (2, {"deepspeed": {"train_batch_size": 32}}, {}, "deepspeed.train_batch_size=32: set per_device_train_batch_size"),
        (2, {"ddp_backend": "gloo"}, {}, "ddp_backend=gloo: it is nccl on GPUs, gloo on processors"),
        (2, {"local_rank": 0}, {}, "local_rank=0: the launcher tells each process its rank: --processes N, torchrun, mpirun or srun"),
        (2, {"ddp_find_unused_parameters": False}, {}, "ddp_find_unused_parameters=false: every weight has a gradient in every step"),
    ],
)  # fmt: skip
def test_what_of_a_layout_is_not_taken_over_is_told(read, processes, arguments, ours, note):
    found, notes = read(processes, **arguments)
    assert found == ours and len(notes) == 1 and notes[0].startswith(note)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"fsdp": True, "deepspeed": {}}, None),
        ({"fsdp": True, "deepspeed": {ZERO: {"stage": 2}}}, "fsdp and TrainingArgs.deepspeed are both given. Keep one."),
        ({"fsdp": "full_shrad"}, "fsdp: full_shrad is not one of its options. Did you mean full_shard?"),
        ({"fsdp": 3}, "fsdp: 3 is not one of its options."),
        ({"fsdp": True, "fsdp_config": {"reshard_after_forward": 3}}, "fsdp_config.reshard_after_forward: expected true or false, got 3."),
        ({"deepspeed": {ZERO: {"stage": 4}}}, "deepspeed.zero_optimization.stage: expected 0, 1, 2 or 3, got 4."),
        ({"deepspeed": {ZERO: 3}}, "deepspeed.zero_optimization: expected an object or the name of a JSON file with one, got 3."),
        ({"deepspeed": "no.json"}, "deepspeed: no.json: no such file."),
        ({"deepspeed": 3}, "deepspeed: expected an object or the name of a JSON file with one, got 3."),
    ],
)
def test_a_layout_that_makes_no_sense_is_one_line(read, tmp_path, arguments, text):
    if text is None:
        assert read(2, **arguments)[0] == {"layout.shard": 2}
        return
    with pytest.raises(UserError) as e:
        read(2, **arguments)
    assert str(e.value).startswith(f"{tmp_path / 'config.json'}: TrainingArgs.{text}") and "\n" not in str(e.value)


def test_a_configuration_of_deepspeed_may_be_a_file(read, tmp_path):
    (tmp_path / "zero.json").write_text(json.dumps({ZERO: {"stage": 3}}))
    assert read(2, deepspeed=str(tmp_path / "zero.json")) == ({"layout.shard": 2}, [])
    (tmp_path / "zero.json").write_text("[")
    with pytest.raises(UserError, match="not valid JSON"):
        read(2, deepspeed=str(tmp_path / "zero.json"))


def test_no_name_of_the_library_is_passed_over(read):
    """Oracle: the dataclass of the installed transformers. Each of its names is taken over or has a note, and none is taken for misspelt."""
    transformers = pytest.importorskip("transformers")
    flags = ("fp16", "bf16", "gradient_checkpointing", "group_by_length", "torch_compile", "use_cpu", "no_cuda")
    quiet = ("fsdp_config", "deepspeed")  # they are empty here
    for name in [field.name for field in dataclasses.fields(transformers.TrainingArguments)]:
        value = True if name in flags else "no" if name.endswith(("_strategy", "_type", "_mode", "optim", "_to", "_backend")) else 2
        ours, notes = read(**{name: {"fsdp": "full_shard", "fsdp_config": {}, "deepspeed": {}}.get(name, value)})
        assert ours or notes or name in quiet, name
        assert not any("Did you mean" in note for note in notes), notes


def test_values_go_through_the_recipes_own_checks(read):
    with pytest.raises(UserError, match=r"^argument: optimizer\.lr: expected a number > 0, got 'fast'\.$"):
        load("imdb-bert", **read(learning_rate="fast")[0])
    assert load("imdb-bert", **read(learning_rate="3e-5")[0]).optimizer.lr == 3e-5


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"fp16": "yes"}, 'TrainingArgs.fp16: expected true or false, got "yes".'),
        ({"fp16": True, "bf16": True}, "TrainingArgs.fp16 and TrainingArgs.bf16 are both true. Keep one."),
        ({"per_device_train_batch_size": "many"}, 'TrainingArgs.per_device_train_batch_size: expected a whole number, got "many".'),
        ({"gradient_accumulation_steps": 1.5, "per_device_train_batch_size": 1},
         "TrainingArgs.gradient_accumulation_steps: expected a whole number, got 1.5."),
        ({"max_grad_norm": [1]}, "TrainingArgs.max_grad_norm: expected a number, got [1]."),
        ({"optim": 3}, "TrainingArgs.optim: expected a word in quotes, got 3."),
    ],
)  # fmt: skip
def test_a_value_that_cannot_be_worked_with_is_one_line(read, tmp_path, arguments, text):
    with pytest.raises(UserError) as e:
        read(**arguments)
    assert str(e.value) == f"{tmp_path / 'config.json'}: {text}"


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("", "line 1, column 1: not valid JSON: Expecting value."),
        ('{"TrainingArgs": {"seed": 1,}}', "line 1, column 29: not valid JSON: "),
        ('{"TrainingArgs": {"seed": 1, "seed": 2}}', "seed: given twice. Keep one."),
        ("[]", 'expected an object of TrainingArguments, such as {"learning_rate": 5e-5}, or {"TrainingArgs": {"learning_rate": 5e-5}}.'),
        ('{"TrainingArg": {"learning_rate": 5e-5}}',
         'expected an object of TrainingArguments, such as {"learning_rate": 5e-5}, or {"TrainingArgs": {"learning_rate": 5e-5}}.'),
        ('{"TrainingArgs": 3}', 'expected an object of TrainingArguments, such as {"learning_rate": 5e-5}, or {"TrainingArgs": {"learning_rate": 5e-5}}.'),
    ],
)  # fmt: skip
def test_a_wrong_file_is_one_line(tmp_path, content, text):
    path = tmp_path / "config.json"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(UserError) as e:
        from_training_args(path)
    assert str(e.value).startswith(f"{path}: {text}") and "\n" not in str(e.value)


def test_no_such_file(tmp_path):
    with pytest.raises(UserError, match="no such file"):
        from_training_args(tmp_path / "config.json")
    with pytest.raises(UserError, match="cannot be read"):
        from_training_args(tmp_path)


def test_other_objects_of_the_file_are_named(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"TrainingArgs": {"seed": 1}, "ModelArgs": {}}), encoding="utf-8")
    assert from_training_args(path) == ({"train.seed": 1}, ["ModelArgs: only TrainingArgs is read from this file"])
