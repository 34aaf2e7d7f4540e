"""`sw.replicas`: the four operations of `sw.DataParallel`, in threads, each differentiable."""

from shardwise.parallel.replicas.replicate import replicate
from shardwise.parallel.replicas.rows import gather, scatter
from shardwise.parallel.replicas.threads import parallel_apply

__all__ = ["gather", "parallel_apply", "replicate", "scatter"]
