"""Pipelines over models that look at numbers: those of the batch, and those of activations."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import shardwise as sw
from shardwise.comm.world import World, alone
from shardwise.core.errors import RankError
from tests.engine.cases import settled
from tests.pool import run_threads

RARE = 3  # a token of two of the four microbatches


class Looks(nn.Module):
    """Blocks, and between them code that depends on tokens in the way `how` says."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.embed = nn.Embedding(11, 6)
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))
        self.norm = nn.BatchNorm1d(6)  # a forward changes its buffers
        self.head = nn.Linear(6, 11)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for i, block in enumerate(self.blocks):
            x = self.between(i, block(x).tanh() + x, tokens)
        return self.head(self.norm(x.mT).mT)

    def between(self, i: int, x: Tensor, tokens: Tensor) -> Tensor:
        match self.how:
            case "a branch with other operations" if (tokens == RARE).any():
                x = torch.cat([x, x[:, :1]], 1)[:, :-1] if i % 2 else x.relu() + x
            case "item":
                x = x * (1 + tokens.max().item() / 100)
            case "tolist":
                x = x * len(set(tokens.flatten().tolist())) / 10
            case "a mask written to":
                x = x.clone()
                x[tokens == RARE] = 0
            case "nonzero":
                x = x + x[:, (tokens != RARE).all(0).nonzero()[:1, 0]]
            case "another length" if i == 1:
                x = x[:, : int((tokens != RARE).sum(1).max()) - 1]
            case "a guard of activations" if torch.isnan(x).any():
                x = torch.nan_to_num(x)
            case "a branch on activations":
                x = x * 2 if x.abs().max() < 50 else x
            case "activations that differ":
                x = x / x.abs().max().item()
        return x


HOWS = (
    *("a branch with other operations", "item", "tolist", "a mask written to", "nonzero"),
    *("another length", "a mask in the loss"),
    *("a guard of activations", "a branch on activations"),
)


def tokens() -> Tensor:
    found = torch.randint(0, 11, (8, 7), generator=torch.Generator().manual_seed(5))
    found[found == RARE] = RARE + 1
    found[2, 5] = found[7, 0] = RARE
    return found


def masked_loss(model: nn.Module, batch: Tensor) -> Tensor:
    out = model(batch)
    target = batch[:, : out.shape[1]]
    if model.how == "a mask in the loss":
        kept = target != RARE
        return functional.cross_entropy(out[kept], target[kept])
    return functional.cross_entropy(out.flatten(0, 1), target.flatten())


def engine_losses(world: World, how: str, plan: str) -> list[float]:
    torch.set_num_threads(1)
    engine = sw.parallelize(
        settled(Looks(how)), plan, world, optimizer=sw.SGD(lr=0.1), loss=masked_loss
    )
    losses = [engine.step(tokens()).loss for _ in range(2)]
    return [*losses, engine.evaluate(tokens())[0]]


@pytest.mark.parametrize("plan", ["pp2 1f1b:4 fp64", "pp2 interleaved:4x2 fp64"])
@pytest.mark.parametrize("how", HOWS)
def test_a_forward_that_reads_numbers(how: str, plan: str):
    """Each microbatch of one shape runs what it runs in one process, also if its tokens differ.

    What is read of activations is the same in all of them.
    """
    expected = pytest.approx(engine_losses(alone(), how, "accumulate:4 fp64"), rel=1e-10)
    for found in run_threads(2, engine_losses, how, plan):
        assert found == expected


def test_activations_that_differ():
    """A number of an activation that another microbatch has not is refused, with the line."""
    said = r"item of an activation in test_pipeline_values\.py:\d+, which gives .*, and gave "
    with pytest.raises(RankError, match=said):
        run_threads(2, engine_losses, "activations that differ", "pp2 1f1b:4 fp64")


def test_activations_of_sharded_parameters():
    """Data ranks that gather weights together cannot run ahead for one: refused, with the line."""
    said = r"__bool__ of a tensor that comes from any after blocks\.0, in test_pipeline_values\.py:"
    with pytest.raises(RankError, match=said):
        run_threads(4, engine_losses, "a guard of activations", "dp2 pp2 zero3 1f1b:4 fp64")


def piped(world: World, how: str, wrap: bool) -> list[Tensor]:
    torch.set_num_threads(1)
    model = settled(Looks(how).double())
    if wrap:
        model = sw.Pipe(model, 4, world=world)
        return [model(tokens()), model(tokens().flip(0))]
    parts = *tokens().chunk(4), *tokens().flip(0).chunk(4)
    outs = [model(part) for part in parts]
    return [torch.cat(outs[:4]), torch.cat(outs[4:])]


@pytest.mark.parametrize("how", [how for how in HOWS if how != "another length"])
def test_a_pipe_in_a_plain_loop(how: str):
    """`sw.Pipe` gives the outputs of the module on each microbatch."""
    for found in run_threads(2, piped, how, True):
        torch.testing.assert_close(found, piped(alone(), how, False), rtol=1e-12, atol=1e-12)
