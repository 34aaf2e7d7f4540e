"""this file is what a user hands over, looked at before anything is changed: modules, functions.

Functions of the user's (loss, tokens, fill) are wrapped, so that what they return is looked at too:
an answer that cannot be used is an InputError that says what can, and not an error of torch's from
somewhere inside a step.
"""

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from numbers import Real
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter

from shardwise.comm.world import World
from shardwise.core.errors import InputError, bad
from shardwise.core.hook import in_backward

SHOWN = 60  # characters of a value in an error
LOSS = "loss=lambda model, batch: mse_loss(model(batch[0]), batch[1])"


def shown(value: Any) -> str:
    """A value as an error shows it: short, and a function or class by its name."""
    text = getattr(value, "__name__", None) or " ".join(repr(value).split())
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."


def module(value: Any, caller: str, example: str = "nn.Linear(8, 8)") -> None:
    """Raise InputError unless `value` is a module, as `caller` wants it."""
    if isinstance(value, nn.Module):
        return
    if isinstance(value, type) and issubclass(value, nn.Module):
        given, instead = f"the class {value.__name__}", f"{caller}({value.__name__}(...), ...)"
    else:
        given, instead = shown(value), f"{caller}({example}, ...)"
    raise bad(f"{caller} of {given}", "an nn.Module, made", instead)


def model(value: Any, caller: str, example: str = "nn.Linear(8, 8)") -> None:
    """Raise InputError unless `value` is a module whose parameters can be laid out anew."""
    module(value, caller, example)
    name = type(value).__name__
    if any(isinstance(part, torch.jit.ScriptModule) for part in value.modules()):
        given = f"{caller} of a {name} that is compiled by torch.jit, or has a part that is"
        raise bad(given, "modules of Python, whose forward can be hooked", "the one it was made of")
    for key, p in value.named_parameters():
        if isinstance(p, UninitializedParameter):
            given = f"a {name} whose parameter {key} has no shape yet, for it is a lazy module's"
            raise bad(given, "parameters that are made", "call the model once on a batch before")
        if what := _unusual(p):
            given, instead = f"a {name} whose parameter {key} is {what[0]}", what[1]
            raise bad(given, "dense tensors of torch, of real numbers", instead)


def _unusual(p: nn.Parameter) -> tuple[str, str] | None:
    """What of a parameter has no place in a flat tensor of its dtype, and what has."""
    if p.is_complex():
        return "complex", "torch.view_as_real(w) as the parameter, and view_as_complex in forward"
    if p.layout != torch.strided:
        return f"of the layout {str(p.layout).removeprefix('torch.')}", "w.to_dense()"
    if type(p.data) is not Tensor:
        return f"a {type(p.data).__name__}", "the model as it was before something else laid it out"
    return None


def unchanging(model: nn.Module, copies: int) -> None:
    """Raise InputError for weights that a forward pass changes, where there are several copies."""
    for name, part in model.named_modules():
        if copies > 1 and isinstance(part, nn.Embedding) and part.max_norm is not None:
            given = f"{name or 'a model that is an embedding'} with max_norm={part.max_norm}, which"
            raise bad(
                f"{given} changes its weights by what a rank looks up, of which there are copies",
                "weights that only the update changes: max_norm=None",
                "functional.normalize of what was looked up, in forward",
            )


def stepped_after(model: nn.Module, what: str) -> None:
    """Raise InputError if parameters of `model` have optimizers to be run in the backward pass."""
    if any(hasattr(p, "_in_backward_optimizers") for p in model.parameters()):
        raise in_backward(what)


def wrapped(model: nn.Module) -> InputError:
    """The error for a model that stands under a part of Shardwise already."""
    return bad(
        f"a {type(model).__name__} that is wrapped already, or has a part that is",
        "a module that no part of Shardwise drives yet",
        "wrap the outermost module, once; sw.unwrap(module) first, to wrap it anew",
    )


def trained(model: nn.Module) -> None:
    """Raise InputError for a model that has parameters and trains none of them."""
    parameters = list(model.parameters())
    if parameters and not any(p.requires_grad for p in parameters):
        raise bad(
            f"a {type(model).__name__} whose parameters are all frozen",
            "a model with at least one parameter to train",
            "model.requires_grad_(True), or of the part that is to be trained",
        )


def world(value: Any) -> None:
    """Raise InputError unless `value` is a world."""
    if not isinstance(value, World):
        raise bad(f"world={shown(value)}", "the world that sw.init() returns", "sw.init()")


def whole(name: str, value: Any, least: int, example: int, most: int | None = None) -> None:
    """Raise InputError unless `value` is a whole number from `least` up, to `most` if given."""
    fits = isinstance(value, int) and not isinstance(value, bool) and value >= least
    if not fits or (most is not None and value > most):
        allowed = f"a whole number from {least} " + ("up" if most is None else f"to {most}")
        raise bad(f"{name}={shown(value)}", allowed, f"{name}={example}")


def positive(name: str, value: Any) -> None:
    """Raise InputError unless `value` is None or a number above 0; infinity is one."""
    number = float(value) if _number(value) else math.nan
    if value is not None and not number > 0:
        allowed = "a number above 0, or None for no bound"
        raise bad(f"{name}={shown(value)}", allowed, f"{name}=1.0")


def rate(value: Any) -> None:
    """Raise InputError unless `value` is a learning rate: a finite number from 0 up."""
    if not _number(value) or not 0 <= value < math.inf:
        raise bad(f"a learning rate of {shown(value)}", "a finite number from 0 up", "set_lr(3e-4)")


def scalars(value: Any) -> None:
    """Raise InputError unless `value` has the numbers of `engine.scalars()`."""
    wanted = ("step", "loss_scale", "since")
    there: Any = value if isinstance(value, Mapping) else {}
    wrong = [key for key in wanted if not _number(there.get(key))]
    if wrong:
        given = f"load_scalars({shown(value)}), without a number for {', '.join(wrong)}"
        allowed = "what engine.scalars() returned, as it was saved"
        raise bad(
            given, allowed, 'engine.load_scalars(saved["engine"]), under the name it has there'
        )


def _number(value: Any) -> bool:
    single = isinstance(value, Tensor) and value.dim() == 0
    return single or (isinstance(value, Real) and not isinstance(value, bool))


def function(name: str, value: Any, takes: tuple[str, ...], example: str) -> None:
    """Raise InputError unless `value` can be called with as many arguments as `takes` names."""
    allowed = f"a function of {' and '.join(takes)}"
    if not callable(value) or isinstance(value, nn.Module):
        what = f"{type(value).__name__}(), a module" if callable(value) else shown(value)
        raise bad(f"{name}={what}", allowed, example)
    try:
        inspect.signature(value).bind(*takes)
    except TypeError as error:
        raise bad(f"{name}={shown(value)}, which fits not ({error})", allowed, example) from None
    except ValueError:  # a function in C may have no signature to look at
        return


def loss(value: Callable[[nn.Module, Any], Any]) -> Callable[[nn.Module, Any], Tensor]:
    """The loss, held to one number with a gradient. Raises InputError: now, or when called."""
    function("loss", value, ("model", "batch"), LOSS)
    if str(getattr(value, "__module__", "")).startswith("torch.nn"):
        given = f"loss={shown(value)}, which takes an output and a target"
        raise bad(given, "a function of model and batch", LOSS)

    @wraps(value)
    def held(model: nn.Module, batch: Any) -> Tensor:
        """One number with a gradient."""
        found = value(model, batch)
        problem = _unusable(found)
        if problem:
            allowed = "one number that gradients flow from: a scalar tensor, the mean of the batch"
            raise bad(f"a loss that returns {problem}", allowed, LOSS)
        return found.reshape(())

    return held


def _unusable(found: Any) -> str:
    """What is wrong with the result of a loss; nothing of one that will do."""
    if not isinstance(found, Tensor):
        return f"a {type(found).__name__} ({shown(found)})"
    if found.numel() != 1:
        return f"a tensor of shape {tuple(found.shape)}"
    if not found.is_floating_point():
        return f"a tensor of {str(found.dtype).removeprefix('torch.')}"
    if torch.is_grad_enabled() and not found.requires_grad:
        return "a tensor without a gradient, as after .item() or .detach() or under no_grad()"
    return ""


def tokens(value: Callable[[Any], Any]) -> Callable[[Any], int]:
    """The count of a batch, held to a whole number from 0 up. Raises InputError, as `loss` does."""
    example = "tokens=lambda batch: batch[0].numel()"
    function("tokens", value, ("batch",), example)

    @wraps(value)
    def held(batch: Any) -> int:
        """A whole number from 0 up."""
        found = value(batch)
        count = found.item() if isinstance(found, Tensor) and found.numel() == 1 else found
        number = float(count) if isinstance(count, Real) else math.nan
        if not (number >= 0 and number.is_integer()):  # neither infinity nor NaN is
            given = f"tokens, which returns {shown(found)}"
            raise bad(given, "a function that returns a whole number from 0 up", example)
        return int(number)

    return held


def outputs(found: Any, like: Tensor) -> Tensor:
    """What a call made of the model, in the dtype and on the device of `like`, whose shape it has.

    Raises InputError for another shape: ranks that have no outputs give zeros like `like`.
    """
    shape, there = tuple(like.shape), isinstance(found, Tensor)
    if there and found.shape == like.shape:
        return found.to(like)
    raise bad(
        f"outputs of {f'shape {tuple(found.shape)}' if there else shown(found)} for like={shape}",
        "a call that returns one tensor, and a tensor of its shape as like",
        f"like=torch.zeros({tuple(found.shape)})" if there else "outputs[0], if it is that one",
    )


def fill(value: Callable[[str, Tensor], Any]) -> Callable[[str, Tensor], None]:
    """The initial weights, held to being written in place. Raises InputError, as `loss` does."""
    example = "fill=lambda name, tensor: tensor.normal_(0, 0.02)"
    function("fill", value, ("name", "tensor"), example)
    allowed = "a function that writes the initial weights into the tensor it is given"

    def held(name: str, tensor: Tensor) -> None:
        """Written in place."""
        try:
            found = value(name, tensor)
        except InputError:
            raise
        except Exception as error:
            given = f"fill, which raises {type(error).__name__} ({error}) for the parameter {name}"
            raise bad(given, allowed, example) from error
        if isinstance(found, Tensor) and found.data_ptr() != tensor.data_ptr():
            given = f"fill, which returns another tensor for the parameter {name}"
            raise bad(given, allowed, example)

    return held


def stages(value: Any, right: Callable[[], Sequence[str]]) -> None:
    """`stages=`: None or several names of modules, such as `right`. Raises InputError."""
    several = isinstance(value, Sequence) and not isinstance(value, str)
    if value is None or (several and all(isinstance(name, str) for name in value)):
        return
    raise bad(
        f"stages={shown(value)}",
        "a list of the names of the modules that begin the stages but the first",
        f"stages={list(right())}",
    )


def names(value: Any) -> dict[str, str]:
    """`beside=`: names of modules by names of modules."""
    if value is None:
        return {}
    if not isinstance(value, dict) or not all(
        isinstance(n, str) for n in [*value, *value.values()]
    ):
        raise bad(
            f"beside={shown(value)}",
            "the name of a module, and of the one in whose stage it is called",
            'beside={"norm": "head"}',
        )
    return value
