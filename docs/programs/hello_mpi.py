"""mpirun -n 2 python hello_mpi.py"""
from mpi4py import MPI

world = MPI.COMM_WORLD
print(f"hello from process {world.rank} of {world.size}")
