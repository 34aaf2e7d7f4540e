"""The prices of all techniques. A new one is one line here."""

from typing import Final

from shardwise.prediction.technique_price import Price
from shardwise.techniques.context.price import CONTEXT
from shardwise.techniques.expert.price import EXPERT
from shardwise.techniques.layers.price import LAYERS
from shardwise.techniques.offload.price import OFFLOAD
from shardwise.techniques.pipeline.price import PIPELINE
from shardwise.techniques.recompute.price_step import RECOMPUTE
from shardwise.techniques.tensor.price import TENSOR

PRICES: Final[tuple[Price, ...]] = (PIPELINE, TENSOR, CONTEXT, RECOMPUTE, LAYERS, OFFLOAD, EXPERT)
