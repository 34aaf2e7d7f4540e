"""The small models of tests: a GPT whose sizes divide by nothing convenient, and a mixture
whose experts drop tokens.
"""

from shardwise.core.plan import Plan
from tests.engine.tensors import gpt_task
from tests.expert.moe import task as moe_task

ROWS = 17


#: The training of each kind of model.
TASKS = {
    "mixture": moe_task("topk-renormalised", 1.0, rows=ROWS),
    "untied": gpt_task("untied", rows=ROWS),
    "tied": gpt_task("tied", rows=ROWS),
}


def kind_of(text: str) -> str:
    """The kind of model that the plan trains: a mixture where experts are spread, else a GPT."""
    plan = Plan.parse(text)
    if plan.ep > 1:
        return "mixture"
    own_head = plan.sp or plan.layers or "head" in (plan.tile or "")
    stale = (plan.pipeline or "").startswith("pipedream")  # whose stages share no weight
    return "untied" if own_head or stale else "tied"
