"""Experts on the tensor axis: each rank has a part of the hidden features of every expert.

    E experts      D  width      F  hidden width, F / n of it on each of n ranks

    x [N, D] ─ enter ─┬─ router ─ gate ─────────────────────────── weights ─┐
                      └─ dispatch ─ up, gate [E, F / n, D] ─ down [E, D, F / n] ─ combine ─ leave

An expert is a column-parallel layer and then a row-parallel one (arXiv 1909.08053, section 3), and
the ranks compute the same routing. The output of a rank's experts is a partial sum, so the
gradients of the weights of the choices, and of the router behind them, are partial too: they are
summed with those of the router's weight, once a step. `leave` sums the outputs of the tokens, which
are fewer than the rows of the experts.

Under `sp` the layer's input is gathered along the sequence (the style "gather"), and `leave` gives
each rank its shard. Experts of transformers act on the shards themselves, with whole matrices.
"""

from collections.abc import Mapping
from dataclasses import replace

from torch import nn

from shardwise.comm.world import Axis
from shardwise.core.errors import bad
from shardwise.core.layouts.layout import R
from shardwise.core.layouts.param_layout import AxisLayout
from shardwise.core.layouts.uneven import Cut, even, packed
from shardwise.techniques.expert.moe_layer import ExpertPlace, Experts, MoE, identity
from shardwise.techniques.expert.stacked import StackedOnRanks, stacked_experts
from shardwise.techniques.tensor.linear import Stream
from shardwise.techniques.tensor.tensor_table import Style, general


def hidden_cuts(model: nn.Module, ranks: int, *, sp: bool) -> dict[str, Cut]:
    """The parts of the stacked weights on `ranks` ranks of the tensor axis, by name."""
    found: dict[str, Cut] = {}
    for name, module in model.named_modules():
        if isinstance(module, Experts):
            hidden = module.up.shape[1]
            cuts = {"gate": even(1, hidden, ranks), "up": even(1, hidden, ranks)}
            cuts["down"] = even(2, hidden, ranks)
            found |= {f"{name}.{key}": cut for key, cut in cuts.items()}
    for name, module in {} if sp else stacked_experts(model).items():
        found |= {f"{name}.{key}": cut for key, cut in _stacked_cuts(module, ranks).items()}
    return found


def _stacked_cuts(module: nn.Module, ranks: int) -> dict[str, Cut]:
    """Of gate_up_proj [E, 2 F, D] and down_proj [E, D, F]; other weights stay whole."""
    own = {key: tuple(p.shape) for key, p in module.named_parameters(recurse=False)}
    both, down = own.get("gate_up_proj", ()), own.get("down_proj", ())
    if len(own) != 2 or len(both) != 3 or both != (down[0], 2 * down[2], down[1]):
        return {}
    half = even(1, down[2], ranks)
    return {"gate_up_proj": packed(1, [half, half]), "down_proj": even(2, down[2], ranks)}


def layouts_on_tensor_axis(model: nn.Module, ranks: int, *, sp: bool) -> dict[str, AxisLayout]:
    """The layouts on the tensor axis that no style of the table states, by name."""
    cuts = hidden_cuts(model, ranks, sp=sp)
    routers = {
        f"{name}.{key}.weight": AxisLayout(R, ranks)
        for name, layer in model.named_modules()
        if isinstance(layer, MoE)
        for key in ("router", "spread")
        if getattr(layer, key) is not None
    }
    return {name: AxisLayout.sharded(cut) for name, cut in cuts.items()} | routers


def on_tensor_axis(
    model: nn.Module, axis: Axis, stream: Stream, found: Mapping[str, AxisLayout], *, sp: bool
) -> None:
    """Let the layers of experts, whose weights are cut already, enter and leave the tensor axis."""
    for layer in model.modules():
        if isinstance(layer, MoE):
            enter = identity if sp else stream.spread  # what is gathered is used differently
            layer.place = replace(layer.place, enter=enter, leave=stream.leave, parts=axis.size)
    for name, module in stacked_experts(model).items():
        if f"{name}.down_proj" in found and found[f"{name}.down_proj"].cut:
            place = ExpertPlace(enter=stream.spread, leave=stream.leave, parts=axis.size)
            module.forward = StackedOnRanks(module, place)


def require_gathered(model: nn.Module, styles: Mapping[str, Style]) -> None:
    """Raise InputError if a layer of experts has not the whole sequence under `sp`."""
    for name, layer in model.named_modules():
        if isinstance(layer, MoE) and styles.get(name) != Style("gather"):
            pattern = general(name)
            raise bad(
                f"'sp' with {name}, whose tokens are numbered over the whole sequence",
                'the style "gather" in sequence, for every layer of experts',
                f'Table.of({{...}}, sequence={{"{pattern}": "gather", ...}})',
            )
