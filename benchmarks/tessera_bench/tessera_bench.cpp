// Measures cases in fresh processes:
//
//   tessera-bench --ranks 1,2 --strategy full,zero-2 --out runs/mine.json      all combinations
//   tessera-bench --matrix benchmarks/matrix.json --out runs/matrix.json       a chosen set; goes on where it was interrupted
//
// docs/benchmarks.md says what there is, how to read it, and how a program measures models of its own in the same way.
#include "built_in_models.h"

int main(int argc, char** argv) { return tessera::bench_main(argc, argv, tessera::benchmarks::built_in_models()); }
