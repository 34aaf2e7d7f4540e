"""Checks of arguments that are torch objects, and errors in a step that a plan causes.

Numbers and words are checked by core/tools/arguments.py.  All checks precede any change of the
model.  The user's functions (loss, tokens, fill) are wrapped: a wrong result raises an InputError
that says what to return, instead of torch's error from the middle of a step.
"""

import inspect
import math
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import wraps
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from shardwise.comm.world import World, leased
from shardwise.core.errors import InputError, NonFiniteError, bad, one_line
from shardwise.core.mesh import TENSOR
from shardwise.core.tools.arguments import MOST_COUNT, is_count, is_number, short_repr
from shardwise.core.tools.hook import in_backward
from shardwise.core.tools.structure import uncompiled
from shardwise.engine.precision import HALF

if TYPE_CHECKING:
    from shardwise.core.plan.plan import Plan

LOSS = "loss=lambda model, batch: mse_loss(model(batch[0]), batch[1])"


def module(value: Any, caller: str, example: str = "nn.Linear(8, 8)") -> None:
    if not isinstance(value, nn.Module):
        allowed = "an nn.Module instance"
        raise bad(f"{caller} of {short_repr(value)}", allowed, f"{caller}({example}, ...)")


def model(value: Any, caller: str, example: str = "nn.Linear(8, 8)") -> None:
    """Raise InputError unless `value` is a module whose parameters can be flattened and sharded."""
    module(value, caller, example)
    _not_wrapped_by_others(value, caller)
    name = type(value).__name__
    for key, p in value.named_parameters():
        if what := _unusual(p):
            given = f"a {name} whose parameter {key} is {what}"
            allowed = "dense torch tensors of real numbers, made outside of inference mode"
            instead = "the plain model, before another library changed it"
            raise bad(given, allowed, _PLAIN.get(what, instead))


_PLAIN = {
    "complex": "torch.view_as_real(w), and torch.view_as_complex(self.w) in the forward",
    "of a lazy layer": "model(x) with one batch first, which gives lazy layers their shapes",
}

#: Classes that wrap a model for training, by name: their libraries may not be installed.
_WRAPPERS = (
    *("DataParallel", "DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule"),
    *("ShardedDataParallel", "DeepSpeedEngine", "PipelineEngine", "_FabricModule"),
)


def _not_wrapped_by_others(model: nn.Module, caller: str) -> None:
    for name, part in model.named_modules():
        kinds = [kind for kind in type(part).__mro__ if kind.__name__ in _WRAPPERS]
        if not kinds or kinds[0].__module__.startswith("shardwise."):
            continue
        wrapper = kinds[0].__name__
        whose = f"a {type(model).__name__} whose part {name}" if name else "a model that"
        given = f"{caller} of {whose} is wrapped by {wrapper} already"
        instead = "the plain model: model.module, or the model before torch's FSDP has sharded it"
        raise bad(given, "a plain model, which is wrapped once", instead)


def _unusual(p: nn.Parameter) -> str:
    if is_lazy(p):
        return "of a lazy layer"
    if p.is_inference():
        return "made under torch.inference_mode"
    if p.is_complex():
        return "complex"
    if p.layout != torch.strided:
        return f"of the layout {str(p.layout).removeprefix('torch.')}"
    return "" if type(p.data) is Tensor else f"a {type(p.data).__name__}"


def no_max_norm(model: nn.Module, copies: int) -> None:
    """Raise InputError if a forward pass changes weights (max_norm) that several ranks hold."""
    for name, part in model.named_modules():
        if copies > 1 and isinstance(part, nn.Embedding) and part.max_norm is not None:
            given = f"{name or 'a model that is an embedding'} with max_norm={part.max_norm}"
            raise bad(
                f"{given}: its forward pass changes weights, so copies on ranks would differ",
                "weights that only the update changes: max_norm=None",
                "functional.normalize(embedding(ids)) in forward",
            )


def no_backward_optimizer(model: nn.Module, what: str) -> None:
    if any(hasattr(p, "_in_backward_optimizers") for p in model.parameters()):
        raise in_backward(what)


def already_wrapped(model: nn.Module) -> InputError:
    """The error for a model that Shardwise has wrapped already."""
    return bad(
        f"a {type(model).__name__} that is wrapped already, or contains a wrapped module",
        "a plain module",
        "sw.unwrap(module) first; wrap the outermost module, once",
    )


def trainable(model: nn.Module) -> None:
    """Raise InputError if all parameters of `model` are frozen."""
    parameters = list(model.parameters())
    if parameters and not any(p.requires_grad for p in parameters):
        raise bad(
            f"a {type(model).__name__} whose parameters are all frozen",
            "a model with at least one parameter to train",
            "model.requires_grad_(True), or the same for a part of it",
        )


def outside_of_loss(in_loss: bool) -> None:
    if in_loss:
        allowed = "a loss function that computes with the model that it is given"
        instead = "engine.step, engine.evaluate and sw.save after the step, in the training loop"
        raise bad("a method of the engine that its own loss function calls", allowed, instead)


def recording(in_loss: bool) -> None:
    outside_of_loss(in_loss)
    if not torch.is_grad_enabled():
        allowed = "a step where autograd records"
        instead = "engine.step(batch) outside of the block, or engine.evaluate(batch) in it"
        raise bad("engine.step under torch.no_grad or inference_mode", allowed, instead)


def world(value: Any) -> None:
    if not isinstance(value, World):
        raise bad(f"world={short_repr(value)}", "the world that sw.init() returns", "sw.init()")


def leased_world(value: World | None) -> World:
    if value is not None:
        world(value)
    return leased(value)


def scalars(value: Any) -> None:
    """Raise InputError unless `value` has the keys of `engine.scalars()`, with right values."""
    there: Any = value if isinstance(value, Mapping) else {}
    scale: Any = there.get("loss_scale")
    tables = [there.get(name, {}) for name in ("states", "modules", "groups")]
    fits = all(is_count(there.get(name)) for name in ("step", "since"))
    fits = fits and is_number(scale) and 0 < scale < math.inf
    fits = fits and all(isinstance(table, Mapping) for table in tables)
    options = tables[2].values() if fits else ()  # of each group: {name: [first value, this one]}
    fits = fits and all(isinstance(each, Mapping) for each in options)
    pairs = [pair for each in options if fits for pair in each.values()]
    if not fits or any(not isinstance(pair, list) or len(pair) != 2 for pair in pairs):
        given = f"load_scalars({short_repr(value)}), with numbers or tables of another form"
        allowed = "what engine.scalars() returned when the checkpoint was saved"
        raise bad(given, allowed, 'engine.load_scalars(saved["engine"])')


def function(name: str, value: Any, takes: tuple[str, ...], example: str) -> None:
    """Raise InputError unless `value` can be called with the arguments named in `takes`."""
    allowed = f"a function of {' and '.join(takes)}"
    if not callable(value) or isinstance(value, nn.Module):
        what = f"{type(value).__name__}(), a module" if callable(value) else short_repr(value)
        raise bad(f"{name}={what}", allowed, example)
    try:
        inspect.signature(value).bind(*takes)
    except TypeError as error:
        given = f"{name}={short_repr(value)}, which cannot be called like this ({error})"
        raise bad(given, allowed, example) from None
    except ValueError:  # a function in C may have no signature
        return


def loss(value: Callable[[nn.Module, Any], Any]) -> Callable[[nn.Module, Any], Tensor]:
    """Wrap the loss so that its result must be one number with a gradient.
    Raises InputError for a wrong function; the wrapped loss raises it for a wrong result.
    """
    function("loss", value, ("model", "batch"), LOSS)
    if str(getattr(value, "__module__", "")).startswith("torch.nn"):
        given = f"loss={short_repr(value)}, which takes an output and a target"
        raise bad(given, "a function of model and batch", LOSS)

    @wraps(value)
    def checked(model: nn.Module, batch: Any) -> Tensor:
        """The loss of the batch, checked."""
        found = value(model, batch)
        problem = _loss_problem(found)
        if problem:
            allowed = "a scalar tensor with a gradient: the mean over the batch"
            raise bad(f"a loss that returns {problem}", allowed, LOSS)
        return found.reshape(())

    return checked


def _loss_problem(found: Any) -> str:
    if not isinstance(found, Tensor):
        return f"a {type(found).__name__} ({short_repr(found)})"
    if found.numel() != 1:
        return f"a tensor of shape {tuple(found.shape)}"
    if not found.is_floating_point():
        return f"a tensor of {str(found.dtype).removeprefix('torch.')}"
    if torch.is_grad_enabled() and not found.requires_grad:
        return "a tensor without a gradient, as after .item() or .detach() or under no_grad()"
    return ""


def tokens(value: Callable[[Any], Any] | None) -> Callable[[Any], float] | None:
    return _counting("tokens", value, "tokens=lambda batch: batch[0].numel()", "number")


def rows(value: Callable[[Any], Any] | None) -> Callable[[Any], int] | None:
    return _counting("rows", value, "rows=lambda batch: len(batch[0])", "whole number")


def _counting(
    name: str, value: Callable[[Any], Any] | None, example: str, kind: str
) -> Callable[[Any], Any] | None:
    if value is None:
        return None
    function(name, value, ("batch",), example)

    @wraps(value)
    def checked(batch: Any) -> float:
        """The number that the function returns for the batch, checked."""
        found = value(batch)
        number = math.nan
        with suppress(TypeError, ValueError, OverflowError, RuntimeError):
            number = float(found)
        whole = number.is_integer()
        if not (0 <= number <= MOST_COUNT and (whole or kind == "number")):  # False for NaN too
            given = f"{name}, which returns {short_repr(found)}"
            raise bad(given, f"a function that returns a {kind} from 0 to 2**53", example)
        return int(number) if whole else number

    return checked


def no_gradient(what: str) -> InputError:
    """The error of a step in which no parameter got a gradient on any rank."""
    return bad(
        f"{what} in which no parameter of the model got a gradient",
        "a loss that is computed from what the model returns",
        "a loss without .detach(), .item(), no_grad() or new tensors (torch.tensor(...)) between "
        "the model and it",
    )


def tensor(name: str, value: Any, example: str) -> Tensor:
    if not isinstance(value, Tensor):
        raise bad(f"{name}={short_repr(value)}", "a tensor", example)
    return value


def outputs(found: Tensor, like: Tensor) -> Tensor:
    """The result of a call, in the dtype and on the device of `like`.
    Raises InputError if its shape differs, as ranks without an output contribute zeros like `like`,
    or if whole numbers cannot hold it.
    """
    shape, dtype = tuple(found.shape), str(found.dtype).removeprefix("torch.")
    if found.shape == like.shape and torch.can_cast(found.dtype, like.dtype):
        return found.to(like)
    given = f"outputs of shape {shape} in {dtype} for like={tuple(like.shape)} in {like.dtype}"
    instead = f"like=torch.zeros({shape}, dtype=torch.{dtype})"
    raise bad(given, "the shape of the result as like, and a dtype that holds it", instead)


def fill(
    value: Callable[[str, Tensor], Any] | None, seed: int
) -> Callable[[str, Tensor], None] | None:
    """Wrap `fill` so that it must write in place.  Raises InputError like `loss`."""
    if value is None:
        return None
    example = "fill=lambda name, tensor: tensor.normal_(0, 0.02)"
    if seed:
        raise bad(f"seed={seed} with fill=, which writes all weights", "one of both", example)
    function("fill", value, ("name", "tensor"), example)

    def checked(name: str, tensor: Tensor) -> None:
        """Fill the parameter, and check that it was written in place."""
        try:
            found = value(name, tensor)
        except Exception as error:
            error.add_note(f"in fill, for the parameter {name}")
            raise
        if isinstance(found, Tensor) and found.data_ptr() != tensor.data_ptr():
            given = f"fill, which returns another tensor for the parameter {name}"
            allowed = "a function that writes initial weights into its second argument, in place"
            raise bad(given, allowed, example)

    checked.__dict__["names"] = getattr(value, "names", ())  # of what a folder of weights holds
    return checked


def fill_used(fill: Any, seed: int, model: nn.Module, missing: Sequence[str]) -> None:
    """Raise InputError for a fill or a seed if no weight is on the meta device of any rank."""
    if missing or (fill is None and not seed) or any(p.is_meta for p in model.parameters()):
        return
    given = "fill=" if fill is not None else f"seed={seed}"
    raise bad(
        f"{given} for a {type(model).__name__} whose weights exist, so that none are written",
        "fill= or seed= for a model on the meta device",
        'with torch.device("meta"): model = Model()',
    )


# --- errors in a step -----------------------------------------------------------------------------

#: Torch's messages for shapes that do not fit and indices out of range.
_SHAPES = re.compile(
    r"shape '|sizes? of tensor|shapes cannot be multiplied|normalized_shape|[Ss]izes of tensors"
    r"|exceeds dimension size|index \d+ is out of bounds"
    r"|Expected (input|target) (batch_)?size|Using a target size|should contain \d+ elements"
)
#: Torch's messages for operations on several dtypes.
_DTYPES = re.compile(r"same dtype|[Ff]ound dtype|expected scalar type|query's dtype|data type of")


@contextmanager
def sharded(plan: "Plan", alone: Callable[[], object]) -> Iterator[None]:
    """Refuse a sharded model with an error of shapes if the plain one runs, `alone`."""
    try:
        yield
    except (RuntimeError, IndexError, ValueError) as error:
        known = _SHAPES.search(str(error)) and not isinstance(error, InputError)
        if not known or (plan.cp == 1 and plan.mesh.size_of(TENSOR) == 1):
            raise
        with suppress(InputError):
            alone()
        given = f"a model that runs on one process and not under '{plan}': {one_line(str(error))}"
        if plan.cp > 1:
            raise bad(
                given,
                "a batch whose dim 1 has the positions, of which each rank has some, and code for "
                "any number of them",
                "a plan without cp where dim 1 has features, or the model needs a fixed number of "
                "positions; in place of a mask of padding [rows, T], a mask [rows, 1, T, T]: "
                "docs/explanation/context.md",
            ) from error
        raise bad(
            given,
            "a tensor plan without these faults: a colwise without the rowwise that takes its "
            "result, two styles exchanged, a layer beside them without an entry",
            "sets= for a number of heads that the code reads, colwise_gather_output before code "
            "that needs all features; under sp a gather for a block that reads the number of "
            "positions, sequence:join for the norm before code that pools, picks or returns them: "
            "docs/how-to/tables.md",
        ) from error


@contextmanager
def step(number: int) -> Iterator[None]:
    """Add the step's number to the error of a router that is not finite."""
    try:
        yield
    except NonFiniteError as error:
        raise NonFiniteError(f"Step {number}: {error}") from None


@contextmanager
def dtypes(dtype: torch.dtype | None) -> Iterator[None]:
    """Refuse a model in 16 bits with an error of dtypes (precision.py)."""
    try:
        yield
    except RuntimeError as error:
        if dtype not in HALF or isinstance(error, InputError) or not _DTYPES.search(str(error)):
            raise
        name = str(dtype).removeprefix("torch.")
        raise bad(
            f"code that combines {name} and other floats: {one_line(str(error))}",
            f"layers, which cast their inputs to {name}; the batch's own floats and buffers, such "
            "as tables of positions, are not rounded",
            "x.to(self.weight.dtype) or query.to(value.dtype) outside of layers, and .float() on "
            "the output before the loss: docs/explanation/states.md",
        ) from error


# --- models without torch.compile -----------------------------------------------------------------
# Under data parallelism a compiled block sees full parameters, and hooks run between two graphs
# (core/tools/structure.py).  Tensor parallelism, context parallelism and pipelines intercept single
# operations of a forward pass, which a compiled graph no longer has.


def followed(plan: "Plan") -> bool:
    return plan.pipeline is not None or plan.mesh.size_of("tp") > 1 or plan.cp > 1


def without_compiler(model: nn.Module, where: str, rank: int = 0) -> nn.Module:
    """The model, in which torch.compile is undone in place; rank 0 prints a line if it was there.
    Compiled parts become what they were made from; graphs that exist are not used any more.
    """
    if "torch._dynamo" not in sys.modules:
        return model
    inner, found = uncompiled(model), uncompiled(model) is not model
    for module in list(inner.modules()):
        if getattr(module, "_compiled_call_impl", None) is not None:
            module._compiled_call_impl, found = None, True
        for key, part in module._modules.items():
            if part is not None and uncompiled(part) is not part:
                module._modules[key], found = uncompiled(part), True
    if found and not rank:
        print(
            f"shardwise: the {type(inner).__name__} runs without torch.compile under {where}, "
            "which follows single operations.",
            file=sys.stderr,
        )
    return inner


def as_followed(plan: "Plan", model: nn.Module, loss: Any, rank: int) -> tuple[nn.Module, Any]:
    """The model and the loss, without torch.compile where the plan follows operations."""
    if not followed(plan):
        return model, loss
    plain = getattr(loss, "_torchdynamo_orig_callable", loss)
    return without_compiler(model, f"'{plan}'", rank), plain
