"""A model's choices: by `topk`, `argmax` and `max` along the last dim, and by signs, as relu.

In 16 bits the oracles take the choices of the run (routes.py): the i-th choice in each call of a
module is the i-th there, in the same microbatch of all data ranks.

    rank 0, microbatches 0 1    [3, K] [2, K]
    rank 1                      [3, K] [2, K]    "batch": [10, K], the rows of the global batch

A few inputs of relu are so near to 0 that rounding decides their sign; in a small batch their
gradients are larger than all other rounding errors together.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final, Self

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from shardwise.core.layouts.uneven import Counts
from shardwise.core.plan.plan import Plan
from shardwise.verify.oracles.loads import of_positions
from shardwise.verify.oracles.mixture_oracle import Follow
from shardwise.verify.oracles.oracle import Each, Microbatches, Oracle

#: The functions, and the place of `dim` in their arguments.
FUNCTIONS: Final = {"topk": 2, "argmax": 1, "max": 1}
#: Functions whose derivative jumps where their input is 0.
KINKS: Final = ("relu", "relu_", "relu6", "leaky_relu", "prelu", "abs")
#: The name of what is outside of all modules.
LOSS: Final = "the loss"
#: A module by name, and the number of a choice in a call of it.
Key = tuple[str, int]
#: The choices [..., K] of one rank, in order.
Seen = dict[Key, list[Tensor]]


@dataclass
class Inside:
    """A call of a module, by its name, and how many choices it has made."""

    name: str
    choices: int = 0


class Calls(TorchFunctionMode):
    """`act(innermost module, function, arguments, options)` makes each call of a function."""

    def __init__(self, model: nn.Module, act: Callable[[Inside, Any, Any, Any], Any]) -> None:
        super().__init__()
        self.model, self.act, self.inside, self.hooks = model, act, [Inside(LOSS)], ExitStack()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.act(self.inside[-1], func, args, kwargs or {})

    def __enter__(self) -> Self:
        for name, module in self.model.named_modules():
            begin = module.register_forward_pre_hook(partial(self._begins, name))
            end = module.register_forward_hook(self._ends, always_call=True)
            self.hooks.callback(begin.remove)
            self.hooks.callback(end.remove)
        super().__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        self.hooks.close()

    def _begins(self, name: str, *_: Any) -> None:
        self.inside.append(Inside(name))

    def _ends(self, *_: Any) -> None:
        self.inside.pop()


def chosen(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], out: Any) -> Tensor | None:
    """The indices [..., K] that a call chose along the last dim; None if it chose none there."""
    name = getattr(func, "__name__", "")
    if name not in FUNCTIONS or _recomputed():
        return None
    place, index = FUNCTIONS[name], out if name == "argmax" else getattr(out, "indices", None)
    dim = kwargs.get("dim", args[place] if len(args) > place else -1)
    if not isinstance(index, Tensor) or dim not in (-1, args[0].dim() - 1):
        return None
    return index if index.dim() == args[0].dim() else index.unsqueeze(-1)


def signed(func: Any, args: tuple[Any, ...]) -> bool:
    """Whether a call's derivative depends on the signs of its first argument."""
    of = getattr(func, "__name__", "") in KINKS and not _recomputed() and bool(args)
    return of and isinstance(args[0], Tensor) and args[0].is_floating_point() and args[0].dim() > 0


def _recomputed() -> bool:
    return torch._C._current_graph_task_id() != -1


class Follower:
    """An oracle whose next choices are those in `following`, in order; without any, its own."""

    def __init__(self, oracle: Any) -> None:
        self.following, self.made = dict[Key, list[Follow]](), Counter[Key]()
        self.each: Each = oracle.microbatches.each if isinstance(oracle, Oracle) else "microbatch"
        oracle.task = replace(oracle.task, loss=partial(self._loss, oracle.task.loss))

    def follow(self, choices: Mapping[Key, Sequence[Tensor]]) -> None:
        self.made.clear()
        self.following = {key: [Follow(x, x) for x in each] for key, each in choices.items()}

    def _loss(self, loss: Callable[[nn.Module, Any], Any], model: nn.Module, batch: Any) -> Tensor:
        with Calls(model, self._call):
            return loss(model, batch)

    def _call(self, inside: Inside, func: Any, args: Any, kwargs: Any) -> Any:
        if signed(func, args):
            now = self._now(inside)
            x = args[0] if now is None else now.cross(args[0])
            out = func(x, *args[1:], **kwargs)
            in_place = kwargs.get("inplace") or func.__name__.endswith("_")
            return args[0].copy_(out) if in_place and x is not args[0] else out
        out = func(*args, **kwargs)
        own = chosen(func, args, kwargs, out)
        now = None if own is None else self._now(inside)
        if own is None or now is None:
            return out
        index = now.choose(args[0], own, now.experts.to(own.device))
        if isinstance(out, Tensor):
            return index.view(out.shape)
        values = args[0].gather(-1, index).view(out.values.shape)
        return type(out)((values, index.view(out.indices.shape)))

    def _now(self, inside: Inside) -> Follow | None:
        key = inside.name, inside.choices
        inside.choices, at = inside.choices + 1, self.made[key]
        self.made[key] += 1
        return next(iter(self.following.get(key, ())[at : at + 1]), None)


class Sight:
    """Records the choices of a rank's run, but not in modules whose names begin as in `but`."""

    def __init__(self, but: tuple[str, ...]) -> None:
        self.but, self.seen = but, Seen()

    def note(self, name: str, number: int, choice: Tensor) -> None:
        self.seen.setdefault((name, number), []).append(choice.detach().cpu())

    def call(self, inside: Inside, func: Any, args: Any, kwargs: Any) -> Any:
        """Call a function, and record its choice."""
        own = args[0] > 0 if signed(func, args) else None  # before a call that writes to it
        out = func(*args, **kwargs)
        choice = chosen(func, args, kwargs, out) if own is None else own
        but = inside.name == LOSS or f"{inside.name}.".startswith(self.but)
        if choice is not None and not but:
            self.note(inside.name, inside.choices, choice)
            inside.choices += 1
        return out


def joined(
    every: Sequence[tuple[int, int, int, Seen]], rows: Sequence[Counts], plan: Plan, each: Each
) -> Seen:
    """All ranks' choices for an oracle's passes. `every`: each rank's place on the data axes (`cp`
    is the last), tensor rank and stage; `rows` by microbatch and data rank. Calls of several
    stages, such as the root's, are left out: each numbers only its own choices.
    """
    by_key: dict[Key, dict[int, dict[int, list[Tensor]]]] = defaultdict(lambda: defaultdict(dict))
    stages: dict[str, set[int]] = defaultdict(set, {"": set(range(plan.mesh.size_of("pp")))})
    for place, tensor_rank, stage, seen in every:
        for key, choices in seen.items():
            by_key[key][place][tensor_rank] = choices
            stages[key[0]].add(stage)
    by_key = {key: of for key, of in by_key.items() if len(stages[key[0]]) == 1}
    return {
        key: _passes({place: _columns(own) for place, own in of.items()}, rows, plan, each)
        for key, of in by_key.items()
    }


def _columns(by_tensor_rank: Mapping[int, list[Tensor]]) -> list[Tensor]:
    """The choices of tensor ranks: signs joined side by side, others alike on all ranks."""
    first, *others = (by_tensor_rank[rank] for rank in sorted(by_tensor_rank))
    if not others or not first or first[0].dtype is not torch.bool:
        return first
    every = [*zip(first, *others, strict=False)]
    same = all(len({x.shape[:-1] for x in of}) == 1 for of in every)
    return [torch.cat(of, -1) for of in every] if same else first


def _passes(
    by_place: Mapping[int, list[Tensor]], rows: Sequence[Counts], plan: Plan, each: Each
) -> list[Tensor]:
    """A choice in the passes of an oracle; none if the ranks made different numbers of choices."""
    calls, rest = divmod(min(map(len, by_place.values())), len(rows))
    if rest or len({*map(len, by_place.values())}) > 1:
        return []

    def whole(m: int, rank: int, i: int) -> Tensor:
        own = [by_place[rank * plan.cp + k][m * calls + i] for k in range(plan.cp)]
        return own[0] if plan.cp == 1 else of_positions(own, rows[m][rank], plan)

    found = [
        [whole(m, rank, i) for rank, m in own if rows[m][rank]]
        for own in Microbatches(len(rows[0]), len(rows), each).passes(len(rows[0]))
        for i in range(calls)
        if any(rows[m][rank] for rank, m in own)
    ]
    same = all(len({x.shape[1:] for x in own}) == 1 for own in found)
    return [torch.cat(own) for own in found] if same else []
