"""fairscale's sharded data parallelism as a contender, if it is installed."""

from typing import Any

from torch import nn
from torch.optim import AdamW

from benchmarks.contenders.contender import Contender, Loop, Setup, adamw, adamw_options, plain_loop


def sharded_ddp(model: nn.Module, setup: Setup) -> Loop:
    """ShardedDataParallel: gradients reduced to the rank whose optimizer (OSS) owns them."""
    from fairscale.nn.data_parallel import ShardedDataParallel
    from fairscale.optim.oss import OSS

    optimizer = OSS(model.parameters(), optim=AdamW, **adamw_options())
    # buckets are views of the gradients, so zero_grad must not set gradients to None
    return plain_loop(ShardedDataParallel(model, optimizer), optimizer, setup, drop=False)


def full_shard(model: nn.Module, setup: Setup) -> Loop:
    """Fairscale's FullyShardedDataParallel, one unit per block."""
    from fairscale.nn.data_parallel import FullyShardedDataParallel
    from fairscale.nn.wrap import enable_wrap, wrap

    if setup.device.type == "cpu":
        raise RuntimeError("it runs on CUDA only: its order depends on CUDA streams")
    options: dict[str, Any] = {"compute_device": setup.device}
    with enable_wrap(wrapper_cls=FullyShardedDataParallel, **options):
        for name, module in list(model.named_modules()):
            if isinstance(module, setup.block):
                parent, _, child = name.rpartition(".")
                setattr(model.get_submodule(parent), child, wrap(module))
        whole = wrap(model)
    return plain_loop(whole, adamw(whole.parameters()), setup)


PEERS = (
    Contender("fairscale ShardedDDP", "zero2", sharded_ddp, package="fairscale"),
    Contender("fairscale FSDP", "zero3", full_shard, package="fairscale"),
)
