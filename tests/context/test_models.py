"""Models that know nothing of context parallelism: a user's own, and those of transformers."""

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

VOCABULARY, WIDTH, HEADS, LONGEST = 61, 32, 4, 64
ROWS, LENGTH = 4, 13


class Block(nn.Module):
    """Attention of one layer; `change` is applied to its input."""

    def __init__(self, change: Callable[[Tensor], Tensor] = lambda x: x) -> None:
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


class Decoder(nn.Module):
    """A decoder with a table of learned positions, which it slices or looks up."""

    def __init__(self, sliced: bool, change: Callable[[Tensor], Tensor] = lambda x: x) -> None:
        super().__init__()
        self.embed, self.sliced = nn.Embedding(VOCABULARY, WIDTH), sliced
        self.positions = nn.Parameter(torch.randn(1, LONGEST, WIDTH))
        self.block, self.head = Block(change), nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: Tensor, mask: Tensor | None = None) -> Tensor:
        length = ids.shape[1]
        if self.sliced:
            x = self.embed(ids) + self.positions[:, :length]
        else:
            x = self.embed(ids) + F.embedding(torch.arange(length), self.positions[0])
        return self.head(self.block(x, mask))


def decoder(**options: Any) -> nn.Module:
    torch.manual_seed(0)
    return Decoder(**options).double()


def batch(padded: str = "") -> dict[str, Tensor]:
    """Rows of several lengths, with ignored labels where there is padding."""
    ids = torch.randint(VOCABULARY, (ROWS, LENGTH), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    for row, short in enumerate((0, 3, 5, 1) if padded else ()):
        where = slice(LENGTH - short, LENGTH) if padded == "right" else slice(short)
        mask[row, where] = 0
    found = {"input_ids": ids, "labels": ids.masked_fill(mask == 0, -100)}
    return found | ({"attention_mask": mask} if padded else {})


def train(world: World, model: nn.Module, plan: str, wholes: Any, loss: Any) -> list[float]:
    """The losses of three steps, on a batch each or all on one, and of an evaluation."""
    wholes = wholes if isinstance(wholes, list) else [wholes] * 3
    engine = sw.parallelize(
        copy.deepcopy(model),
        plan,
        world,
        optimizer=sw.AdamW(lr=1e-2),
        loss=loss,
        tokens=None
        if loss is squared
        else partial(labels, first=int(loss not in (shifted, encoded))),
    )
    owns = [
        {name: x.tensor_split(engine.data_ranks)[engine.data_rank] for name, x in whole.items()}
        for whole in wholes
    ]
    return [*(engine.step(own).loss for own in owns), engine.evaluate(owns[-1])[0]]


def labels(part: dict[str, Tensor], first: int) -> int:
    """The number of labels of a part; the first one is dropped by a model that shifts them."""
    return int((part["labels"][:, first:] != -100).sum())


def assert_parity(model: nn.Module, plan: str, whole: Any, loss: Any, rel: float) -> None:
    """All ranks have the losses of one process."""
    (expected,) = run_threads(1, train, model, "dp1 fp64", whole, loss)
    for losses in run_threads(sw.Plan.parse(plan).size, train, model, f"{plan} fp64", whole, loss):
        assert losses == pytest.approx(expected, rel=rel)


def shifted(model: nn.Module, part: dict[str, Tensor]) -> Tensor:
    """Cross-entropy of the labels as they stand, each of its own position."""
    logits = model(part["input_ids"], part.get("mask"))
    return F.cross_entropy(logits.flatten(0, 1), part["labels"].flatten())


def squared(model: nn.Module, part: dict[str, Tensor]) -> Tensor:
    """A loss that is a mean over all positions."""
    return model(part["input_ids"]).square().mean()


@pytest.mark.parametrize("plan", ["cp2 zero3", "cp4", "dp2 cp2:ulysses"])
@pytest.mark.parametrize("sliced", [True, False])
@pytest.mark.parametrize("loss", [shifted, squared])
def test_learned_positions(plan: str, sliced: bool, loss: Any):
    """A table gives each rank the rows of its positions, sliced or looked up; 13 of them."""
    assert_parity(decoder(sliced=sliced), plan, batch("right"), loss, 1e-10)


class Tables(nn.Module):
    """A decoder whose positions and causal mask are slices of buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.block = Block()
        self.positions = nn.Buffer(torch.randn(LONGEST, WIDTH), persistent=False)
        self.past = nn.Buffer(torch.ones(1, 1, LONGEST, LONGEST, dtype=torch.bool).tril())

    def forward(self, ids: Tensor, mask: Tensor | None = None) -> Tensor:
        t = ids.shape[1]
        x = self.embed(ids) + self.positions[:t]
        return self.head(self.block(x, self.past[:, :, :t, :t]))


@pytest.mark.parametrize("plan", ["cp2 zero3", "cp4:2x2"])
def test_buffers_of_positions(plan: str):
    """A slice of a buffer has this rank's rows, also in the copy that the first step compares."""
    torch.manual_seed(0)
    assert_parity(Tables().double(), plan, batch("right"), shifted, 1e-10)


@pytest.mark.parametrize("width", [5, 12])
@pytest.mark.parametrize("plan", ["cp2", "cp4:2x2"])
def test_values_of_another_width(plan: str, width: int):
    """Heads of values may be narrower or wider than those of keys."""

    def change(x: Tensor) -> Tensor:
        qk = x.unflatten(-1, (HEADS, -1)).transpose(1, 2)
        v = F.pad(qk, (0, 4))[..., :width]
        y = F.scaled_dot_product_attention(qk, qk, v, is_causal=True)
        return x + y.sum((1, 3)).unsqueeze(-1)

    assert_parity(decoder(sliced=True, change=change), plan, batch(), shifted, 1e-10)


@pytest.mark.parametrize("plan", ["cp2 zero3", "cp4:2x2", "cp2:ulysses"])
def test_packed_documents(plan: str):
    """Rows of a block-diagonal mask in the batch are cut; each row has several documents."""
    document = torch.randint(3, (ROWS, LENGTH), generator=torch.Generator().manual_seed(2))
    document = document.sort(1).values
    same = (document[:, None, :] == document[:, :, None])[:, None]
    mask = same & torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
    assert_parity(decoder(sliced=True), plan, batch() | {"mask": mask}, shifted, 1e-10)


def pretrained(kind: str, auto: str = "AutoModelForCausalLM", **options: Any) -> nn.Module:
    """A small model of transformers with random weights."""
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


def own_loss(model: nn.Module, part: dict[str, Any]) -> Tensor:
    return model(**part).loss


def encoded(model: nn.Module, part: dict[str, Tensor]) -> Tensor:
    """The loss of an encoder, which does not shift labels."""
    return own_loss(model, part)


@pytest.mark.parametrize("plan", ["cp2", "dp2 cp2 zero3", "cp2:ulysses"])
@pytest.mark.parametrize("padded", ["", "left", "right"])
@pytest.mark.parametrize("kind", ["llama", "gpt2", "qwen3"])
def test_transformers(kind: str, padded: str, plan: str):
    """Labels are shifted before the cut, and padding is masked; losses there are in fp32."""
    assert_parity(pretrained(kind), plan, batch(padded), own_loss, 2e-6)


@pytest.mark.parametrize("plan", ["cp2", "cp2 pp2 gpipe:4 recompute:full"])
@pytest.mark.parametrize("padded", ["", "right"])
def test_transformers_without_a_cache(padded: str, plan: str):
    """Positions with a gap are not several documents; a recomputation has its part's padding."""
    loss = lambda model, part: own_loss(model, part | {"use_cache": False})  # noqa: E731
    assert_parity(pretrained("llama"), plan, batch(padded), loss, 2e-6)


def packed(*lengths: int) -> dict[str, Tensor]:
    """Rows of documents of these lengths, whose position ids begin anew, without a mask."""
    ids = torch.cat([torch.arange(length) for length in lengths]).expand(ROWS, -1).clone()
    ids[0] = torch.arange(ids.shape[1])  # one document
    return {name: x[:, : ids.shape[1]] for name, x in batch().items()} | {"position_ids": ids}


@pytest.mark.parametrize(
    "plan", ["cp2 zero3", "cp2:ulysses", "cp4:2x2 recompute:full", "cp2 pp2 gpipe:2 recompute:full"]
)
def test_documents_that_a_model_of_transformers_finds(plan: str):
    """In a later step too, also if all of them begin where a rank's chunk does."""
    loss = lambda model, part: own_loss(model, part | {"use_cache": False})  # noqa: E731
    assert_parity(
        pretrained("llama"), plan, [packed(12), packed(3, 3, 3, 3), packed(5, 1, 6)], loss, 2e-6
    )


def test_documents_that_are_not_in_the_batch_are_refused():
    """Position ids of a rank's positions, made by the program: in the step in which they occur."""

    def loss(model: nn.Module, part: dict[str, Tensor]) -> Tensor:
        anew = {"position_ids": part["ids"] % 3} if part["anew"].any() else {}
        plain = {name: x for name, x in part.items() if name not in ("ids", "anew")}
        return own_loss(model, plain | anew | {"use_cache": False})

    ids = torch.arange(LENGTH).expand(ROWS, -1)
    batches = [batch() | {"ids": ids, "anew": torch.full((ROWS, 1), bool(n))} for n in range(2)]
    with pytest.raises((RankError, InputError), match="an attention mask"):
        run_threads(2, train, pretrained("llama"), "cp2 fp64", batches, loss)


REFUSED: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "a recurrence": (lambda x: nn.GRU(WIDTH, WIDTH, batch_first=True).double()(x)[0], "recurrent"),
    "a convolution": (
        lambda x: F.conv1d(x.mT, torch.ones(WIDTH, 1, 3).double(), padding=1, groups=WIDTH).mT,
        "a convolution over positions",
    ),
    "a mean": (lambda x: x - x.mean(1, keepdim=True), "'mean' over positions"),
    "a sum": (lambda x: x.cumsum(dim=1), "'cumsum' over positions"),
    "another order": (lambda x: x.flip(1), "'flip' over positions"),
    "neighbours": (
        lambda x: x + torch.diff(x[..., 0].long(), prepend=x[:, :1, 0].long()).unsqueeze(-1),
        "a difference of neighbours",
    ),
    "weights of attention": (
        lambda x: nn.MultiheadAttention(WIDTH, HEADS, batch_first=True).double()(x, x, x)[0],
        "nn.MultiheadAttention under cp2 that returns weights",
    ),
    "the last position": (lambda x: x + x[:, -1].unsqueeze(1), r"positions \[-1\] of a seq"),
    "all but the last": (lambda x: x + x[..., :-1, :].mean(), r"positions \[:-1\] of a sequence"),
    "scores": (lambda x: (x @ x.mT).softmax(-1) @ x, "attention without F.scaled_dot"),
    "a mask of its own": (
        lambda x: F.scaled_dot_product_attention(
            x, x, x, torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
        ),
        "an attention mask",
    ),
    "a mask of all rows": (
        lambda x: F.scaled_dot_product_attention(x, x, x, x.new_zeros(LENGTH, LENGTH)),
        r"an attention mask \[13, 13\] for the [67] positions",
    ),
    "other keys": (
        lambda x: F.scaled_dot_product_attention(x, x.new_zeros(4, 7, 8), x.new_zeros(4, 7, 8)),
        "attention to 7 keys of another sequence",
    ),
    "more dims": (
        lambda x: F.scaled_dot_product_attention(x[None, None], x[None, None], x[None, None])[0, 0],
        r"attention of queries \[1, 1, 4, [67], 32\]",
    ),
    "dropout": (lambda x: F.scaled_dot_product_attention(x, x, x, dropout_p=0.5), "dropout of 0.5"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_operations_along_the_sequence_are_refused(what: str):
    """Each by its name, with what to write instead, before the first update."""
    change, said = REFUSED[what]
    with pytest.raises((RankError, InputError), match=rf"{said}.*Write instead: "):
        run_threads(2, train, decoder(sliced=True, change=change), "cp2 fp64", batch(), shifted)


def moved(model: nn.Module, part: dict[str, Tensor]) -> Tensor:
    """A loss that moves its labels by one position, which no operation along a dim shows."""
    labels = torch.cat([part["labels"].flatten()[1:], part["labels"].flatten()[:1]])
    return F.cross_entropy(model(part["input_ids"]).flatten(0, 1), labels)


class Layers(nn.Module):
    """A layer of PyTorch's, with nn.MultiheadAttention."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 48, dropout=0.0, batch_first=True)

    def forward(self, ids: Tensor, mask: Tensor | None = None) -> Tensor:
        past = nn.Transformer.generate_square_subsequent_mask(ids.shape[1], dtype=torch.float64)
        return self.head(self.layer(self.embed(ids), past, is_causal=True))


@pytest.mark.parametrize("plan", ["cp2 zero3", "cp4:2x2"])
def test_multihead_attention(plan: str):
    """PyTorch's layers need no weights of it."""
    torch.manual_seed(0)
    assert_parity(Layers().double(), plan, batch("right"), shifted, 1e-10)


def behind_zeros() -> nn.Module:
    """A model that reads other positions in a layer whose output begins as zeros."""
    model = Decoder(sliced=True, change=lambda x: x + x.mT.mean(-1).unsqueeze(1)).double()
    nn.init.zeros_(model.block.out.weight)
    return model


@pytest.mark.parametrize(
    ("model", "loss"),
    [
        (lambda: decoder(sliced=True), moved),
        (behind_zeros, shifted),
    ],
)
def test_the_first_step_is_compared_with_the_plain_model(model: Callable[[], nn.Module], loss: Any):
    """What computes something else on some positions is refused before the first update."""
    with pytest.raises(
        (RankError, InputError), match=r"in the first step the loss is [0-9.]+ inst"
    ):
        run_threads(2, train, model(), "cp2 fp64", batch(), loss)


@pytest.mark.parametrize(
    ("kind", "options", "said"),
    [
        ("llama", {"attn_implementation": "eager"}, "attn_implementation='eager'"),
        ("mistral", {"sliding_window": 4}, "a window of 4 positions"),
    ],
)
def test_attention_of_transformers_that_is_refused(kind: str, options: dict[str, Any], said: str):
    """Attention that does not go through PyTorch's, or has a window, is refused at the start."""
    with pytest.raises((RankError, InputError), match=said):
        run_threads(2, train, pretrained(kind, **options), "cp2 fp64", batch(), own_loss)


def test_each_rank_needs_a_position():
    """Five positions on four ranks are enough, three are not."""
    few, short = ({name: x[:, :n] for name, x in batch().items()} for n in (5, 3))
    assert_parity(decoder(sliced=True), "cp4", few, shifted, 1e-10)
    with pytest.raises((RankError, InputError), match=r"sequences of 3 positions under 'cp4'"):
        run_threads(4, train, decoder(sliced=True), "cp4 fp64", short, shifted)


@pytest.mark.parametrize("plan", ["cp2", "cp2:ulysses"])
def test_an_encoder_of_transformers(plan: str):
    """It has no shifted labels; padding is a mask of four dims."""
    options = {"num_key_value_heads": None} | dict.fromkeys(
        ("hidden_dropout_prob", "attention_probs_dropout_prob"), 0
    )
    model = pretrained("bert", auto="AutoModelForMaskedLM", **options)
    whole = batch("right")
    seen = whole.pop("attention_mask")[:, None, None].bool().expand(ROWS, 1, LENGTH, LENGTH)
    assert_parity(model, plan, whole | {"attention_mask": seen}, encoded, 1e-10)


@pytest.mark.parametrize(
    ("labels", "said"),
    [
        (torch.zeros(ROWS), "a batch under cp without a tensor"),
        (torch.zeros(ROWS, WIDTH), "Where dim 1 has features, .* write a plan without cp"),
    ],
)
def test_a_batch_without_positions(labels: Tensor, said: str):
    """A batch of numbers has no sequence; features are cut, and a note says so."""
    loss = lambda model, part: model(part["labels"]).mean()  # noqa: E731

    def step(world: World) -> None:
        how = {"optimizer": sw.AdamW(), "loss": loss}
        sw.parallelize(nn.Linear(WIDTH, 1), "cp2", world, **how).step({"labels": labels})

    with pytest.raises(RankError) as caught:
        run_threads(2, step)
    cause = caught.value.__cause__
    assert re.search(said, "".join([str(cause), *getattr(cause, "__notes__", ())]))
