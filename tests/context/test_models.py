"""Context parallelism of models that know nothing of it: a user's own, and transformers'."""

import copy
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import shardwise as sw
from shardwise.comm.world import World
from shardwise.core.errors import InputError, RankError
from tests.pool import run_threads

F64 = torch.float64
VOCABULARY, WIDTH, HEADS, LONGEST = 61, 32, 4, 64
ROWS, LENGTH = 4, 13
Change = Callable[[Tensor], Tensor]


class Block(nn.Module):
    """Attention of one layer; `change` is applied to its input."""

    def __init__(self, change: Change) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.change = change

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        q, k, v = (
            each.unflatten(-1, (HEADS, -1)).transpose(1, 2)
            for each in self.qkv(self.change(x)).chunk(3, -1)
        )
        y = F.scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None)
        return x + self.out(y.transpose(1, 2).flatten(2))


class Torchs(nn.Module):
    """A layer of PyTorch's, with nn.MultiheadAttention."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 48, dropout=0.0, batch_first=True)

    def forward(self, x: Tensor, _: Tensor | None) -> Tensor:
        past = nn.Transformer.generate_square_subsequent_mask(x.shape[1], dtype=F64)
        return self.layer(x, past, is_causal=True)


class Decoder(nn.Module):
    """A decoder with learned positions, which it looks up or slices, as it may its mask."""

    def __init__(self, how: str = "sliced", change: Change = lambda x: x) -> None:
        super().__init__()
        self.embed, self.how = nn.Embedding(VOCABULARY, WIDTH), how
        self.positions = nn.Parameter(torch.randn(1, LONGEST, WIDTH))
        self.past = nn.Buffer(torch.ones(1, 1, LONGEST, LONGEST, dtype=torch.bool).tril())
        self.block = Torchs() if how == "torch's" else Block(change)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: Tensor, mask: Tensor | None = None) -> Tensor:
        t = ids.shape[1]
        if self.how == "looked up":
            x = self.embed(ids) + F.embedding(torch.arange(t), self.positions[0])
        else:
            x = self.embed(ids) + self.positions[:, :t]
        return self.head(self.block(x, self.past[:, :, :t, :t] if self.how == "buffer" else mask))


def decoder(how: str = "sliced", change: Change = lambda x: x) -> nn.Module:
    torch.manual_seed(0)
    return Decoder(how, change).double()


def batch(padded: str = "") -> dict[str, Tensor]:
    """Rows of several lengths, with ignored labels where there is padding."""
    ids = torch.randint(VOCABULARY, (ROWS, LENGTH), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    for row, short in enumerate((0, 3, 5, 1) if padded else ()):
        mask[row, slice(LENGTH - short, LENGTH) if padded == "right" else slice(short)] = 0
    found = {"input_ids": ids, "labels": ids.masked_fill(mask == 0, -100)}
    return found | ({"attention_mask": mask} if padded else {})


def packed(*lengths: int) -> dict[str, Tensor]:
    """Rows of documents of these lengths, whose position ids begin anew, without a mask."""
    ids = torch.cat([torch.arange(length) for length in lengths]).expand(ROWS, -1).clone()
    ids[0] = torch.arange(ids.shape[1])  # one document
    return {name: x[:, : ids.shape[1]] for name, x in batch().items()} | {"position_ids": ids}


def documents() -> dict[str, Tensor]:
    """A block-diagonal mask in the batch; each row has several documents."""
    of = torch.randint(3, (ROWS, LENGTH), generator=torch.Generator().manual_seed(2))
    of = of.sort(1).values
    same = (of[:, None, :] == of[:, :, None])[:, None]
    return batch() | {"mask": same & torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()}


def shifted(model: nn.Module, part: dict[str, Tensor]) -> Tensor:
    """Cross-entropy of the labels as they stand, each of its own position."""
    logits = model(part["input_ids"], part.get("mask"))
    return F.cross_entropy(logits.flatten(0, 1), part["labels"].flatten())


def squared(model: nn.Module, part: dict[str, Tensor]) -> Tensor:
    return model(part["input_ids"]).square().mean()


def writing(model: Any, part: dict[str, Tensor]) -> Tensor:
    """A loss that writes to its batch, another value in each call."""
    part["input_ids"].add_(1).remainder_(VOCABULARY)
    return (shifted if isinstance(model, Decoder) else uncached)(model, part)


def kept(model: Any, part: dict[str, Tensor]) -> Tensor:
    """A loss that reads an activation, which a hook of the program keeps on the model."""
    return shifted(model, part) + model.kept.pop().square().mean()


def own_loss(model: nn.Module, part: dict[str, Any], **options: Any) -> Tensor:
    return model(**part, **options).loss


uncached = partial(own_loss, use_cache=False)


def labels(part: dict[str, Tensor], first: int) -> int:
    """The number of labels of a part; the first one is dropped by a model that shifts them."""
    return int((part["labels"][:, first:] != -100).sum())


def train(world: World, model: nn.Module, plan: str, wholes: Any, loss: Any) -> list[float]:
    """The losses of three steps, on a batch each or all on one, and of an evaluation."""
    wholes = wholes if isinstance(wholes, list) else [wholes] * 3
    moves = not (isinstance(model, Decoder) or "Bert" in type(model).__name__)
    tokens = None if loss is squared else partial(labels, first=int(moves))
    how = {"optimizer": sw.AdamW(lr=1e-2), "loss": loss, "tokens": tokens}
    model = copy.deepcopy(model)
    if loss is kept:
        vars(model)["kept"] = list[Tensor]()
        model.get_submodule("block").register_forward_hook(
            lambda *_: vars(model)["kept"].append(_[-1])
        )
    engine = sw.parallelize(model, plan, world, **how)
    owns = [
        {n: x.tensor_split(engine.data_ranks)[engine.data_rank].clone() for n, x in whole.items()}
        for whole in [*wholes, wholes[-1]]
    ]
    return [*(engine.step(own).loss for own in owns[:-1]), engine.evaluate(owns[-1])[0]]


def assert_parity(model: nn.Module, plan: str, whole: Any, loss: Any, rel: float) -> None:
    (wanted,) = run_threads(1, train, model, "dp1 fp64", whole, loss)
    for losses in run_threads(sw.Plan.parse(plan).size, train, model, f"{plan} fp64", whole, loss):
        assert losses == pytest.approx(wanted, rel=rel)


def of_width(width: int, x: Tensor) -> Tensor:
    """Attention whose values are narrower or wider than its keys."""
    qk = x.unflatten(-1, (HEADS, -1)).transpose(1, 2)
    y = F.scaled_dot_product_attention(qk, qk, F.pad(qk, (0, 4))[..., :width], is_causal=True)
    return x + y.sum((1, 3)).unsqueeze(-1)


OWN: list[tuple[nn.Module, str, Any, Any]] = [
    *((decoder(how), "cp4", batch("right"), shifted) for how in ("sliced", "looked up")),
    (decoder(), "dp2 cp2:ulysses", batch(), squared),
    (decoder("looked up"), "cp2 zero3", batch(), squared),
    (decoder("buffer"), "cp4:2x2", batch("right"), shifted),
    (decoder("torch's"), "cp4:2x2", batch("right"), shifted),
    (decoder(), "cp2", batch(), kept),
    *((decoder(), plan, batch(), writing) for plan in ("cp2", "cp2 pp2 gpipe:2")),
    *((decoder(change=partial(of_width, n)), "cp4:2x2", batch(), shifted) for n in (5, 12)),
    *((decoder(), plan, documents(), shifted) for plan in ("cp4:2x2", "cp2:ulysses")),
    (decoder(), "cp4", {name: x[:, :5] for name, x in batch().items()}, shifted),
]


@pytest.mark.cases(len(OWN))
@pytest.mark.parametrize(("model", "plan", "whole", "loss"), OWN)
def test_models_of_ones_own(model: nn.Module, plan: str, whole: Any, loss: Any):
    """Tables of positions, buffers, PyTorch's layers, masks in the batch: as in one process."""
    assert_parity(model, plan, whole, loss, 1e-10)


def pretrained(kind: str, auto: str = "AutoModelForCausalLM", **options: Any) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": HEADS}
    sizes |= {"intermediate_size": 48, "num_key_value_heads": 2, "max_position_embeddings": LONGEST}
    if kind == "gpt2":
        sizes = {"n_embd": WIDTH, "n_layer": 2, "n_head": HEADS, "n_positions": LONGEST}
        sizes |= dict.fromkeys(("attn_pdrop", "resid_pdrop", "embd_pdrop"), 0)
    sizes |= {"vocab_size": VOCABULARY, "bos_token_id": 1, "eos_token_id": 2}
    config = transformers.AutoConfig.for_model(kind, **(sizes | options))
    torch.manual_seed(0)
    how = {"attn_implementation": options.pop("attn_implementation", "sdpa")}
    return getattr(transformers, auto).from_config(config, **how).double()


PACKED = [packed(12), packed(3, 3, 3, 3), packed(5, 1, 6)]
AGAIN = "pp2 gpipe:2 recompute:full"


@pytest.mark.cases(3)
@pytest.mark.parametrize(
    ("kind", "plan", "whole", "loss"),
    [
        ("llama", "cp2:ulysses", batch("left"), own_loss),
        ("llama", f"cp2 {AGAIN}", PACKED, uncached),
        ("gpt2", "cp2", batch("right"), own_loss),
        ("qwen3", "dp2 cp2 zero3", batch("right"), own_loss),
        ("llama", f"cp2 {AGAIN}", batch("right"), uncached),
        ("llama", "cp4:2x2 recompute:full", PACKED, uncached),
        ("llama", "cp2", batch(), uncached),
        *(("llama", f"cp2 {AGAIN}", whole, writing) for whole in (batch("right"), PACKED)),
    ],
)
def test_models_of_transformers(kind: str, plan: str, whole: Any, loss: Any):
    """Labels are shifted before the cut, padding is masked, documents of a row are found."""
    assert_parity(pretrained(kind), plan, whole, loss, 2e-6)


@pytest.mark.parametrize("plan", ["cp2", "cp2:ulysses"])
def test_an_encoder_of_transformers(plan: str):
    """It has no shifted labels; padding is a mask of four dims."""
    zeros = dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), 0)
    model = pretrained("bert", "AutoModelForMaskedLM", num_key_value_heads=None, **zeros)
    whole = batch("right")
    seen = whole.pop("attention_mask")[:, None, None].bool().expand(ROWS, 1, LENGTH, LENGTH)
    assert_parity(model, plan, whole | {"attention_mask": seen}, own_loss, 1e-10)


class Recurrent(nn.GRU):
    """Its weights have weak references."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)[0]


sdpa: Any = F.scaled_dot_product_attention
CHANGES: dict[str, Change] = {
    "recurrent": Recurrent(WIDTH, WIDTH, batch_first=True, dtype=torch.float64),
    "a convolution over positions": lambda x: (
        F.conv1d(x.mT, weight=torch.ones(WIDTH, 1, 3).double(), padding=1, groups=WIDTH).mT
    ),
    "'mean' over positions": lambda x: x - x.mean(1, keepdim=True),
    "'std' over positions": lambda x: x / x.std(),
    "a normalisation over positions": lambda x: F.batch_norm(x.mT, None, None, training=True).mT,
    "'cumsum' over positions": lambda x: x.cumsum(dim=1),
    "an embedding bag over positions": lambda x: (
        x + F.embedding_bag(x[..., 0].long().clamp(0, 1), x.new_ones(2, WIDTH)).unsqueeze(1)
    ),
    "a difference of neighbours": lambda x: (
        x + torch.diff(x[..., 0].long(), prepend=x.new_zeros(len(x), 1).long()).unsqueeze(-1)
    ),
    "nn.MultiheadAttention under cp2 that returns weights": lambda x: nn.MultiheadAttention(
        WIDTH, HEADS, batch_first=True
    ).double()(x, x, x)[0],
    r"positions \[-1\] of a seq": lambda x: x + x[:, -1].unsqueeze(1),
    r"positions \[:-1\] of a sequence": lambda x: x + x[..., :-1, :].mean(),
    "attention without F.scaled_dot": lambda x: (x @ x.mT).softmax(-1) @ x,
    r"an attention mask \[13, 13\] for the [67] positions": lambda x: sdpa(
        x, x, x, x.new_zeros(LENGTH, LENGTH)
    ),
    "attention to 7 keys of another sequence": lambda x: sdpa(x, *[x.new_zeros(4, 7, 8)] * 2),
    r"attention of queries \[1, 1, 4, [67], 32\]": lambda x: sdpa(*[x[None, None]] * 3)[0, 0],
    "dropout of 0.5": lambda x: sdpa(x, x, x, dropout_p=0.5),
}


def moved(model: nn.Module, part: dict[str, Tensor]) -> Tensor:
    """A loss that moves its labels by one position, which no operation along a dim shows."""
    labels = torch.cat([part["labels"].flatten()[1:], part["labels"].flatten()[:1]])
    return F.cross_entropy(model(part["input_ids"]).flatten(0, 1), labels)


def behind_zeros() -> nn.Module:
    """A model that reads other positions in a layer whose output begins as zeros."""
    model = decoder(change=lambda x: x + x.mT.mean(-1).unsqueeze(1))
    nn.init.zeros_(model.get_parameter("block.out.weight"))
    return model


def anew(model: nn.Module, part: dict[str, Tensor]) -> Tensor:
    """In the second step the program makes position ids of documents that are not in the batch."""
    ids = {"position_ids": part["ids"] % 3} if part["anew"].any() else {}
    return uncached(model, {k: x for k, x in part.items() if k not in ("ids", "anew")} | ids)


class Kept(nn.Module):
    """A table of positions that is made in a forward pass, and kept for shorter sequences."""

    table: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.table is None or len(self.table) < x.shape[1]:
            self.table = torch.arange(x.shape[1], dtype=x.dtype).sin()
        return x + self.table[: x.shape[1], None]


IDS = {"ids": torch.arange(LENGTH).expand(ROWS, -1)}
ANEW = [batch() | IDS | {"anew": torch.full((ROWS, 1), bool(n))} for n in range(2)]
FIRST = r"in the first step the loss is [0-9.]+ inst"
THREE = {name: x[:, :3] for name, x in batch().items()}
MODELS: list[tuple[Callable[[], nn.Module], str, Any, Any, str]] = [
    *((partial(decoder, change=act), "cp2", batch(), shifted, s) for s, act in CHANGES.items()),
    (decoder, "cp2", batch(), moved, FIRST),
    (
        lambda: decoder(change=Kept()),
        *("cp2", [batch(), {n: x[:, :9] for n, x in batch().items()}], shifted),
        r"table, which the model made of a batch of 13 positions and has in one of 9",
    ),
    (behind_zeros, "cp2", batch(), shifted, FIRST),
    (decoder, "cp4", THREE, shifted, "sequences of 3 positions under 'cp4'"),
    (partial(pretrained, "llama"), "cp2", ANEW, anew, "an attention mask"),
    (
        partial(pretrained, "llama", attn_implementation="eager"),
        *("cp2", batch(), own_loss, "attn_implementation='eager'"),
    ),
    (
        partial(pretrained, "mistral", sliding_window=4),
        *("cp2", batch(), own_loss, "a window of 4 positions"),
    ),
]


@pytest.mark.cases(4)
@pytest.mark.parametrize(("model", "plan", "whole", "loss", "said"), MODELS)
def test_what_reads_other_positions_is_refused(model: Any, plan: str, whole: Any, loss: Any, said):
    """Each by its name, before the first update; the rest by the loss of the first step."""
    with pytest.raises((RankError, InputError), match=said) as caught:
        run_threads(sw.Plan.parse(plan).size, train, model(), f"{plan} fp64", whole, loss)
    assert said == FIRST or "Write instead: " in str(caught.value)


@pytest.mark.parametrize(
    ("labels", "said"),
    [
        (torch.zeros(ROWS), "a batch under cp without a tensor"),
        (torch.zeros(ROWS, WIDTH), "Write instead: a plan without cp where dim 1 has features"),
    ],
)
def test_a_batch_without_positions(labels: Tensor, said: str):
    """A batch of numbers has no sequence; features are cut, and the error says so."""

    def step(world: World) -> None:
        how: Any = {"optimizer": sw.AdamW(), "loss": lambda m, part: m(part["labels"]).mean()}
        sw.parallelize(nn.Linear(WIDTH, 1), "cp2", world, **how).step({"labels": labels})

    with pytest.raises(RankError) as caught:
        run_threads(2, step)
    assert isinstance(caught.value.__cause__, InputError)
    assert re.search(said, caught.value.text)
