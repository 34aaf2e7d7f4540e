"""Pipeline parallelism: a model cut into stages, traced, and run by a schedule."""
