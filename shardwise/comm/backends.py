"""The backends of torch.distributed in this build of PyTorch."""

from torch.distributed import is_available, is_gloo_available, is_mpi_available, is_nccl_available


def available_backends() -> tuple[str, ...]:
    """Their names; Shardwise uses gloo and nccl."""
    if not is_available():
        return ()
    there = {"gloo": is_gloo_available(), "nccl": is_nccl_available(), "mpi": is_mpi_available()}
    return tuple(name for name, yes in there.items() if yes)
