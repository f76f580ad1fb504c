/* One rank of Open MPI: mpi_rank BYTES...; rank 0 prints JSON {bytes: seconds}, the median of its operations. */
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>

static int ascending(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

int main(int argc, char **argv) {
    MPI_Init(&argc, &argv);
    int rank;
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    if (rank == 0) printf("{");
    for (int i = 1; i < argc; i++) {
        long bytes = atol(argv[i]);
        float *data = calloc(bytes / 4 + 1, 4);
        double times[3005];
        int count = 7;
        for (int n = 0; n < count; n++) {
            double start = MPI_Wtime();
            MPI_Allreduce(MPI_IN_PLACE, data, bytes / 4, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
            if (n >= 2) times[n - 2] = MPI_Wtime() - start;
            if (n == 6) {
                double sum = 0;
                for (int k = 0; k < 5; k++) sum += times[k];
                double more = 1.0 / (sum / 5);
                count = 7 + (more > 2900 ? 2900 : more < 5 ? 5 : (int)more);
                MPI_Bcast(&count, 1, MPI_INT, 0, MPI_COMM_WORLD);
            }
        }
        qsort(times, count - 2, sizeof(double), ascending);
        if (rank == 0) printf("%s\"%ld\": %.9f", i > 1 ? ", " : "", bytes, times[(count - 2) / 2]);
        free(data);
    }
    if (rank == 0) printf("}\n");
    MPI_Finalize();
    return 0;
}
