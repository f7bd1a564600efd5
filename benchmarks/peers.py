"""What the studies here set beside Gradus: runners of one's own, FUNCTION(recipe, options) → timing.Subject.

transformers_step, trainer_step and nanogpt_step train with the recipe's own batches, loss, precision, clipping and AdamW (fused) and start from
Gradus's weights, so that a study's column "loss deviation" says whether both sides compute the same. layout.compile compiles their model too.
"""

from __future__ import annotations

import dataclasses
import functools
import queue
import tempfile
import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gradus import models
from gradus.errors import UserError
from gradus.layers.kernels import get_kernel
from gradus.measure.profile import endless
from gradus.models import weights
from gradus.plan import batches
from gradus.plan.trace import trace_recipe
from gradus.plan.work import Op
from gradus.proof.step_memory import allocated_storages
from gradus.proof.timing import Subject, peak_of_one_more
from gradus.recipe.schema import Recipe
from gradus.train.session import Session, open_session

# ------------------------------------------------------------ models that are called as Gradus's are


class Transformers(nn.Module):
    """The model of transformers that computes what `model` does, with its weights: GPT2LMHeadModel, BertForMaskedLM,
    T5ForConditionalGeneration, LlamaForCausalLM, ViTForImageClassification; of seq2seq MarianMTModel (post-norm) or Pegasus (pre-norm)."""

    def __init__(self, model: nn.Module, compiled: bool = False):
        import transformers

        super().__init__()
        name, why = weights.loads_in_transformers(model.config)
        if name is None:
            raise UserError(f"transformers has no such {model.config.family}: {why}.")
        with tempfile.TemporaryDirectory() as folder:
            models.save(model, folder)
            self.model = getattr(transformers, name).from_pretrained(folder)
        for parameter in self.model.parameters():  # the file's pages are not counted as memory
            parameter.data = parameter.data.clone()
        self.call = torch.compile(self.model) if compiled else self.model

    def forward(self, ids: Tensor, target: Tensor | None = None, *, source_keep: Tensor | None = None, keep: Tensor | None = None,
                select: Tensor | None = None, token_types: Tensor | None = None, **none: None) -> Tensor:  # fmt: skip
        if any(value is not None for value in none.values()):
            raise UserError(f"{', '.join(none)}: not passed to transformers. Leave out what makes them (data.pack=documents).")
        if ids.is_floating_point():
            return self.call(pixel_values=ids).logits
        if target is not None:
            return self.call(input_ids=ids, attention_mask=source_keep, decoder_input_ids=target, use_cache=False).logits
        if select is None:
            return self.call(input_ids=ids, use_cache=False).logits
        return self.call(input_ids=ids, attention_mask=keep, token_type_ids=token_types).logits[select]


class NanoGPT(nn.Module):
    """nanoGPT's model written anew, with its names; its GELU is the exact one (model.activation=gelu), its dropout is left out."""

    def __init__(self, model: nn.Module, compiled: bool = False):
        super().__init__()
        c = model.config
        if c.family != "gpt" or not c.tie_output or c.activation != "gelu":
            raise UserError("nanoGPT is a GPT with a tied output and GELU. Set model.family=gpt model.tie_output=true model.activation=gelu.")
        self.n_heads, norm = c.n_heads, lambda: nn.LayerNorm(c.d_model, c.norm_eps, bias=c.bias)
        linear = lambda m, n: nn.Linear(m, n, bias=c.bias)  # noqa: E731
        self.transformer = nn.ModuleDict({
            "wte": nn.Embedding(c.vocab_size, c.d_model), "wpe": nn.Embedding(c.seq_len, c.d_model), "ln_f": norm(),
            "h": nn.ModuleList(nn.ModuleDict({
                "ln_1": norm(), "attn": nn.ModuleDict({"c_attn": linear(c.d_model, 3 * c.d_model), "c_proj": linear(c.d_model, c.d_model)}),
                "ln_2": norm(), "mlp": nn.ModuleDict({"c_fc": linear(c.d_model, c.d_ff), "c_proj": linear(c.d_ff, c.d_model)}),
            }) for _ in range(c.n_layers)),
        })  # fmt: skip
        found = {name: tensor.T if ".c_" in name and tensor.ndim == 2 else tensor for name, tensor in weights.to_hf(model)}
        own = self.state_dict()  # transformers' GPT-2 has biases always: zeros where there are none
        self.load_state_dict({name: found[name] for name in own})
        self.call = torch.compile(self.logits) if compiled else self.logits

    def logits(self, ids: Tensor) -> Tensor:
        t = self.transformer
        x = t.wte(ids) + t.wpe(torch.arange(ids.shape[1], device=ids.device))
        for block in t.h:
            q, k, v = (y.unflatten(2, (self.n_heads, -1)).transpose(1, 2) for y in block.attn.c_attn(block.ln_1(x)).chunk(3, dim=2))
            x = x + block.attn.c_proj(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
            x = x + block.mlp.c_proj(F.gelu(block.mlp.c_fc(block.ln_2(x))))
        return F.linear(t.ln_f(x), t.wte.weight)

    def forward(self, ids: Tensor, **none: None) -> Tensor:
        return self.call(ids)


# ------------------------------------------------------------ their steps


def opened(recipe: Recipe) -> Session:
    """Raises UserError for what the steps below would leave out."""
    wanted = {"optimizer.name": "adamw", "optimizer.weight_decay": 0, "schedule.name": "constant", "schedule.warmup_steps": 0, "model.dropout": 0,
              "model.n_experts": None, "layout.checkpointing": "none", "layout.micro_batch": None}  # fmt: skip
    wrong = [f"{key}={value}" for key, value in wanted.items() if functools.reduce(lambda o, k: getattr(o, k, value), key.split("."), recipe) != value]
    wrong += [] if recipe.layout.precision in ("fp32", "bf16") else ["layout.precision=fp32"]
    if wrong:
        raise UserError(f"a peer's step is a plain one of one batch. Set {' '.join(wrong).replace('None', 'null')}.")
    return open_session(recipe)


def loss_of(session: Session, model: nn.Module, batch: dict[str, Any]) -> Tensor:
    with torch.autocast(session.device.type, torch.bfloat16, enabled=session.recipe.layout.precision == "bf16"):
        sums = session.task.losses(model, batch)
    return sum(sums[kind] / batch["counts"][kind] for kind in sums)


def subject(session: Session, step: Callable[[dict[str, Any]], Tensor]) -> Subject:
    """step(batch) on the recipe's own batches."""
    source, seen = endless(session.loader), [0]

    def batch() -> dict[str, Any]:
        found = next(source)
        seen[0] += found.samples
        return found.micro_batches[0]

    facts = {"precision": session.recipe.layout.precision, "loss_unit": session.task.loss_unit}
    return Subject(batch, lambda b: step(session.task.to_device(b, session.device)), lambda: seen[0], session.device, facts=facts)


def plain_step(kind: type[nn.Module], recipe: Recipe, options: dict[str, Any]) -> Subject:
    """As nanoGPT's train.py writes it: autocast, backward, clipping, AdamW, no gradients."""
    session = opened(recipe)
    o, clip = recipe.optimizer, recipe.train.clip_norm
    model = kind(session.build(), recipe.layout.compile != "none").to(session.device).train()
    optimizer = torch.optim.AdamW(model.parameters(), o.lr, o.betas, o.eps, weight_decay=0.0, fused=True)

    def step(batch: dict[str, Any]) -> Tensor:
        loss = loss_of(session, model, batch)
        loss.backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return subject(session, step)


transformers_step, nanogpt_step = functools.partial(plain_step, Transformers), functools.partial(plain_step, NanoGPT)


def trainer_step(recipe: Recipe, options: dict[str, Any]) -> Subject:
    """A step of transformers' Trainer, whose loop runs in a thread and waits for a batch before each step."""
    import transformers

    session, asked, answers = opened(recipe), queue.SimpleQueue(), queue.SimpleQueue()
    o, clip = recipe.optimizer, recipe.train.clip_norm

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.peer = Transformers(session.build(), recipe.layout.compile != "none")

        def forward(self, **batch: Any) -> dict[str, Tensor]:
            self.loss = loss_of(session, self.peer, batch)
            return {"loss": self.loss}

    class Told(transformers.TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            answers.put(model.loss.detach())

    class Trainer(transformers.Trainer):
        def get_train_dataloader(self) -> Any:
            return iter(asked.get, None)

    def train(threads: int = torch.get_num_threads()) -> None:
        torch.set_num_threads(threads)
        try:
            Trainer(model, arguments, callbacks=[Told()]).train()
        except BaseException as e:
            answers.put(e)

    def step(batch: dict[str, Any]) -> Tensor:
        asked.put(batch)
        if isinstance(found := answers.get(), BaseException):
            raise found
        return found

    model = Model().to(session.device)
    arguments = transformers.TrainingArguments(
        output_dir=tempfile.gettempdir(), max_steps=10**6, learning_rate=o.lr, lr_scheduler_type="constant", adam_beta1=o.betas[0],
        adam_beta2=o.betas[1], adam_epsilon=o.eps, max_grad_norm=clip or 0.0, optim="adamw_torch_fused", report_to="none",
        logging_strategy="no", save_strategy="no", disable_tqdm=True, use_cpu=session.device.type == "cpu", remove_unused_columns=False,
    )  # fmt: skip
    threading.Thread(target=train, daemon=True).start()
    return dataclasses.replace(subject(session, step), memory=dict)  # nobody counts another thread's


# ------------------------------------------------------------ parts of a step


def attention_call(recipe: None, options: dict[str, Any]) -> Subject:
    """One call of an attention kernel, causal or not, forward or with its backward pass; its memory is what it allocates beyond q, k and v."""
    o = {"kernel": "sdpa", "chunk": 128, "length": 512, "backward": False, "causal": False, "batch": 1, "heads": 12, "head_dim": 64, "device": "cpu"}
    if unknown := set(options) - {*o, "threads"}:
        raise UserError(f"options: {', '.join(sorted(unknown))}: unknown. Known: {', '.join(o)}, threads.")
    o |= options
    device, kernel, calls = torch.device(o["device"]), get_kernel(o["kernel"], o["chunk"]), [0]
    q, k, v = (torch.randn(o["batch"], o["heads"], o["length"], o["head_dim"], device=device, requires_grad=True) for _ in range(3))

    def call(_: None) -> None:
        out, _ = kernel(q, k, v, causal=o["causal"])
        if o["backward"]:
            torch.autograd.grad(out.sum(), (q, k, v))
        calls[0] += o["batch"]

    def memory() -> dict[str, int]:
        before = torch.cuda.memory_allocated(device) if device.type == "cuda" else sum(allocated_storages([]).values())
        return {"allocated": peak_of_one_more(Subject(lambda: None, call, lambda: 0, device))["allocated"] - before}

    return Subject(lambda: None, call, lambda: calls[0], device, memory)


def matrix_products(recipe: Recipe, options: dict[str, Any]) -> Subject:
    """The matrix products of one training step of the recipe and nothing else, each with its shape, layout and precision, one after the other:
    how many samples/s the step would reach if it were these alone (attention's products are not among them)."""
    session = open_session(recipe)
    given, seen = batches.micro_batches(session.recipe, task=session.task), [0]
    work = trace_recipe(session.recipe, target=session.device.type, task=session.task, micro_batches=given).work
    ops = [op for op in work.micro * work.micro_batches + work.step if op.kind == "matmul"]
    operands = {op: [made.to(session.device) for made in operands_of(op)] for op in ops}

    def step(_: None) -> None:
        for op in ops:
            a, b, out = operands[op]
            for _ in range(round(op.count)):
                torch.matmul(a, b, out=out)
        seen[0] += round(work.samples)

    facts = {"precision": recipe.layout.precision, "flops": sum(op.flops * op.count for op in ops)}
    return Subject(lambda: None, step, lambda: seen[0], session.device, facts=facts)


def operands_of(op: Op) -> tuple[Tensor, Tensor, Tensor]:
    """m × k, k × n and m × n."""
    many, m, n, k = op.shape
    dtype, batch = torch.bfloat16 if op.dtype == "bf16" else torch.float32, (many,) if many > 1 else ()
    return torch.randn(*batch, m, k, dtype=dtype), torch.randn(*batch, k, n, dtype=dtype), torch.empty(*batch, m, n, dtype=dtype)
