/* Collectives of MPI_FLOAT on the ranks that mpirun started: a line of JSON a collective, with the median seconds of the slowest rank.
 * As collectives_bench measures ours: buffers touched before, two rounds to warm up, a barrier before each round.
 *
 * Usage: mpi_collectives BYTES ITERATIONS
 */
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>

static float *full, *part, *other;
static int numel, ranks;

static void all_gather(void) { MPI_Allgather(part, numel / ranks, MPI_FLOAT, full, numel / ranks, MPI_FLOAT, MPI_COMM_WORLD); }
static void reduce_scatter(void) { MPI_Reduce_scatter_block(full, part, numel / ranks, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD); }
static void all_reduce(void) { MPI_Allreduce(full, other, numel, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD); }

static float* zeros(int count) {
  float* data = malloc(sizeof(float) * (size_t)count);
  if (!data) MPI_Abort(MPI_COMM_WORLD, 1);
  for (int i = 0; i < count; ++i) data[i] = 0;
  return data;
}

static int compare(const void* a, const void* b) {
  const double x = *(const double*)a, y = *(const double*)b;
  return (x > y) - (x < y);
}

static void measure(const char* name, void (*run)(void), int iterations) {
  double* seconds = malloc(sizeof(double) * (size_t)iterations);
  if (!seconds) MPI_Abort(MPI_COMM_WORLD, 1);
  for (int i = -2; i < iterations; ++i) {
    MPI_Barrier(MPI_COMM_WORLD);
    const double begin = MPI_Wtime();
    run();
    double taken = MPI_Wtime() - begin, slowest = 0;
    MPI_Allreduce(&taken, &slowest, 1, MPI_DOUBLE, MPI_MAX, MPI_COMM_WORLD);
    if (i >= 0) seconds[i] = slowest;
  }
  int rank = 0;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  qsort(seconds, (size_t)iterations, sizeof(double), compare);
  if (rank == 0) printf("{\"collective\": \"%s\", \"seconds\": %.9f}\n", name, seconds[iterations / 2]);
  free(seconds);
}

int main(int argc, char** argv) {
  MPI_Init(&argc, &argv);
  MPI_Comm_size(MPI_COMM_WORLD, &ranks);
  if (argc != 3 || atoi(argv[1]) / 4 < ranks || atoi(argv[2]) < 1) {
    fprintf(stderr, "usage: mpi_collectives BYTES ITERATIONS\n");
    MPI_Abort(MPI_COMM_WORLD, 2);
  }
  numel = atoi(argv[1]) / 4 / ranks * ranks;
  full = zeros(numel), part = zeros(numel / ranks), other = zeros(numel);
  const int iterations = atoi(argv[2]);
  measure("all_gather", all_gather, iterations);
  measure("reduce_scatter", reduce_scatter, iterations);
  measure("all_reduce", all_reduce, iterations);
  MPI_Finalize();
  return 0;
}
