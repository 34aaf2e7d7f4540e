"""Plans with `experts:independent`: one plan for each expert, on ranks of its own.

    dp4 ep2 experts:independent    rank       0    1    2    3
                                   expert     0    1    0    1      the coordinate on `ep`
                                   data rank  0    0    1    1      of the model of that expert

Experts of a hard gate that share no parameter never meet: each is a model of its own, trained on
the samples that the gate assigns to it (Gross et al., arXiv 1704.06363, section 3). So each is
trained under the plan without `ep` by the ranks that hold it, as if there were no other ranks.
"""

from dataclasses import replace

from shardwise.core.plan import Plan


def ranks_by_expert(plan: Plan) -> list[list[int]]:
    """The global ranks of each expert; all ranks are one expert's if experts are not independent.

    Ranks that differ in `ep` alone have the same place in the plan of their expert.
    """
    experts = plan.ep if plan.experts else 1
    by_expert: list[list[int]] = [[] for _ in range(experts)]
    for rank in range(plan.size):
        by_expert[plan.coordinate(rank)["ep"] if plan.experts else 0].append(rank)
    return by_expert


def plan_of_expert(plan: Plan) -> Plan:
    """The plan that the ranks of one expert carry out; `plan` if experts are not independent."""
    if not plan.experts:
        return plan
    inner = plan.inner_data_axis
    axes = [(name, size // plan.ep if name == inner else size) for name, size in plan.mesh.axes]
    return replace(plan, axes=tuple(axes), experts=None)


def place(plan: Plan, rank: int) -> tuple[int, int]:
    """The expert of a global rank, and the rank among the ranks of this expert."""
    every = ranks_by_expert(plan)
    expert = next(e for e, ranks in enumerate(every) if rank in ranks)
    return expert, every[expert].index(rank)
