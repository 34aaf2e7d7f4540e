"""The transport of a library's own collectives, on a process group of gloo in place of NCCL's."""

import torch
from torch import Tensor

from shardwise.comm.gloo import Gloo
from shardwise.comm.move import all_to_all, begin_receive, begin_send, broadcast, move
from shardwise.comm.nccl import Nccl
from shardwise.comm.world import Axis, World, counted_axis
from shardwise.core.layout import I, P, R, S
from shardwise.core.mesh import Mesh
from tests.pool import run_gloo


def results(axis: Axis, rank: int) -> list[Tensor]:
    """What moves, a broadcast, an all-to-all with counts and messages both ways give."""
    own = torch.Generator().manual_seed(rank)
    x = torch.randint(0, 9, (4, 6), generator=own).double()
    found = [move(x, axis, *pair) for pair in ((P, R), (P, S(1)), (S(0), I), (S(0), S(1)))]
    found.append(broadcast(x.clone(), axis, 1))
    found.append(
        all_to_all(x, axis, [3, 1] if rank == 0 else [1, 3], [3, 1] if rank == 0 else [1, 3])
    )
    out, peer = torch.empty(24).double(), 1 - rank
    pending = [begin_send(x, axis, peer), begin_receive(out, axis, peer)]
    for each in pending:
        each.wait()
    return [*found, out]


def compared(world: World) -> tuple[bool, bool]:
    """Whether results and ledger are those of the transport of gloo."""
    here, there = (world.on(Mesh((("dp", 2),))) for _ in range(2))
    gloo, groups = here.axis("dp"), list[Nccl]()
    for transport in (there.axis("dp").transport, there.axis("dp").behind):
        assert isinstance(transport, Gloo)
        groups.append(Nccl(transport.group))
    library = counted_axis("dp", groups, there.ledger, world.device)
    one, other = results(gloo, world.rank), results(library, world.rank)
    same = all(map(torch.equal, one, other))
    return same, here.ledger.lines == there.ledger.lines


def test_the_librarys_collectives_give_and_count_what_messages_do():
    """Values, calls, elements, bytes and peers, by kind."""
    assert run_gloo(2, compared) == [(True, True)] * 2
