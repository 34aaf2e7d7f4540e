"""Data parallelism: flat parameters, the hooks that gather them, the reduction of gradients."""
