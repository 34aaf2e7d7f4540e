"""The bytes of activations on the tensor axis, from the styles of modules and the order of calls.

    style of a module           before it, of its input         after it, of its output
    colwise                     enter: I -> R, or S(T) -> R
    rowwise                                                     leave: P -> I, or P -> S(T)
    colwise_gather_output       enter                           join the features: S -> I
    rowwise_split_input         take its features: I -> S       leave
    vocabulary, an embedding                                    leave
    vocabulary, a linear layer  enter                           logits stay sharded
    gather                      S(T) -> R; I -> R of the others
    split                       I -> S(T)
    sequence:join                                               S(T) -> I

The second placement holds under `sp`, where the stream between layers is sharded along the sequence
T. If several layers in a row read a tensor, it enters once, and once more for layers under no_grad.
A tensor that a gradient reaches moves between the duals in the backward pass. (Megatron-LM,
arXiv 1909.08053, section 3; arXiv 2205.05198, section 4.2.2.)

A cross-entropy of N positions over a sharded vocabulary has two all-reduces: of the largest logit,
N elements; of the sum of exponentials and the target's logit, 2N, or 3N with label smoothing, which
also needs the sum of the logits. Its backward pass sends nothing.
"""

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from typing import Final

from shardwise.comm.ledger import Key
from shardwise.core.layouts.layout import I, P, Placement, R, S, price
from shardwise.core.layouts.uneven import Cut, Lengths
from shardwise.core.mesh import TENSOR as AXIS
from shardwise.core.model_spec import (
    ELEMENT_BYTES,
    Call,
    CutLoss,
    ModelPass,
    ModelSpec,
    TensorSpec,
    Value,
)
from shardwise.prediction.rank_shape import stages_on
from shardwise.prediction.traffic import Counted, Price, Share, Tariff
from shardwise.techniques.tensor.tensor_table import Style, cuts

#: (src, dst, numel of the whole, element bytes, phase)
Send = Callable[[Placement, Placement, int, int, str], None]


@dataclass
class Crossings:
    """The moves of one forward and backward pass on the tensor axis; calls `send` for each."""

    spec: TensorSpec
    ranks: int
    run: ModelPass
    send: Send
    entered: dict[bool, tuple[int, bool]] = field(default_factory=dict[bool, tuple[int, bool]])

    def __post_init__(self) -> None:
        self.lengths = Lengths(self.ranks)
        styles = self.spec.styles.items()
        self.gathered = [f"{name}." for name, style in styles if style.name == "gather"]

    def count(self, here: Callable[[str], bool]) -> None:
        """Send every move of the modules whose names are `here`."""
        for call in self.run.calls:
            style = self.spec.styles.get(call.module)
            if not call.module and not call.begins:
                self.entered = {}  # the forward has ended
            if style is None or not call.values or not here(call.module):
                continue
            if call.begins:
                self._before(call, style)
            else:
                self._after(call, style)

    def _before(self, call: Call, style: Style) -> None:
        entry, phase = (call.values[0], call.recorded), "backward" if call.recomputed else "forward"
        x, *others = (self._input(call, number) for number in call.values)
        split = self._split(style)
        match style.name:
            case "colwise" | "colwise_gather_output" | "vocabulary":
                table = self.spec.modules[call.module].kind == "embedding"
                inside = any(call.module.startswith(outer) for outer in self.gathered)
                if not table and not inside and self.entered.get(split) != entry:
                    self.entered[split] = entry
                    self._move(x, (S(0) if split else I, R), self._long(x, split), phase)
            case "rowwise_split_input":
                self._move(x, (I, S(0)), self._wide(x, self._cut(call.module)), phase)
            case "gather" if split:
                self._move(x, (S(0), R), self._long(x, split), phase)
                for other in others:
                    if other.trained:
                        self._move(other, (I, R), math.prod(other.shape), phase)
            case "split" if split:
                self._move(x, (I, S(0)), self._long(x, split), phase)
            case _:
                pass

    def _input(self, call: Call, number: int) -> Value:
        x = self.run.values[number]
        return x if call.recorded else x._replace(trained=False)

    def _after(self, call: Call, style: Style) -> None:
        phase = "backward" if call.recomputed else "forward"
        y, split = self.run.values[call.values[0]], self._split(style)
        match style.name:
            case "colwise_gather_output":
                numel = self._wide(y, self._cut(call.module))
                self.send(S(0), I, numel, ELEMENT_BYTES[y.dtype], phase)
            case "rowwise" | "rowwise_split_input":
                self._leave(y, split, phase)
            case "vocabulary" if self.spec.modules[call.module].kind == "embedding":
                if style.by == "sequence" or not split:
                    self._leave(y, split, phase)
                else:
                    self._leave(y, False, phase, resets=False)
            case "sequence" if style.by == "join" and split:
                self._move(y, (S(0), I), self._long(y, split), phase)
            case _:
                pass

    def _leave(self, y: Value, split: bool, phase: str, *, resets: bool = True) -> None:
        """The partial sums of `y` become the stream; its next reader enters again."""
        if resets:
            self.entered.pop(split, None)
        self._move(y, (P, S(0) if split else I), self._long(y, split), phase)

    def _move(self, x: Value, way: tuple[Placement, Placement], numel: int, phase: str) -> None:
        (src, dst), size = way, ELEMENT_BYTES[x.dtype]
        self.send(src, dst, numel, size, phase)
        if x.trained and (src, dst) != (P, I):  # the dual I -> R sends nothing
            self.send(dst.dual, src.dual, numel, size, "backward")

    def _split(self, style: Style) -> bool:
        return self.spec.sp and style.by != "whole"

    def _long(self, x: Value, split: bool) -> int:
        """Elements of `x`; a sharded sequence is padded to shards of one size."""
        numel = math.prod(x.shape)
        if not split or not numel:
            return numel
        whole = x.shape[-2]
        return numel // whole * self.lengths.shard(whole) * self.ranks

    def _wide(self, x: Value, cut: Cut) -> int:
        """Elements of `x`; its features are padded to blocks of one size."""
        return math.prod(x.shape[:-1]) * cut.ranks * max(map(cut.size, range(cut.ranks)))

    def _cut(self, module: str) -> Cut:
        style, shape = self.spec.styles[module], self.spec.modules[module]
        cut = cuts(style, shape, self.spec.table, self.ranks)
        assert cut is not None  # these styles shard features
        return cut


def recomputing(run: ModelPass, modules: Collection[str]) -> ModelPass:
    """`run`, followed by the calls that its backward pass repeats to recompute `modules`. A
    recomputation ends at the last tensor that autograd saves in the module. It sends its gathers
    and sums again, and has no backward pass. Hooks on the module itself run once.
    """
    calls, begun = [*run.calls], dict[str, int]()
    for index, call in enumerate(run.calls):
        if call.recomputed or call.module not in modules:
            continue
        if call.begins:
            begun[call.module] = index
            continue
        ends = [n for n in run.saves if begun[call.module] < n <= index]
        for inner in run.calls[begun[call.module] + 1 : max(ends, default=0)]:
            values = tuple(number + len(run.values) for number in inner.values)
            calls.append(inner._replace(values=values, recomputed=True))
    again = tuple(value._replace(trained=False) for value in run.values)
    return run._replace(calls=tuple(calls), values=run.values + again)


def _sends(share: Share) -> Counted:
    tariff, spec = Tariff(share.plan, share.rank), share.spec
    mine = stages_on(share.plan, share.rank)
    for number, tensors in {0: spec.tensors, **spec.layers}.items():
        if tensors is not None:
            _send(tariff, f"{AXIS}.{number}" if number else AXIS, spec, tensors, mine)
    return tariff.sent_bytes


def _send(tariff: Tariff, axis: str, model: ModelSpec, spec: TensorSpec, mine: set[int]) -> None:
    def here(module: str) -> bool:
        return model.stages is None or bool(mine & {*model.stages.of(module)})

    heads = [name for name, style in spec.styles.items() if style.name == "vocabulary"]
    last = any(here(name) for name in heads if spec.modules[name].kind == "linear")
    for _, same_pass in groupby(spec.runs, id):  # microbatches of one shape have one pass
        plain, *others = same_pass
        run, one = recomputing(plain, model.recomputed), Tariff(tariff.plan, tariff.rank)
        Crossings(spec, one.size(axis), run, partial(one.move, axis)).count(here)
        for loss in run.losses if last else ():
            _send_loss(one, axis, loss)
        for x in run.joins if last else ():
            phase = "backward" if x.trained else "forward"
            one.move(axis, S(0), I, math.prod(x.shape), ELEMENT_BYTES[x.dtype], phase)
        tariff.sent_bytes.add(one.sent_bytes, 1 + len(others))


def _send_loss(tariff: Tariff, axis: str, loss: CutLoss) -> None:
    positions, smoothing, size = loss
    ranks, line = tariff.size(axis), Key(axis, "all_reduce", "forward")
    sent_bytes = loss_bytes(positions, ranks, smoothing=smoothing, element_bytes=size)
    tariff.add(line, sent_bytes)
    tariff.sent_bytes.messages[line] += bool(sent_bytes)  # the maxima, then the sums


def loss_bytes(
    positions: int, ranks: int, *, smoothing: bool = False, element_bytes: int = 4
) -> int:
    """The bytes that each of `ranks` ranks sends for one cross-entropy of `positions` positions.
    `positions` include ignored ones. `element_bytes` is 8 for logits in fp64, and 4 for all others,
    because the sums of 16-bit logits are in fp32.
    """
    calls = (positions, (3 if smoothing else 2) * positions)
    return sum(round(price(P, R, numel, ranks).sent) for numel in calls) * element_bytes


TENSOR: Final = Price(_sends)
