/* mpicc -o hello hello.c && mpirun -n 2 ./hello */
#include <mpi.h>
#include <stdio.h>

int main(int argc, char **argv) {
    int rank, size;
    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &size);
    printf("hello from process %d of %d\n", rank, size);
    return MPI_Finalize();
}
