"""Who gets which of ten samples: PyTorch's DistributedSampler, then Gradus' rule. python sampler_order.py"""

from collections import Counter

import torch
from torch.utils.data import DistributedSampler

from gradus.data.loader import Loader, Plan

DATA = range(10)


def pytorch(title, epochs, **options):
    print(title)
    samplers = [DistributedSampler(DATA, num_replicas=3, rank=rank, **options) for rank in range(3)]
    for epoch in epochs:
        for sampler in samplers if epoch is not None else []:
            sampler.set_epoch(epoch)
        shares = [list(sampler) for sampler in samplers]
        print("  no epoch set:" if epoch is None else f"  set_epoch({epoch}):", *shares)
        count = Counter(i for share in shares for i in share)
        print(f"    {count.total()} samples; twice: {sorted(i for i in count if count[i] > 1)}; never: {sorted(set(DATA) - set(count))}")


def collate(samples):
    return {"x": torch.stack([s["x"] for s in samples])}


def gradus(processes, epoch):
    dataset = [{"x": torch.tensor(i)} for i in DATA]
    plan = Plan(len(DATA), seed=0, batch_samples=4)
    loaders = [Loader(dataset, plan, collate, rank=rank, world=processes) for rank in range(processes)]
    for steps in zip(*(loader.steps(epoch) for loader in loaders)):
        print(f"  epoch {epoch}, step {steps[0].step}:", *[step.indices.tolist() for step in steps])


pytorch("DistributedSampler, shuffle=False", [None], shuffle=False)
pytorch("DistributedSampler, shuffle=False, drop_last=True", [None], shuffle=False, drop_last=True)
pytorch("DistributedSampler, two epochs without set_epoch", [None, None])
pytorch("DistributedSampler, two epochs with set_epoch", [0, 1])
for processes in (1, 2, 3):
    print(f"Gradus, global batches of 4 on {processes} process{'es' * (processes > 1)}")
    for epoch in (0, 1):
        gradus(processes, epoch)
