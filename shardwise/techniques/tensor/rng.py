"""Random numbers on the tensor axis, such as dropout masks.

    whole activations       equal masks on all ranks         torch's default generator
    sharded activations     different masks on every rank    a generator of the rank's own

These are the two generators of Megatron-LM (arXiv 1909.08053, appendix B.2). The default generator
has the same state on every rank of the axis. The rank's own is seeded for each draw from the
default generator and the rank. So the state of the default generator determines both: saving and
restoring it restores both, and `torch.utils.checkpoint` draws the same masks when it recomputes.

`ShardedRandom` knows which activations are sharded: hooks mark the outputs of the modules in the
table, and results computed from a marked tensor are marked.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.autograd import _make_grads
from torch.autograd.graph import _engine_run_backward
from torch.nn import functional
from torch.nn.modules.dropout import _DropoutNd
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from shardwise.comm.move import broadcast
from shardwise.comm.unchanged import generators_of, seeded
from shardwise.comm.world import Axis
from shardwise.core.layouts.tensor_table import Style


def _dropout_rate(_x: Tensor, p: float = 0.5, training: bool = True, *_: Any, **__: Any) -> float:
    return p if training else 0.0


def _attention_rate(*qkv: Any, dropout_p: float = 0.0, **_: Any) -> float:
    return qkv[4] if len(qkv) > 4 else dropout_p


#: Functions that draw random numbers for a tensor, by a rate at which 0 means that they draw none.
_RANDOM: Final = {
    functional.dropout: _dropout_rate,
    functional.dropout1d: _dropout_rate,
    functional.dropout2d: _dropout_rate,
    functional.dropout3d: _dropout_rate,
    functional.scaled_dot_product_attention: _attention_rate,
} | dict.fromkeys(
    (
        *(functional.alpha_dropout, functional.feature_alpha_dropout, functional.rrelu),
        *(torch.rand_like, torch.randn_like, torch.bernoulli, Tensor.bernoulli),
        *(Tensor.bernoulli_, Tensor.uniform_, Tensor.normal_, Tensor.exponential_),
    ),
    lambda *_, **__: 1.0,
)


def synchronize(axis: Axis, device: torch.device) -> None:
    for generator in generators_of(device):
        state = broadcast(generator.get_state().to(device), axis)
        generator.set_state(state.cpu())


class ShardedRandom(TorchFunctionMode):
    """Draws random numbers for sharded activations from the rank's own generator.

    The mode costs about a microsecond for each function called, so it is entered only in the first
    passes, in passes of a model with a layer of dropout, and after a pass that drew numbers. A
    backward pass draws none, which says nothing of the next forward.
    """

    def __init__(self, axis: Axis, modules: Iterable[nn.Module] = ()) -> None:
        super().__init__()
        self.axis, self.drew = axis, False
        self.seen = False  # whether a forward pass of training has told if numbers are drawn
        self.dropouts = [module for module in modules if isinstance(module, _DropoutNd)]
        self.sharded = WeakIdKeyDictionary()  # tensor -> whether it is sharded

    @contextmanager
    def during(self, device: torch.device) -> Iterator[None]:
        """Enter the mode for a forward and its backward pass, which may recompute activations."""
        if self.axis.size == 1:
            yield
            return
        before = [generator.get_state() for generator in generators_of(device)]
        draws = self.drew or not self.seen
        draws = draws or any(module.training and module.p > 0 for module in self.dropouts)
        with self if draws else nullcontext():
            yield
        after = [generator.get_state() for generator in generators_of(device)]
        self.drew |= not all(map(torch.equal, before, after))
        self.seen |= torch.is_grad_enabled()

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is Tensor.backward or func is torch.autograd.backward:
            return self._backward(*args, **kwargs)
        inputs = _tensors((*args, *kwargs.values()))
        device = next((x.device for x in inputs if self.sharded.get(x)), None)
        if device is None:
            return func(*args, **kwargs)
        if func in _RANDOM and _RANDOM[func](*args, **kwargs) > 0:
            seed = (
                int(torch.randint(2**48, (), dtype=torch.int64, device="cpu")) * self.axis.size
                + self.axis.rank
            )
            with seeded(device, seed):
                out = func(*args, **kwargs)
        else:
            out = func(*args, **kwargs)
        for x in _tensors([out]):
            self.sharded[x] = True
        return out

    def _backward(
        self, roots: Any, retain_graph: bool | None, create_graph: bool, inputs: Any, **named: Any
    ) -> None:
        """Run a backward pass inside the mode, which torch disables while it handles `backward`."""
        roots = (roots,) if isinstance(roots, Tensor) else tuple(roots)
        (grads,) = named.values()  # gradient or grad_tensors
        grads = grads if isinstance(grads, (list, tuple)) else (grads,) * len(roots)
        grads = _make_grads(roots, grads, is_grads_batched=False)
        keep = create_graph if retain_graph is None else retain_graph
        inputs = (inputs,) if isinstance(inputs, Tensor) else tuple(inputs or ())
        options = {"allow_unreachable": True, "accumulate_grad": True}
        with self:
            _engine_run_backward(roots, grads, keep, create_graph, inputs, **options)

    def mark_outputs(self, model: nn.Module, styles: Mapping[str, Style], split: bool) -> None:
        """Hook modules of a tensor plan; `split`: the stream is sharded along the sequence. Called
        first: hooks are prepended, so these run after those that gather and sum, before the user's.
        """
        sharded = {"colwise": True, "colwise_gather_output": False, "sequence:join": False}
        sharded |= dict.fromkeys(("rowwise", "rowwise:heads", "rowwise_split_input"), split)
        sharded |= {"vocabulary": False, "vocabulary:sequence": split}
        for name, style in styles.items():
            if style.name == "colwise" or str(style) in sharded:
                hook = partial(self._mark, sharded.get(str(style), True))
                model.get_submodule(name).register_forward_hook(hook, prepend=True)

    def mark_inputs(self, model: nn.Module, styles: Mapping[str, Style], split: bool) -> None:
        """The same for modules whose input is gathered or split; called after hooks are set."""
        for name, style in styles.items():
            if style.name in ("gather", "split"):
                hook = partial(self._mark, split and style.name == "split")
                model.get_submodule(name).register_forward_pre_hook(hook, with_kwargs=True)

    def _mark(self, sharded: bool, _: nn.Module, args: Any, last: Any) -> None:
        inputs = (*args[:1], *last.values()) if isinstance(last, dict) else (last,)
        for x in list(_tensors(inputs))[:1]:
            self.sharded[x] = sharded


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)
