"""The suites of benchmarks/compare."""
