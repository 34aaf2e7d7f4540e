"""The contenders of the benchmarks: our plans, and other libraries that do the same."""
