/* The same in C, with integers: mpicc -o scatter_mean scatter_mean.c && mpirun -n 4 ./scatter_mean */
#include <mpi.h>
#include <stdio.h>

int main(int argc, char **argv) {
    int rank, size, number, half, sum, numbers[] = {39, 72, 129, 42};
    double mean;
    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &size);
    MPI_Scatter(numbers, 1, MPI_INT, &number, 1, MPI_INT, 0, MPI_COMM_WORLD);
    half = number / 2; /* int / int: what is behind the point is dropped */
    MPI_Gather(&half, 1, MPI_INT, numbers, 1, MPI_INT, 0, MPI_COMM_WORLD);
    MPI_Reduce(&half, &sum, 1, MPI_INT, MPI_SUM, 0, MPI_COMM_WORLD);
    if (rank == 0) {
        printf("halves: [%d, %d, %d, %d]\nsum: %d\n", numbers[0], numbers[1], numbers[2], numbers[3], sum);
        mean = (double)sum / size;
    }
    MPI_Bcast(&mean, 1, MPI_DOUBLE, 0, MPI_COMM_WORLD);
    printf("rank %d of %d: mean %.1f\n", rank, size, mean);
    return MPI_Finalize();
}
