"""The same with mpi4py: mpirun -n 4 python scatter_mean_mpi.py"""

import numpy as np
from mpi4py import MPI

world = MPI.COMM_WORLD
rank, size = world.Get_rank(), world.Get_size()
numbers = np.array([39.0, 72.0, 129.0, 42.0]) if rank == 0 else None
halves = np.empty(size) if rank == 0 else None

number = np.empty(1)
world.Scatter(numbers, number, root=0)
half = number / 2
world.Gather(half, halves, root=0)
if rank == 0:
    print(f"halves: {halves.tolist()}")

total, mean = np.empty(1), np.empty(1)
world.Reduce(half, total, op=MPI.SUM, root=0)
if rank == 0:
    print(f"sum: {total.item()}")
    mean = total / size
world.Bcast(mean, root=0)
print(f"rank {rank} of {size}, by reduce and broadcast: mean {mean.item()}")

world.Allreduce(half, total, op=MPI.SUM)
print(f"rank {rank} of {size}, by all_reduce: mean {total.item() / size}")
