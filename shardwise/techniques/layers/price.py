"""The bytes that a rank sends to gather rows for layers with a mesh of their own."""

from typing import Final

from shardwise.comm.ledger import Key
from shardwise.core.layouts.layout import I, R, S, price
from shardwise.core.model_spec import ELEMENT_BYTES, RowGather
from shardwise.prediction.rank_shape import stage_of, stages_on
from shardwise.prediction.traffic import CONSENSUS_BYTES, Counted, Price, Share, Tariff


def _sends(share: Share) -> Counted:
    plan, spec = share.plan, share.spec
    tariff, here = Tariff(plan, share.rank), stages_on(plan, share.rank)
    for gather in (one for each in spec.row_gathers for one in each):
        if isinstance(gather, RowGather) and stage_of(spec, gather.layer) in here:
            few, many = gather.degrees
            step = price(S(0), I, gather.numel, many // few)
            size = round(step.sent) * ELEMENT_BYTES[gather.dtype]
            tariff.add(Key(f"rows{few}-{many}", step.what, gather.phase), size)
    if len(plan.tensor_degrees) > 1:
        rows = plan.size * plan.microbatches
        step = price(S(0), R, rows, plan.size)
        tariff.add(Key("world", step.what, "check"), round(step.sent) * CONSENSUS_BYTES)
    return tariff.sent_bytes


LAYERS: Final = Price(_sends)
