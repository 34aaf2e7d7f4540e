"""What must not change in a wrapped model, and functions that torch.compile must not compile.

A module or parameter that is added or replaced after wrapping has no hooks and is in no flat
parameter: every rank would train its own.  The check before each step, or each forward of a loop,
compares the identities of all entries in one pass: a fifth of a millisecond for 300 modules.

Gathering, freeing and reducing change the storage of parameters and wait for other ranks.  They run
between two compiled graphs, whose inputs are the gathered parameters.  `torch.compiler.disable`
does the same but loads the compiler, which takes seconds: `graph_break` sets the frame evaluator
directly, if torch has loaded it, and imports nothing of torch.
"""

import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import Any

from shardwise.core.errors import InputError, bad
from shardwise.core.tools.hook import Hook

#: How a plain loop changes a wrapped module.
BY_HAND = (
    "put back what was there, then module = sw.unwrap(module), the change, sw.DDP(module), "
    "sw.FSDP(module) or sw.Pipe(module) again, and a new optimizer"
)
#: How the model of an engine changes.
BY_ENGINE = (
    "put back what was there, then state = sw.full_state_dict(engine), the change of a plain copy "
    "of the model, its load_state_dict(state, strict=False), and a new engine of it with "
    "sw.parallelize"
)
#: The name of the module inside the result of torch.compile.
COMPILED = "_orig_mod"
_ALLOWED = "the modules, parameters and requires_grad flags that it had when it was wrapped"


class Structure:
    """The entries of every module's tables under `root`; `frozen` are parameters not trained."""

    def __init__(self, root: Any, frozen: Sequence[Any], instead: str = BY_HAND) -> None:
        self.root, self.frozen, self.instead = root, list(frozen), instead
        self.names = [name for name, _ in root.named_modules()]
        self.modules = list(root.modules())
        # held, so that nothing new gets the identity of what was there
        self.before = [dict(table) for table in self._tables()]
        self.ids = self._ids()

    def _tables(self) -> list[dict[str, Any]]:
        return [table for m in self.modules for table in (m._parameters, m._modules)]

    def _ids(self) -> list[int]:
        return [*map(id, chain.from_iterable(map(dict[str, Any].values, self._tables())))]

    def require_unchanged(self, *, lent: tuple[type, ...] = ()) -> None:
        """Raise InputError if a module or parameter was replaced, or a frozen one is trained now.
        Allowed are parts that were compiled in place (torch.compile), and values of exactly one of
        the types `lent`, or of torch.func.functional_call, in the place of parameters.
        """
        ids = self._ids()
        if ids != self.ids:
            changes = list(self._changes(lent))
            if changes and not _in_functional_call():
                raise self._error("changed", changes)
            if not (lent or changes):  # parts were compiled
                self.before, self.ids = [dict(table) for table in self._tables()], ids
        if any(p.requires_grad for p in self.frozen):
            frozen = set(map(id, self.frozen))
            named = [n for n, p in self.root.named_parameters() if id(p) in frozen]
            raise self._error("unfrozen (requires_grad_(True))", named)

    def _changes(self, lent: tuple[type, ...]) -> Iterator[str]:
        for number, (now, before) in enumerate(zip(self._tables(), self.before, strict=True)):
            prefix = self.names[number // 2]
            for key in dict.fromkeys([*before, *now]):
                old, new = before.get(key), now.get(key)
                if uncompiled(old) is uncompiled(new) or (old is not None and type(new) in lent):
                    continue
                what = "new" if old is None else "gone" if new is None else "replaced"
                yield f"{prefix}.{key} ({what})" if prefix else f"{key} ({what})"

    def _error(self, what: str, names: Sequence[str]) -> InputError:
        more = ", ..." if len(names) > 4 else ""
        return bad(
            f"a {type(self.root).__name__} of which parts were {what} after it was wrapped: "
            f"{', '.join(names[:4])}{more}",
            _ALLOWED,
            self.instead,
        )


def uncompiled(part: Any) -> Any:
    """The part itself, or what is inside the result of torch.compile(part)."""
    return getattr(part, "_modules", {}).get(COMPILED) or part


def plain_key(key: str) -> str:
    """The name, or key of a state_dict, without the prefix that torch.compile adds."""
    return key.replace(f"{COMPILED}.", "")


def _in_functional_call() -> bool:
    """Whether torch.func.functional_call has lent the values, and will put back what was there."""
    frame = inspect.currentframe()
    while frame is not None and frame.f_code.co_name != "_functional_call":
        frame = frame.f_back
    return frame is not None


# --- graph breaks ---------------------------------------------------------------------------------


#: What torch.compile(model, fullgraph=True) says.
_WHY = (
    "parameters are gathered between two graphs: compile the model without fullgraph=True, or "
    "each block with it, for block in model.blocks: block.compile(fullgraph=True)"
)


def graph_break(act: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `act` so that each call is a graph break and nothing in it is compiled."""

    def call(*args: object, **kwargs: object) -> Any:
        return act(*args, **kwargs)

    call._torchdynamo_disable = True  # type: ignore[attr-defined]  # torch.compiler.disable's mark
    call._torchdynamo_disable_msg = _WHY  # type: ignore[attr-defined]
    _skip(call, inner=True)
    _skip(Hook.__call__, inner=False)  # nn.Module calls it for each hook
    return call


def _skip(function: Any, inner: bool) -> None:
    """Do not compile frames of the function; with `inner`, nor of functions that it calls."""
    evaluator: Any = sys.modules.get("torch._C._dynamo.eval_frame")
    actions = getattr(evaluator, "_FrameAction", None)
    if actions is not None:
        below = actions.SKIP if inner else actions.DEFAULT
        strategy = evaluator._FrameExecStrategy(actions.SKIP, below)
        evaluator.set_code_exec_strategy(function.__code__, strategy)
