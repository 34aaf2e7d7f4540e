"""Data parallelism as a table: flat parameters, hooks, and the reduction of gradients."""
