"""A pipeline on its own, in a plain PyTorch loop: `sw.Pipe`.

The user's loop runs between forward and backward, so a schedule runs in two halves: its forwards,
in their order, and then, in the loop's backward, the rest.

    call         F F F F | out, from the last stage to every rank
    backward             | gradient of out, which the last stage uses | B B B B

Every rank passes the same input.  If it requires a gradient (a layer before the pipe), every rank
gets the sum of the stages' gradients.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function

from shardwise.comm.move import all_reduce, broadcast
from shardwise.comm.parameter import become
from shardwise.comm.transport import Lease
from shardwise.comm.unchanged import normal_mode
from shardwise.comm.world import Axis, World
from shardwise.core.applied import Fill
from shardwise.core.buffer_sizes import pool_bytes
from shardwise.core.errors import bad
from shardwise.core.mesh import PIPELINE
from shardwise.core.plan.plan import Plan
from shardwise.core.schedule.library import LIBRARY, MOST_FORWARDS, Size, build, entry
from shardwise.core.schedule.schedule import Schedule, Token
from shardwise.core.tools.arguments import integer, short_repr
from shardwise.core.tools.hook import no_copy
from shardwise.core.tools.structure import Structure, graph_break
from shardwise.core.tools.tree import leaves, mapped
from shardwise.engine.batch import copied, enough, is_written, split
from shardwise.engine.checks import consistency, validate
from shardwise.engine.checks.as_before import as_before
from shardwise.engine.checks.validate import without_compiler
from shardwise.engine.default_fill import default_fill, materialise
from shardwise.engine.rank_zero_weights import RankZeroWeights, missing_weights
from shardwise.techniques.data.apply import drivers
from shardwise.techniques.pipeline import stage_module
from shardwise.techniques.pipeline.partition import calls_of, starts
from shardwise.techniques.pipeline.runtime import open_channels, run
from shardwise.techniques.pipeline.stage_io import StageTrace
from shardwise.techniques.pipeline.stage_module import Staging
from shardwise.techniques.pipeline.stage_work import Microbatch, NoUnits, StageWork
from shardwise.techniques.pipeline.trace.outside_buffers import ByShape
from shardwise.techniques.pipeline.trace.placeholders import twin
from shardwise.techniques.pipeline.trace.probe import ActivationProbe
from shardwise.techniques.tensor.sharded_logits import nowhere
from shardwise.wrap.pipe_consistency import PipeConsistency, restore
from shardwise.wrap.unwrap import Wrapper, no_wrapper, wrapper_of

Forward = Callable[..., Any]


@normal_mode()
def Pipe(  # noqa: N802
    module: nn.Module,
    chunks: int = 8,
    stages: Sequence[str] | None = None,
    schedule: str = "gpipe",
    world: World | None = None,
) -> nn.Module:
    """Distribute `module` in stages over the ranks of `world`, in place; called by all ranks.

    Its class and the names of its parameters stay; `parameters()` are those of this rank's stages,
    and begin with rank 0's values.  A call splits its tensors along dim 0 into `chunks`
    microbatches; every rank passes the same ones, gets the full output, and calls backward on it.

    stages: the modules that begin the stages after the first; None balances them by parameters.
    schedule: the name of a schedule that does not update weights itself ("gpipe", "1f1b", ...).
    (Huang et al., "GPipe", arXiv 1811.06965; Kim et al., "torchgpipe", arXiv 2004.09910.)

    Raises:
        InputError: fewer layers than stages; an unknown schedule, or one that does not allow this
            number of chunks; a module that is wrapped already.  From a call: fewer rows than
            chunks; an output without rows.
    """
    validate.model(module, "sw.Pipe", "nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))")
    integer("chunks", chunks, 1, 8, MOST_FORWARDS)
    no_wrapper(module)
    if any(drivers(part) for part in module.modules()):
        raise validate.already_wrapped(module)
    world = validate.leased_world(world)
    module = without_compiler(module, "sw.Pipe", world.rank)
    asked = {"chunks": chunks, "stages": stages, "schedule": schedule}
    consistency.require_same(world, {"the module": module} | asked)
    plan = Plan(axes=((PIPELINE, world.size),))
    world = world.on(plan.mesh)
    size_bytes = pool_bytes(plan, sum(p.nbytes for p in module.parameters()), world.device.type)
    world.pool.reserve(size_bytes, world.device)
    whole = _schedule(schedule, chunks, world.size)
    with as_before((), module):
        calls = calls_of(module)
    begin = starts(module, len(whole.home), stages, calls)
    weights = RankZeroWeights.take(module, missing_weights(module, world), world)
    fill = default_fill(module, 0)
    materialise(module, world.device)
    for t in [*module.parameters(), *module.buffers()]:
        t.data = t.data if t.is_meta else t.data.to(world.device)
    copy, named = twin(module), dict(module.named_parameters())
    stage_module.agree(module, world.axis(PIPELINE), world.device)
    staged = stage_module.lay_out(module, (copy, nowhere()), world, whole, begin, calls)
    _fill(module, named, weights, fill)
    trained = any(p.requires_grad for p in named.values())
    tied = {named[name]: staged.ties[name] for name in sorted(staged.ties)}
    # a hook cannot replace the forward, and other modules share the class
    module.forward = Piped(module, staged, trained, tied, world)
    return module


def _fill(
    module: nn.Module, named: Mapping[str, nn.Parameter], weights: RankZeroWeights, fill: Fill
) -> None:
    """Give this rank's parameters on meta their values: from rank 0, or their initial ones."""
    own = {id(p) for p in module.parameters()}
    for name, values in weights.broadcasts():
        if id(named[name]) in own:
            become(named[name], values)
    for name, p in named.items():
        if id(p) in own and p.is_meta:
            values = torch.empty_like(p, device=weights.device)
            fill(name, values)
            become(p, values)


def _schedule(name: Any, chunks: int, ranks: int) -> Schedule:
    found = entry(name if isinstance(name, str) else short_repr(name))
    if found.updates(Size(1, 1)):
        names = ", ".join(known for known, one in LIBRARY.items() if not one.updates(Size(1, 1)))
        what = f"sw.Pipe with {name}, which updates by itself, although the loop updates"
        raise bad(what, names, 'schedule="1f1b"')
    return build(f"{name}:{chunks}", ranks)


def pipe_of(module: nn.Module) -> "Piped | None":
    """The object that sw.Pipe put in place of the module's forward; None for any other module."""
    wrapper = wrapper_of(module)
    return wrapper if isinstance(wrapper, Piped) else None


def halves(schedule: Schedule) -> tuple[Schedule, Schedule]:
    actions = [list(schedule.actions(rank)) for rank in range(schedule.ranks)]
    first = tuple(tuple(a for a in row if a.op == "F") for row in actions)
    second = tuple(tuple(a for a in row if a.op != "F") for row in actions)
    return replace(schedule, rows=first), replace(schedule, rows=second)


@dataclass
class _TracedCall:
    """The trace for a microbatch's shapes, the output on meta, and the tensors in it."""

    trace: StageTrace
    out: list[Tensor]
    structure: Any
    written: bool


class Piped(Wrapper):
    """Replaces the module's forward by passes over the pipeline."""

    def __init__(
        self,
        module: nn.Module,
        staged: Staging,
        trained: bool,
        tied: dict[nn.Parameter, Axis],
        world: World,
    ) -> None:
        self.world = world
        self.module, self.staged, self.trained, self.tied = module, staged, trained, tied
        self.axis, self.device = staged.axis, staged.stages.device
        self.forward: Forward = type(module).forward
        frozen = [p for p in module.parameters() if not p.requires_grad]
        self.structure = Structure(module, frozen)
        self.halves = halves(staged.schedule)
        self.known = ByShape[_TracedCall]()
        self.options = PipeConsistency(module.parameters(), staged.axis, staged.stages.device)
        self.compare_ranks = self.options.meet
        for half in self.halves:
            open_channels(half, staged.axis, staged.stages.device)

    def __reduce__(self) -> Any:
        raise no_copy(type(self.module).__name__)

    def unwrap(self) -> nn.Module:
        """The module with the layers of all ranks, and its own forward."""
        self.structure.require_unchanged()  # other ranks would put the old part back
        restore(self.staged)
        self.options.remove()
        assert isinstance(self.world.links, Lease)
        self.world.links.remove()
        del self.module.forward
        return self.module

    def counted_elsewhere(self) -> set[nn.Parameter]:
        return {p for p, holders in self.tied.items() if holders.rank}

    @graph_break
    @normal_mode()
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The output of the whole batch, on every rank."""
        without_compiler(self.module, "sw.Pipe", self.world.rank)
        self.structure.require_unchanged()
        chunks = self.staged.schedule.microbatches
        validate.no_backward_optimizer(self.module, "sw.Pipe of a module")
        enough((args, kwargs), chunks, empty=False)
        graded = torch.is_grad_enabled()
        if graded and self.trained:
            self.options.compare((args, kwargs))
        inputs = [x for x in _tensors((args, kwargs)) if graded and x.requires_grad]
        parts = split((args, kwargs), chunks, f"sw.Pipe(module, chunks={chunks})")
        parts = [mapped(_leaf, part, Tensor, objects=True) for part in parts]
        pass_ = _Pass(self, parts, [self._traced(part) for part in parts])
        outs = pass_.forwards()
        if graded and (self.trained or inputs):
            device = self.staged.stages.device
            graph = torch.empty(0, dtype=torch.float32, device=device, requires_grad=True)
            outs = _Back.apply(pass_, graph, *inputs)
        made = iter(outs)
        return mapped(lambda _: next(made), pass_.structure, Tensor, objects=True)

    def call(self, module: nn.Module, part: Any, own: Any = None) -> Any:
        args, kwargs = own or part
        return self.forward(module, *args, **kwargs)

    def _traced(self, part: Any) -> _TracedCall:
        stages = self.staged.stages
        modes = torch.is_grad_enabled(), stages.layers.modes

        def fits(known: _TracedCall) -> bool:
            own = copied(part) if known.written else part
            with as_before((), self.module, *stages.layers.elsewhere):
                return stages.fits(known.trace, lambda model: self.call(model, own))

        return self.known.get(part, modes, lambda: self._trace(part), fits)

    def _trace(self, part: Any) -> _TracedCall:
        found, own, stages = list[Any](), copied(part), self.staged.stages
        probe = ActivationProbe(
            self.staged, lambda model: self.call(model, copied(part)), NoUnits()
        )
        with as_before((), self.module, *stages.layers.elsewhere):
            trace = stages.trace(lambda model: found.append(self.call(model, own)), probe)
        out = mapped(_on_meta, found[0], Tensor, objects=True)
        _whole(_tensors(out), _rows(part))
        return _TracedCall(trace, _tensors(out), out, is_written(own))


@dataclass(eq=False)
class _Pass:
    piped: Piped
    parts: list[Any]
    known: list[_TracedCall]
    table: dict[Token, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.staged = self.piped.staged
        self.device = self.staged.stages.device
        self.last = PipeOutputs()
        pairs = enumerate(zip(self.parts, self.known, strict=True))
        self.work = StageWork(
            self.staged.stages,
            NoUnits(),
            self.last,
            self.piped.call,
            [Microbatch(k, p, trace=of.trace, written=of.written) for k, (p, of) in pairs],
            trains=torch.is_grad_enabled(),
        )
        self.like, self.structure = self.known[0].out, self.known[0].structure
        self.wanted = [x.requires_grad for x in self.like]
        self.outs: list[Tensor] = []
        self.played = False

    # --- the two halves -----------------------------------------------------------------------

    def forwards(self) -> list[Tensor]:
        """The first half; every rank gets the last stage's output, concatenated along rows."""
        axis = self.staged.axis
        run(self.piped.halves[0], axis, self.work, table=self.table)
        self.staged.share_buffers(known.trace for known in self.known)
        last = self.staged.schedule.home[-1]
        outs: list[Tensor] = []
        for k, like in enumerate(self.like):
            shape = sum(known.out[k].shape[0] for known in self.known), *like.shape[1:]
            out = torch.empty(shape, dtype=like.dtype, device=self.device)
            if axis.rank == last:
                torch.cat([self.last.results[i][k] for i in range(len(self.parts))], out=out)
            outs.append(broadcast(out, axis, last))
        self.outs = list(outs)
        self.last.results = {}
        return outs

    def backwards(self, grads: Sequence[Tensor | None], inputs: int) -> list[Tensor]:
        """The second half, from the gradients of `outs`; returns the gradients of the inputs."""
        if self.played:
            raise bad(
                "a second backward pass through the same output of a pipe",
                "one backward pass for each call, because it frees the call's activations",
                "the sum of both losses, or another call",
            )
        self.played, self.piped.options.computes_loss = True, False
        axis = self.staged.axis
        by_leaf = [
            grad.split([known.out[k].shape[0] for known in self.known])
            for k, grad in enumerate(grads)
            if self.wanted[k] and grad is not None
        ]
        self.last.grads = list(zip(*by_leaf, strict=True))
        tied = {p: axis for p, axis in self.piped.tied.items() if p.requires_grad}
        before = [p.grad for p in tied]
        for p in tied:
            p.grad = None
        run(self.piped.halves[1], axis, self.work, table=self.table)
        self.table.clear()
        for (p, holders), old in zip(tied.items(), before, strict=True):
            own = torch.zeros_like(p) if p.grad is None else p.grad.contiguous()
            p.grad = all_reduce(own, holders)
            if old is not None:
                p.grad += old
        self.piped.options.note(grads)
        return [self._input(k) for k in range(inputs)]

    def _input(self, k: int) -> Tensor:
        given = [[x for x in _tensors(part) if x.requires_grad][k] for part in self.parts]
        pieces = [torch.zeros_like(x) if x.grad is None else x.grad for x in given]
        if given[0].dim():
            return all_reduce(torch.cat(pieces), self.staged.axis)
        return all_reduce(torch.stack(pieces).sum(0), self.staged.axis)


class PipeOutputs:
    """The last stage's `results`, detached for the loop, and their `grads`, by microbatch."""

    def __init__(self) -> None:
        self.results: dict[int, list[Tensor]] = {}
        self.grads: list[Sequence[Tensor]] = []

    def outputs(self, microbatch: Microbatch, result: Any) -> list[Tensor]:
        """Keeps the result, and returns its tensors that require a gradient."""
        found = _tensors(result)
        self.results[microbatch.index] = [x.detach() for x in found]
        return [x for x in found if x.requires_grad]

    def gradients(self, microbatch: Microbatch) -> Sequence[Tensor]:
        return self.grads[microbatch.index]


class _Back(Function):
    """The outputs of a call; their backward is the second half of the schedule."""

    @staticmethod
    def forward(ctx: Any, pass_: _Pass, _: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
        """The tensors of the output; `_` requires a gradient, whether or not `inputs` are any."""
        ctx.pass_, ctx.inputs = pass_, len(inputs)
        # tensors of their own: who keeps the others, as a transport may, keeps no activations
        outs = [x.detach() for x in pass_.outs]
        pass_.outs = []
        pairs = zip(outs, pass_.wanted, strict=True)
        ctx.mark_non_differentiable(*(x for x, want in pairs if not want))
        return tuple(outs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, *ctx.pass_.backwards(grads, ctx.inputs)


def _leaf(x: Tensor) -> Tensor:
    x = x.clone() if x.is_inference() else x  # such a tensor could not be written to
    return x.detach().requires_grad_(x.requires_grad and torch.is_grad_enabled())


def _on_meta(x: Tensor) -> Tensor:
    return torch.empty_like(x, device="meta").requires_grad_(x.requires_grad)


def _rows(batch: Any) -> int:
    return max((len(x) for x in _tensors(batch) if x.dim()), default=0)


def _tensors(x: Any) -> list[Tensor]:
    return leaves(x, Tensor, objects=True)


def _whole(out: Sequence[Tensor], rows: int) -> None:
    for x in out:
        if not x.dim() or len(x) != rows:
            raise bad(
                f"an output of shape {list(x.shape)} of a pipe, from a microbatch of {rows} rows",
                "tensors with one row for each row of the input, in any nesting",
                "the loss outside of the module, or sw.parallelize, which takes a loss",
            )
