"""Which samples make a step, and the loader that brings them.

A global batch is formed first, from (seed, epoch, position) alone; then it is cut into ranks' shares and micro-batches,
and only per sample is anything drawn at random. So neither workers, micro-batches, processes nor a resume change what
is learned from.
"""

from __future__ import annotations

import dataclasses
import errno
import functools
import math
import multiprocessing
import os
import signal
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from gradus.errors import FAULT, DataError, EnvironmentFault, UserError, exit_code, is_fault
from gradus.recipe.schema import DataConfig, Train
from gradus.signals import handling

POOL = 50  # batches whose samples are sorted by length together: little padding, and still a random order


class Plan:
    """The order of the samples: a pure function of the arguments and the epoch.

    n: number of samples. Exactly one of batch_samples (samples per step) and batch_tokens (as many per step as fit,
    padding counted: longest × count ≤ batch_tokens). lengths: (n,) tokens of each, needed by batch_tokens and bucket.
    bucket: batches of samples of like length; with shuffle, pools of 50 batches of shuffled samples are sorted, and the
    batches shuffled; without (evaluation), all are sorted. Every sample comes exactly once an epoch.

    Raises UserError for no samples, a missing `lengths`, and a sample longer than batch_tokens.
    """

    def __init__(
        self, n: int, seed: int, batch_samples: int | None = None, batch_tokens: int | None = None,
        lengths: np.ndarray | None = None, bucket: bool = False, shuffle: bool = True,
    ):  # fmt: skip
        assert (batch_samples is None) != (batch_tokens is None), "give exactly one of batch_samples and batch_tokens"
        if n == 0:
            raise UserError("the data set is empty: there is no sample to make a batch of")
        if lengths is None and (batch_tokens is not None or bucket):
            raise UserError("batch.tokens and data.pad=bucket need the length of every sample, which this data lacks")
        self.n, self.seed, self.bucket, self.shuffle = n, seed, bucket, shuffle
        self.batch_samples, self.batch_tokens = batch_samples, batch_tokens
        self.lengths = None if lengths is None else np.asarray(lengths)
        if batch_tokens is not None and self.lengths.max() > batch_tokens:
            i = int(self.lengths.argmax())
            large = f"sample {i} has {self.lengths[i]} tokens and does not fit into batch.tokens={batch_tokens}"
            raise UserError(f"{large}. Raise it to {self.lengths[i]} or more, or cut the samples with data.max_len")

    def epoch(self, e: int) -> list[np.ndarray]:
        """The batches of epoch e: one array of sample indices a step."""
        rng = np.random.Generator(np.random.PCG64(np.random.SeedSequence([self.seed, e])))
        order = rng.permutation(self.n) if self.shuffle else np.arange(self.n)
        if not self.bucket:
            return self._cut(order)
        lengths = self.lengths[order]
        if not self.shuffle:
            return self._cut(order[np.argsort(lengths, kind="stable")])
        batch = self.batch_samples or max(1, round(self.batch_tokens / max(1.0, float(lengths.mean()))))
        pool = np.arange(self.n) // (POOL * batch)
        # Every second pool falls instead of rising: a batch that reaches over a border holds like lengths.
        order = order[np.lexsort((np.where(pool % 2, -lengths, lengths), pool))]
        batches = self._cut(order)
        return [batches[i] for i in rng.permutation(len(batches))]

    def _cut(self, order: np.ndarray) -> list[np.ndarray]:
        if self.batch_samples is not None:
            return np.split(order, range(self.batch_samples, self.n, self.batch_samples))
        cuts, start, longest = [], 0, 0
        for i, length in enumerate(self.lengths[order].tolist()):
            longest = max(longest, length)
            if longest * (i + 1 - start) > self.batch_tokens:
                cuts.append(i)
                start, longest = i, length
        return np.split(order, cuts)

    @functools.cached_property
    def steps_per_epoch(self) -> int:
        """Steps of epoch 0. With batch_tokens, shuffled, other epochs may have a few more or fewer: len(plan.epoch(e))
        is exact."""
        return -(-self.n // self.batch_samples) if self.batch_samples is not None else len(self.epoch(0))

    def total_steps(self, train: Train) -> int:
        """Optimizer steps of a whole run; part of an epoch counts its steps, rounded up."""
        if train.steps is not None:
            return train.steps
        whole = int(train.epochs)
        rest = train.epochs - whole
        # rounded first: 1.1 - 1 is a little more than 0.1
        part = math.ceil(round(rest * len(self.epoch(whole)), 6)) if rest else 0
        return self.steps_before(whole) + part or 1

    def steps_before(self, epoch: int) -> int:
        """Steps of all epochs before this one."""
        if self.batch_samples is not None:
            return epoch * self.steps_per_epoch
        return sum(len(self.epoch(e)) for e in range(epoch))


@dataclasses.dataclass
class Step:
    """What one process takes for one optimizer step: its samples, in order, and their micro-batches.

    Every rank has as many micro-batches as the one with most samples. One that is there for that reason alone holds a
    sample of the batch again, counts nothing, and has `batch["idle"]`.
    """

    epoch: int
    step: int  # within the epoch
    indices: np.ndarray
    micro_batches: list[dict[str, torch.Tensor]]
    samples: int  # of the global batch


def sample_rng(seed: int, epoch: int, index: int) -> np.random.Generator:
    """The generator of one sample in one epoch."""
    # The index as spawn key: [seed, epoch, 0] as plain entropy would be zero-padded into the order's stream.
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence([seed, epoch], spawn_key=(index,))))


class Loader:
    """Brings the samples of a plan: item → prepare → collate, in this process or in background workers.

    dataset: map-style; `dataset[i]`, or `dataset.item(i, epoch)` if it has a true `epoch_aware`. prepare(sample, rng):
    all that is random about a sample, from a generator of (the plan's seed, epoch, index). collate(samples): a pure
    function to a dict of tensors. micro_batch: samples a forward pass (None: the whole share). loading: a recipe's
    `data`: workers, steps they are ahead, whether they outlive an epoch (None: no workers). rank of world: takes the
    rank-th contiguous share of every batch.

    Workers are forked from a server process of one thread (forkserver, else spawn), for plain fork would copy the locks
    of this process's threads. So data set, prepare and collate are pickled, and a large array belongs into a memory
    map. Batches return through pipes, not through a container's small /dev/shm. Workers end with this process, not by a
    Ctrl-C or SIGTERM that reaches the whole process group, after which it may want to finish its step.
    """

    def __init__(
        self, dataset: Any, plan: Plan, collate: Callable[[list[dict]], dict[str, torch.Tensor]], *,
        prepare: Callable[[dict, np.random.Generator], dict] | None = None, micro_batch: int | None = None,
        loading: DataConfig | None = None, rank: int = 0, world: int = 1,
    ):  # fmt: skip
        assert len(dataset) == plan.n, f"the plan is for {plan.n} samples, the data set has {len(dataset)}"
        assert 0 <= rank < world and (micro_batch is None or micro_batch >= 1)
        self.plan, self.rank, self.world = plan, rank, world
        self.loading = loading if loading and loading.workers else None
        self._fetch = _Fetch(dataset, prepare, collate, plan.seed, micro_batch)
        self._keys: list = []  # what to fetch next; set anew before each iteration, so that the workers can stay
        self._background: torch.utils.data.DataLoader | None = None
        self._turn = 0

    def steps(self, epoch: int, start: int = 0) -> Iterator[Step]:
        """The steps of an epoch from position `start` on. Begin the next epoch only when done with this one.

        Raises UserError as the data set did; any other failure as RuntimeError that names the data set and the sample,
        a fault of the machine as OSError.
        """
        batches = self.plan.epoch(epoch)
        assert 0 <= start <= len(batches), f"epoch {epoch} has {len(batches)} steps; there is no position {start}"
        self._turn += 1
        turn = self._turn
        keys = [(epoch, step, *self._share(batches[step])) for step in range(start, len(batches))]
        results = self._results(keys)
        for key in keys:
            assert turn == self._turn, "another iteration of this loader has begun: the workers serve one at a time"
            yield self._step(key, next(results), len(batches[key[1]]))

    def look(self, epoch: int, step: int) -> Step:
        """One step, fetched in this process. Raises as `steps`."""
        batch = self.plan.epoch(epoch)[step]
        key = (epoch, step, *self._share(batch))
        return self._step(key, self._fetch[key], len(batch))

    @staticmethod
    def _step(key: tuple, result: list[dict[str, Any]] | Exception, samples: int) -> Step:
        if isinstance(result, Exception):
            raise result
        arrays = ({k: torch.from_numpy(v) if isinstance(v, np.ndarray) else v for k, v in b.items()} for b in result)
        return Step(*key[:3], list(arrays), samples)

    def _share(self, batch: np.ndarray) -> tuple[np.ndarray, int, int]:
        """(this rank's samples, how many micro-batches every rank has, a sample for those that would have none)."""
        most = -(-len(batch) // self.world)
        count = -(-most // (self._fetch.micro_batch or most))
        return np.array_split(batch, self.world)[self.rank], count, int(batch[0])

    def cut(self, rank: int, world: int) -> None:
        """From the next iteration on, take another share of every batch."""
        self.rank, self.world = rank, world

    def close(self) -> None:
        """End the workers. The next iteration starts new ones."""
        self._turn += 1
        self._background = None

    def _results(self, keys: list) -> Iterator:
        if self.loading is None:
            return map(self._fetch.__getitem__, keys)
        if not keys:
            return iter(())
        self._keys[:] = keys
        if self._background is None:
            warnings.filterwarnings("ignore", message="This DataLoader will create")  # how many is the recipe's to say
            self._background = torch.utils.data.DataLoader(
                self._fetch,
                batch_size=None,
                sampler=self._keys,
                num_workers=self.loading.workers,
                prefetch_factor=self.loading.prefetch,
                persistent_workers=self.loading.persistent,
                collate_fn=_same,
                worker_init_fn=_guard,
                multiprocessing_context=_context(),
                generator=torch.Generator(),  # else every start would draw from the one that dropout draws from
            )
        try:
            return iter(self._background)
        except Exception as e:
            if "pickle" not in f"{type(e).__name__} {e}":
                raise
            why = f"the data set, prepare and collate travel to workers by pickle, and this fails ({e})"
            what = f"data.workers={self.loading.workers}: {why}"
            raise UserError(f"{what}. Define them at the top level of a module, or set data.workers=0") from None


class _Fetch(torch.utils.data.Dataset):
    """(epoch, step, indices) → micro-batches as numpy arrays, or the failure to make them: as a value, for a raised one
    would arrive from a worker with its traceback for a message."""

    def __init__(self, dataset, prepare, collate, seed, micro_batch):
        self.dataset, self.prepare, self.collate = dataset, prepare, collate
        self.seed, self.micro_batch = seed, micro_batch

    def sample(self, index: int, epoch: int) -> dict:
        sample = self.dataset.item(index, epoch) if getattr(self.dataset, "epoch_aware", False) else self.dataset[index]
        return sample if self.prepare is None else self.prepare(sample, sample_rng(self.seed, epoch, index))

    def __getitem__(self, key) -> list[dict[str, Any]] | Exception:
        epoch, step, indices, count, spare = key
        size = self.micro_batch or max(1, len(indices))
        batches, at = [], ""
        try:
            for lo in range(0, count * size, size):
                samples, chosen = [], indices[lo : lo + size].tolist()
                for index in chosen or [spare]:
                    at = f"sample {index}"
                    samples.append(self.sample(index, epoch))
                at = f"collating samples {', '.join(map(str, chosen[:8]))}{', ...' if len(samples) > 8 else ''}"
                batch = self.collate(samples)
                if not chosen:
                    batch |= {"idle": True, "counts": dict.fromkeys(batch.get("counts", {}), 0), "n_tokens": 0}
                batches.append({k: v.numpy() if isinstance(v, torch.Tensor) else v for k, v in batch.items()})
        except UserError as e:
            return (EnvironmentFault if exit_code(e) == FAULT else DataError)(str(e))
        except Exception as e:
            name = getattr(self.dataset, "name", type(self.dataset).__name__)
            text = f"{name}, {at} (epoch {epoch}, step {step}): {type(e).__name__}: {e}"
            error = OSError(getattr(e, "errno", None) or errno.EIO, text) if is_fault(e) else RuntimeError(text)
            error.add_note(traceback.format_exc())
            return error
        return batches


def _same(batch):
    return batch


def _guard(worker: int) -> None:
    """In a worker: heed this process's parent alone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if hasattr(signal, "sigtimedwait"):  # not on macOS, where SIGTERM keeps its usual effect
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    threading.Thread(target=_watch, daemon=True).start()


def _watch() -> None:
    # PyTorch's workers look for the death of the process that forked them: the server, which lives as long as they do.
    parent = multiprocessing.parent_process()
    while parent.is_alive():
        if not hasattr(signal, "sigtimedwait"):
            parent.join()
        elif (info := signal.sigtimedwait({signal.SIGTERM}, 1.0)) is not None and info.si_pid == parent.pid:
            break
    os._exit(1)


def _context():
    """How workers are started: see Loader."""
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    from multiprocessing import forkserver

    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["gradus.data.loader"])  # torch is imported once, not once a worker
    # The server must outlive a SIGTERM to the process group (Slurm sends one), and an ignored signal is inherited.
    with handling([signal.SIGTERM], signal.SIG_IGN):
        forkserver.ensure_running()
    return context
