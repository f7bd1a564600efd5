"""Four processes halve four numbers and find the mean, with torch.distributed: python scatter_mean_torch.py"""

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

NUMBERS = [39.0, 72.0, 129.0, 42.0]


def work(rank, world_size, port):
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    first = rank == 0

    # scatter: the root deals one number to each process
    number = torch.zeros(1)
    dist.scatter(number, [torch.tensor([n]) for n in NUMBERS] if first else None, src=0)
    half = number / 2

    # gather: the root collects what each has made of it
    halves = [torch.zeros(1) for _ in range(world_size)] if first else None
    dist.gather(half, halves, dst=0)
    if first:
        print(f"halves: {[h.item() for h in halves]}")

    # reduce: the root has the sum; broadcast: the root tells the mean to all
    total = half.clone()
    dist.reduce(total, dst=0, op=dist.ReduceOp.SUM)
    mean = total / world_size if first else torch.zeros(1)
    dist.broadcast(mean, src=0)
    if first:
        print(f"sum: {total.item()}")
    print(f"rank {rank} of {world_size}, by reduce and broadcast: mean {mean.item()}")

    # all_reduce: every process has the sum, in one call
    total = half.clone()
    dist.all_reduce(total, op=dist.ReduceOp.SUM)
    print(f"rank {rank} of {world_size}, by all_reduce: mean {total.item() / world_size}")

    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # port 0: any that is free
    mp.spawn(work, args=(len(NUMBERS), store.port), nprocs=len(NUMBERS))
