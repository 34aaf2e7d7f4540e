"""`sw.replicas`: the four operations of `sw.DataParallel`, in threads, each differentiable."""

from shardwise.techniques.replicas.replicate import replicate
from shardwise.techniques.replicas.rows import gather, scatter
from shardwise.techniques.replicas.threads import parallel_apply

__all__ = ["gather", "parallel_apply", "replicate", "scatter"]
