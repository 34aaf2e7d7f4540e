"""Sharding of a model on the tensor axis according to its table.

For every module in the table: its parameters are sharded (or their gradients are summed), its hooks
are set (parallel/tensor/), and its attributes that count heads get this rank's numbers.  Everything
else is replicated on all ranks of the axis.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from shardwise.comm.move import broadcast, part
from shardwise.comm.world import Axis, World
from shardwise.core.errors import refusal
from shardwise.core.layout import R
from shardwise.core.param_layout import AxisLayout, Groups
from shardwise.core.plan import Plan
from shardwise.core.styles import ModuleShape, Style
from shardwise.core.tensor_plan import Table, assign, bias_cut, cuts, matches, numbers, unmatched
from shardwise.core.tensor_plan_check import check
from shardwise.core.uneven import Cut
from shardwise.engine import expert_tensor, rng
from shardwise.engine.layer_plans import LayerPlans, layer_plans, only
from shardwise.engine.reads import guard_layer
from shardwise.engine.tensor_layout import Tensors, nowhere
from shardwise.engine.tensor_plan import shapes, table_of, without
from shardwise.parallel.tensor import embedding, linear, sequence
from shardwise.parallel.tensor.logits import sharded_logits
from shardwise.parallel.tensor.shared_weights import sum_spans

AXIS = "tp"


def table_for(model: nn.Module, plan: Plan, own: Table | Mapping[str, str] | None) -> Table | None:
    """The table of styles of `model` for `plan`; None if the plan has no tensor axis.

    Raises InputError if there is no table or it does not fit, with every problem and its remedy.
    """
    ranks = plan.mesh.size_of(AXIS)
    if ranks == 1 and own is None:
        return None
    table = table_of(model, own)  # also checks a table that the plan does not use
    if ranks == 1:
        return None
    if not table.styles:
        raise without(model, "has a table without a style")
    if plan.layers:
        table = only(model, table, [], layer_plans(model, plan).meshes)
    if problems := check(table, shapes(model), plan.sp, ranks):
        raise refusal(f"the table of the {type(model).__name__} under '{plan}'", problems)
    if plan.sp:
        expert_tensor.require_gathered(model, matches(table, list(shapes(model)), sp=True))
    return table


def layer_tables(model: nn.Module, plan: Plan, own: Table | Mapping[str, str] | None) -> LayerPlans:
    """The plans of single layers, each with the styles of its layers if it has a tensor axis.

    Raises InputError as `layer_plans` and `table_for` do.
    """
    plans = layer_plans(model, plan)
    if all(each.plan.mesh.size_of(AXIS) == 1 for each in plans.meshes):
        return plans
    table, found = table_of(model, own), list(plans.layers)
    if problems := unmatched(table, list(shapes(model)), sp=False):
        raise refusal(f"the table of the {type(model).__name__}", problems)
    for each in plans.meshes:
        ranks = each.plan.mesh.size_of(AXIS)
        if ranks == 1:
            continue
        part = only(model, table, [each], [])
        if not part.styles:
            raise without(model, f"has a table without a style for {', '.join(each.modules)}")
        if problems := check(part, shapes(model), False, ranks):
            raise refusal(f"the table of {', '.join(each.modules)} under '{each.plan}'", problems)
        found[each.number - 1] = replace(each, table=part)
    return LayerPlans(tuple(found))


def lay_out(
    model: nn.Module,
    world: World,
    sp: bool,
    table: Table | None,
    layers: Sequence[str] = (),
) -> Tensors:
    """Shard `model` in place on the tensor axis of `world` according to `table`.

    If it is the axis of some `layers` only, the others, layers of experts and torch's default
    generators are left to that of the model.
    """
    axis = world.axis(AXIS)
    if table is None or axis.size == 1:
        return nowhere()
    for module in [model.get_submodule(name) for name in layers] or [model]:
        agree(module, axis, world.device)
    tensors = Tensors(axis, linear.Stream(axis, sp))
    known = shapes(model)
    styles = assign(table, list(known), sp)
    layout = _Layout(model, world, tensors)
    random = tensors.random = rng.ShardedRandom(axis, model.modules())
    random.mark_outputs(model, styles, sp)
    layout.entered = [name for name, style in styles.items() if style.name == "gather"]
    for name, style in styles.items():
        sizes = cuts(style, known[name], table, axis.size)
        layout.hook(name, style, sizes, known[name])
        layout.hold(name, style, sizes, bias_cut(style, known[name], table, axis.size))
    for name, changed in numbers(table, styles, known, axis.rank, axis.size).items():
        for attribute, number in changed.items():
            setattr(model.get_submodule(name), attribute, number)
    if not layers:
        layout.hold_experts(sp)
    layout.shard_parameters()
    if not layers:
        expert_tensor.on_tensor_axis(model, tensors, sp=sp)
        rng.synchronize(axis, world.device)
    random.mark_inputs(model, styles, sp)
    for stream in (layout.stream, layout.whole):
        model.register_forward_hook(partial(_end, stream))
    return tensors


def _end(stream: linear.Stream, *_: object) -> None:
    stream.end()


def agree(model: nn.Module, axis: Axis, device: torch.device) -> None:
    """Broadcast the first rank's weights and buffers, one by one on `device`."""
    for t in [*model.parameters(), *model.buffers()]:
        if not t.is_meta and t.numel():
            together = t.data.to(device).contiguous()
            broadcast(together, axis)
            t.data.copy_(together)


def _lines(cut: Cut) -> Groups:
    """Groups of ranks that share a part of a packed weight; empty if none do."""
    lines = [next(iter(cut.common(rank)), (rank,)) for rank in range(cut.ranks)]
    return tuple(dict.fromkeys(lines)) if any(len(line) > 1 for line in lines) else ()


class _Layout:
    """One model while it is sharded: the decisions for its parameters so far."""

    def __init__(self, model: nn.Module, world: World, tensors: Tensors) -> None:
        self.model, self.world, self.tensors = model, world, tensors
        self.stream, self.axis = tensors.stream, tensors.axis
        #: the stream of modules that need the gathered sequence
        self.whole = linear.Stream(self.axis, split=False)
        self.names = {id(p): name for name, p in model.named_parameters()}
        self.wanted: dict[str, tuple[nn.Parameter, Cut]] = {}
        self.entered: list[str] = []  # modules whose inputs are gathered

    def hook(self, name: str, style: Style, cut: Cut | None, shape: ModuleShape) -> None:
        """Set the hooks of one module; the last one set runs first, and user hooks run last."""
        module = self.model.get_submodule(name)
        stream = self.whole if style.by == "whole" else self.stream
        entered = any(name.startswith(f"{outer}.") for outer in self.entered)
        match style.name, cut:
            case "vocabulary", Cut() if isinstance(module, nn.Embedding):
                straight = style.by == "sequence" or not stream.split
                embedding.embed(module, self.axis, cut, stream.leave if straight else stream.sum)
            case "vocabulary", Cut():
                self._keep_cut(module, cut)
                linear.columns(module, stream, shape.transposed, entered)
            case "colwise", _:
                linear.columns(module, stream, shape.transposed, entered)
            case "colwise_gather_output", Cut():
                sequence.gather_output(module, stream, cut)
                linear.columns(module, stream, shape.transposed, entered)
            case "rowwise", _:
                sequence.rows(module, stream, linear.is_linear(module))
            case "rowwise_split_input", Cut():
                sequence.split_input(module, stream, cut)
                sequence.rows(module, stream, linear.is_linear(module))
            case "gather", _:
                sequence.gather_input(module, stream)
            case "split", _:
                sequence.change_input(module, stream.scatter)
            case "sequence", _ if style.by == "join":
                self._join(module)
            case _:
                pass

    def _join(self, module: nn.Module) -> None:
        def whole(_: nn.Module, __: object, y: Tensor) -> Tensor:
            return self.stream.unsplit(y)

        module.register_forward_hook(whole, prepend=True)

    def _keep_cut(self, module: nn.Module, cut: Cut) -> None:
        def logits(_: nn.Module, __: object, y: Tensor) -> Tensor:
            return sharded_logits(y, self.axis, cut, self.stream)

        module.register_forward_hook(logits, prepend=True)

    def hold(self, name: str, style: Style, weight: Cut | None, bias: Cut | None) -> None:
        """Record the layout of the module's own parameters."""
        summed = style.name in ("replicated", "sequence")
        # under sp the bias of a rowwise layer is added to shards of the sequence
        row = style.name.startswith("rowwise") and self.stream.split
        module, split = self.model.get_submodule(name), list[str]()
        for key, p in module.named_parameters(recurse=summed):
            full = self.names[id(p)]
            cut = {"weight": weight, "bias": bias}.get(key)
            if cut is not None:
                self.wanted[full] = (p, cut)
                split.append(key)
            elif summed or (key == "bias" and row):
                self.tensors.layouts[full] = AxisLayout(R, self.axis.size)
                self.tensors.sums[full] = self.axis
        if split:
            guard_layer(module, split, name)

    def hold_experts(self, sp: bool) -> None:
        """Record the layouts of layers of experts, which no style says."""
        params = dict(self.model.named_parameters())
        found = expert_tensor.layouts_on_tensor_axis(self.model, self.axis.size, sp=sp)
        for name, layout in found.items():
            if layout.cut is not None:
                self.wanted[name] = (params[name], layout.cut)
            else:
                self.tensors.layouts[name] = layout
                self.tensors.sums[name] = self.axis

    def shard_parameters(self) -> None:
        """Shard the parameters, and open the groups that sum the gradients of shared parts."""
        rank = self.axis.rank
        lines: dict[Groups, Axis] = {(): Axis(AXIS)}
        # hooks keep this object alive, so it must not keep the weights of other stages
        wanted, self.wanted = self.wanted, {}
        for name, (p, cut) in wanted.items():
            layout, within = AxisLayout.sharded(cut), _lines(cut)
            for each in (layout.groups, within):
                if each not in lines:
                    lines[each] = self.world.within(AXIS, each)
            shared = layout.shared(rank)
            if shared is not None and p.requires_grad:
                p.register_hook(partial(sum_spans, cut.dim, shared.spans, lines[within]))
            self.tensors.layouts[name] = layout
            self.tensors.sums[name] = lines[layout.groups]
            if p.is_meta:
                p.data = torch.empty(cut.shape(p.shape, rank), dtype=p.dtype, device="meta")
            else:
                p.data = part(p.data, cut, rank)
