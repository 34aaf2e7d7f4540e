"""Steps whose numbers of tokens differ: gradients are those of one process, digit for digit."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import shardwise as sw
from tests.engine.cases import HYBRID, ROWS, Case, Task, oracle, ranks_of, settled
from tests.engine.tensors import ADAMW, assert_parity, equals_one, run
from tests.pool import run_threads

#: Rows of each step's global batch, and how many in a hundred of their targets count.
STEPS = ((9, 80), (13, 25), (8, 95), (11, 60))
WORDS, WIDTH, POSITIONS = 29, 16, 6


def changing(step: int) -> dict[str, Tensor]:
    """Rows and masks that change: 34, 23, 28 and 37 tokens; no number of them a power of two."""
    rows, percent = STEPS[step]
    own = torch.Generator().manual_seed(70 + step)
    text = torch.randint(0, WORDS, (rows, POSITIONS + 1), generator=own)
    targets = text[:, 1:].clone()
    targets[torch.rand(targets.shape, generator=own) >= percent / 100] = -100
    return {"inputs": text[:, :-1].contiguous(), "targets": targets}


class Norm(nn.Module):
    """RMS norm as Llama has it: in fp32 whatever the precision of the rest."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.float32)
        scaled = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.weight * scaled.to(x.dtype)


class Block(nn.Module):
    """A norm and a feed-forward network, around which the input goes."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = Norm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 24), nn.Linear(24, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(functional.silu(self.up(self.norm(x))))


class Reader(nn.Module):
    """Words to logits of the next one, with parts that compute in fp32."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(4)))
        self.norm, self.head = Norm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
        self.tensor_table = sw.Table.of(
            {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"},
            sequence={"blocks.*.norm": "sequence", "norm": "sequence", "blocks.0": "split"}
            | {"head": "vocabulary"},
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.blocks(self.embed(x))))


def reader() -> nn.Module:
    return settled(Reader())


def counted(batch: dict[str, Tensor]) -> int:
    return int((batch["targets"] != -100).sum())


def wide(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """The loss in the precision of the logits."""
    logits = model(batch["inputs"])
    return functional.cross_entropy(logits.flatten(0, 1), batch["targets"].flatten())


def narrow(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """The loss in fp32, as the models of transformers compute it themselves."""
    logits = model(batch["inputs"]).float()
    return functional.cross_entropy(logits.flatten(0, 1), batch["targets"].flatten())


READER = Task(reader, changing, wide, counted)
NARROW = Task(reader, changing, narrow, counted)
DATA = [*(f"dp2 {row}" for row in ROWS), HYBRID[2]]


def llama() -> nn.Module:
    """A small Llama of transformers, whose norms, softmax and loss are in fp32."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"vocab_size": WORDS, "hidden_size": 24, "intermediate_size": 40}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "attn_implementation": "eager"}
    return settled(LlamaForCausalLM(LlamaConfig(**sizes, **heads, num_hidden_layers=2)))


def own_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """The model's own, to which it takes the logits in fp32."""
    labels = functional.pad(batch["targets"], (1, 0), value=-100)[:, :-1]
    return model(input_ids=batch["inputs"], labels=labels, use_cache=False).loss


def shifted(batch: dict[str, Tensor]) -> int:
    """The model takes as targets what lies one position later."""
    return int((batch["targets"][:, :-1] != -100).sum())


def llama_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """In fp64, as the logits: tensor ranks add the parts of a loss in another order."""
    logits = model(input_ids=batch["inputs"], use_cache=False).logits
    return functional.cross_entropy(logits.flatten(0, 1), batch["targets"].flatten())


LLAMA = Task(llama, changing, own_loss, shifted)
LLAMA_WIDE = Task(llama, changing, llama_loss, counted)

#: Losses in fp32, whose gradients too are one process's, for ranks with unequal numbers of tokens.
IN_FP32 = [(plan, NARROW) for plan in ("dp2 zero3", "dp2 zero1 accumulate:2", "pp2 1f1b:4")]
IN_FP32 += [(plan, LLAMA) for plan in ("dp2", "dp2 zero3 accumulate:2", "pp2 1f1b:4")]
IN_FP32 += [("tp2", LLAMA_WIDE)]


@pytest.mark.crossed
@pytest.mark.parametrize("clip", [0.1, None])
@pytest.mark.parametrize("more", [" accumulate:3", ""])
@pytest.mark.parametrize("plan", DATA)
def test_data_rows_with_fp32_inside(plan: str, more: str, clip: float | None):
    """Every row, with masks and rows that change at each step, norms in fp32: to its digits."""
    case = Case(f"{plan}{more} fp64", clip=clip, steps=4, **ADAMW)
    equals_one(run_threads, READER, case, 1e-6)


@pytest.mark.cases(3)
@pytest.mark.parametrize(("plan", "task"), IN_FP32)
def test_a_loss_in_fp32_is_rounded_as_in_one_process(plan: str, task: Task):
    """Also of a Llama of transformers: to the digits of fp32, if ranks have unequal tokens."""
    if task is not NARROW:
        pytest.importorskip("transformers")
    case = Case(f"{plan} fp64", steps=4, **ADAMW)
    found, expected = run_threads(ranks_of(plan), run, task, case), oracle(task, case)
    assert_parity(found, expected, 1e-6)
