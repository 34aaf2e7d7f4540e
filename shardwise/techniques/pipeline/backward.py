"""The backward pass of one stage, whole or in two halves: inputs first, weights later.

    B   the gradients of the stage's inputs and of its weights, by one pass of autograd
    I   the same pass; large linear layers postpone their weight gradients (data/weight_gradient.py)
    W   the postponed products, which techniques/pipeline/pipelined.py computes

The previous stage waits for I alone.  The first stage has no input to differentiate: its I does
nothing, and its W is all of B.  I frees the stage's graph; the factors of postponed products, an
output's gradient and an input of each layer, live until W.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge


class StageTape:
    """The autograd graph of a stage's forward pass, for one B or one I: input leaves, and outputs
    that require gradients, of any shapes. It keeps the outputs' graph edges, not the tensors.
    """

    def __init__(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
        assert all(x.is_leaf for x in inputs)
        self.input_leaves = list(inputs)
        self.outputs: list[GradientEdge] = [get_gradient_edge(y) for y in outputs]

    def backward(self, grads: Sequence[Tensor]) -> list[Tensor | None]:
        """B: the gradients of `inputs`, or None, from the outputs'; accumulates parameters'."""
        inputs, self.input_leaves = self.input_leaves, []
        outputs, self.outputs = self.outputs, []
        if outputs:
            torch.autograd.backward(outputs, list(grads))
        found = [x.grad for x in inputs]
        for x in inputs:
            x.grad = None
        return found

    def inputs(self, grads: Sequence[Tensor]) -> tuple[list[Tensor | None], "Rest"]:
        """I: the gradients of `inputs`, and what W has to run."""
        if any(x.requires_grad for x in self.input_leaves):
            return self.backward(grads), Rest(self, ())
        return [None] * len(self.input_leaves), Rest(self, grads)


class Rest:
    """The backward pass of a stage whose I did nothing; of other stages nothing is left."""

    def __init__(self, tape: StageTape, grads: Sequence[Tensor]) -> None:
        self.tape, self.grads = tape, grads

    def weights(self) -> None:
        """W: accumulates each parameter's gradient, unless I has."""
        self.tape.backward(self.grads)
