"""This file is the vocabulary of a pipeline: what a rank does, and the tensors that pass between.

    F  forward of one stage for one microbatch        U       update of a stage's weights
    B  backward: I and W at once                      REDUCE  a stage's gradients, over its replicas
    I  gradient of the stage's input                  GATHER  a stage's parameters, made whole
    W  gradient of the stage's weights                FREE    the whole parameters, given up
    SEND, RECV  one tensor, to or from one other rank

Legend: p ranks, m microbatches, v chunks (stages a rank owns), s a stage, i a microbatch. A stage
is a run of layers; stages are numbered along the model, from 0.
"""

from typing import Final, Literal, NamedTuple

Op = Literal["F", "B", "I", "W", "U", "GATHER", "FREE", "REDUCE"]
Kind = Literal["act", "tape", "grad", "rest", "part", "weights", "params"]

OPS: Final[tuple[Op, ...]] = ("F", "B", "I", "W", "U", "GATHER", "FREE", "REDUCE")
#: The ones that compute with a stage's parameters.
COMPUTE_OPS: Final[tuple[Op, ...]] = ("F", "B", "I", "W")
#: The ones that are of a stage, whatever the microbatch; lowering adds them.
STAGE_OPS: Final[tuple[Op, ...]] = ("GATHER", "FREE", "REDUCE")


class Action(NamedTuple):
    """One act of the rank that owns `stage`. Prints as F2.0: stage 2, microbatch 0.

    U is of the microbatches since the update before it, and bears the number of the last.
    """

    op: Op
    stage: int
    microbatch: int = 0

    def __str__(self) -> str:
        if self.op in STAGE_OPS:
            return f"{self.op}:{self.stage}"
        return f"{self.op}{self.stage}.{self.microbatch}"


class Token(NamedTuple):
    """One tensor, or bundle of tensors, of one stage and microbatch. Prints as act2.0.

    act      the stage's output, which the next stage takes
    tape     what the forward saved for the backward; the activation memory
    grad     the gradient of the stage's input, which the previous stage takes
    rest     what I leaves behind for W
    part     one microbatch's share of the gradient of the weights
    weights  the weights after `microbatch` updates, where the schedule itself updates (U)
    params   the stage's parameters, whole, where ranks keep a share each; `microbatch` is 0
    """

    kind: Kind
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.kind}{self.stage}.{self.microbatch}"


class Transfer(NamedTuple):
    """One end of a message: the token, and the rank at the other end. Prints as SEND:act0.3>1."""

    op: Literal["SEND", "RECV"]
    token: Token
    peer: int

    def __str__(self) -> str:
        return f"{self.op}:{self.token}{'>' if self.op == 'SEND' else '<'}{self.peer}"


Step = Action | Transfer
