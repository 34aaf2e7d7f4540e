"""What a step costs this rank, beside what the formulas say: bytes held and bytes sent."""

from shardwise.engine.engine import Engine
from shardwise.train.report import Cost


def cost(engine: Engine) -> Cost:
    """Measured and predicted: memory by category, bytes of one step by kind of collective."""
    return Cost(
        engine.memory(),
        getattr(engine, "predicted_memory", dict)(),
        {},
        getattr(engine, "predicted_bytes", dict)(),
    )
