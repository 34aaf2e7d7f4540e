"""The actions of a pipeline schedule, and the tensors that they produce and consume.

    F  forward of one stage for one microbatch        U       update a stage's weights
    B  backward: I and W at once                      REDUCE  reduce a stage's gradients
    I  gradient of the stage's input                  GATHER  gather a stage's sharded parameters
    W  gradient of the stage's weights                FREE    free the gathered parameters
    SEND, RECV  one tensor, to or from one other rank

Legend: p ranks, m microbatches, v chunks (stages a rank owns), s a stage, i a microbatch. A stage
is a run of layers; stages are numbered along the model, from 0.
"""

from typing import Final, Literal, NamedTuple

Op = Literal["F", "B", "I", "W", "U", "GATHER", "FREE", "REDUCE"]
Kind = Literal["act", "tape", "grad", "rest", "part", "weights", "params"]

OPS: Final[tuple[Op, ...]] = ("F", "B", "I", "W", "U", "GATHER", "FREE", "REDUCE")
#: The actions that compute with a stage's parameters.
COMPUTE_OPS: Final[tuple[Op, ...]] = ("F", "B", "I", "W")
#: The actions of a stage as a whole, without a microbatch; lowering adds them.
STAGE_OPS: Final[tuple[Op, ...]] = ("GATHER", "FREE", "REDUCE")


class Action(NamedTuple):
    """One action of the rank that owns `stage`. Prints as F2.0: stage 2, microbatch 0.

    U updates with the microbatches since the previous update; `microbatch` is the last of them.
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

    act      the stage's output, an input of the next stage
    tape     what the forward pass saves for the backward pass; the activation memory
    grad     the gradient of the stage's input, an input of the previous stage
    rest     what I saves for W
    part     one microbatch's contribution to the gradient of the weights
    weights  the weights after `microbatch` updates, in schedules with U
    params   the gathered parameters of a stage, if they are sharded; `microbatch` is 0
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
