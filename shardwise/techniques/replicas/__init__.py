"""`sw.replicas`: the four operations of `sw.DataParallel`, in threads, each differentiable."""

from shardwise.techniques.replicas.replicate import gather, parallel_apply, replicate, scatter

__all__ = ["gather", "parallel_apply", "replicate", "scatter"]
