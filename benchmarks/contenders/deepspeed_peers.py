"""DeepSpeed's ZeRO, stages 1 to 3, as contenders if it is installed (arXiv 1910.02054)."""

import logging
import tempfile
from collections.abc import Callable
from typing import Any

from torch import nn

from benchmarks.contenders.contender import Batch, Contender, Loop, Setup, adamw


def deepspeed(stage: int, **offload: Any) -> Callable[[nn.Module, Setup], Loop]:
    """DeepSpeed's engine of that stage in fp32, with the same fused AdamW, without clipping.

    `offload` are further keys of its section zero_optimization.
    """

    def build(model: nn.Module, setup: Setup) -> Loop:
        """The training loop of the engine."""
        import deepspeed as library  # an optional peer

        logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
        engine: Any
        engine, *_ = library.initialize(
            model=model,
            optimizer=adamw(model.parameters()),
            config=settings(stage, sum(p.numel() for p in model.parameters()), offload),
            dist_init_required=False,
        )

        def step(batch: Batch) -> float:
            loss = setup.loss(engine, batch)
            engine.backward(loss)
            engine.step()
            return loss.item()

        return Loop(step)

    return build


def settings(stage: int, numel: int, offload: dict[str, Any] | None = None) -> dict[str, Any]:
    """DeepSpeed's configuration: its defaults, except for the required keys.

    Its bucket is the size of the model: the default of 5e8 elements holds any of these models
    too, and would only be charged to its peak memory.
    """
    return {
        # required, but used only in throughput logs
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": stage, "reduce_bucket_size": numel, **(offload or {})},
        "zero_force_ds_cpu_optimizer": False,  # its own needs a compiler
        # torch's fused AdamW instead of DeepSpeed's kernel, as for all contenders
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 1_000_000,
    }


PEERS = tuple(
    Contender(f"DeepSpeed ZeRO-{stage}", f"zero{stage}", deepspeed(stage), package="deepspeed")
    for stage in (1, 2, 3)
)
#: ZeRO-Offload (arXiv 2101.06840) and ZeRO-Infinity (arXiv 2104.07857) with states on a disk, which
#: needs DeepSpeed's own reader of files.
OFFLOAD = (
    Contender(
        "DeepSpeed ZeRO-Offload",
        "zero2",
        deepspeed(2, offload_optimizer={"device": "cpu"}),
        package="deepspeed",
        against="zero2",
    ),
    Contender(
        "DeepSpeed ZeRO-Infinity",
        "zero3",
        deepspeed(3, offload_optimizer={"device": "nvme", "nvme_path": tempfile.gettempdir()}),
        package="deepspeed",
        against="zero3",
    ),
)
