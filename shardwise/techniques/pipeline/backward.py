"""The backward pass of one stage, whole or in two halves: inputs first, weights later.

    B   the gradients of the stage's inputs and of its weights, by one pass of autograd
    I   the gradients of the inputs alone, which the previous stage waits for
    W   the gradients of the weights, from what I has kept

                w1        w2
                |         |          the way      nodes between the outputs and an input
        x --- fork --- fork --- y    a branch     what leads from the way to weights alone
                                     a fork       a node of the way where branches leave

I runs along the way, from y to x. At a fork it keeps the incoming gradient, and W runs the fork a
second time, into the branches. Autograd computes only the requested gradients, so I makes one of a
linear layer's two products and W the other. Some forks run once, in I, which keeps the gradients of
their branches for W: custom Functions, which always compute all gradients; nodes whose saved
tensors come from unpack hooks (checkpointing), which would recompute them; and nodes with a branch
that other nodes lead to as well. A node that postpones a product by itself (data/weight_gradient)
has no branch there, unless the weight has other uses too. If the graph cannot be split (reentrant
checkpointing, or a branch with such hooks), I does all of B.

If weights are freed between I and W (`freed`), W must not read any. Then W runs only forks that are
matrix products, which read the other factor; all other forks run once, in I. A branch that saved a
tensor may read a weight again; then I does all of B.

A stage's whole graph lives until its W is done, as arXiv 2401.10241 counts. A user's hook on a
tensor of a fork or a branch is called in I and in W.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

Edges = tuple[tuple[Node | None, int], ...]
Arrival = tuple[GradientEdge, Tensor]  # a place in the graph, and the gradient that comes to it


#: Nodes whose gradient of one factor reads only the other factor.
PRODUCTS = ("AddmmBackward0", "MmBackward0", "BmmBackward0", "BaddbmmBackward0")


class StageTape:
    """The autograd graph of a stage's forward pass, for one B or one I: input leaves, and outputs
    that require gradients, of any shapes. It keeps the outputs' graph edges, not the tensors.
    """

    def __init__(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
        assert all(x.is_leaf for x in inputs)
        self.input_leaves = list(inputs)
        self.outputs = [get_gradient_edge(y) for y in outputs]

    def backward(self, grads: Sequence[Tensor]) -> list[Tensor | None]:
        """B: the gradients of `inputs`, or None, from the outputs'; accumulates parameters'."""
        inputs, outputs = self._played()
        if outputs:
            torch.autograd.backward(outputs, list(grads))
        found = [x.grad for x in inputs]
        for x in inputs:
            x.grad = None
        return found

    def inputs(
        self, grads: Sequence[Tensor], freed: bool = False
    ) -> tuple[list[Tensor | None], "Rest"]:
        """I: the gradients of `inputs`, and what W needs to compute those of the parameters. If no
        input requires a gradient (the first stage), I does nothing and W does all of B.
        """
        ends = {get_gradient_edge(x).node for x in self.input_leaves if x.requires_grad}
        graph = _Graph(self.outputs, ends)
        if graph.way and not (graph.can_be_halved and not (freed and graph.branches_read)):
            return self.backward(grads), Rest((), (), ())
        for node in graph.apart:
            setattr(node, "puts_off", True)  # noqa: B010  # a node of weight_gradient.py, which reads it
        inputs, outputs = self._played()
        arrivals = list(zip(outputs, grads, strict=True))
        along = [(edge, grad) for edge, grad in arrivals if edge.node in graph.way]
        ready = [(edge, grad) for edge, grad in arrivals if edge.node not in graph.way]
        forks = graph.forks(freed)
        found: list[Tensor | None] = [None] * len(inputs)
        if along:
            found, kept = _along_the_way(along, inputs, forks)
            ready += kept
        return found, Rest([fork for fork in forks if fork.arrived], ready, outputs)

    def _played(self) -> tuple[list[Tensor], list[GradientEdge]]:
        inputs, self.input_leaves = self.input_leaves, []
        outputs, self.outputs = self.outputs, []
        return inputs, outputs


class Rest:
    """What I keeps for W: the gradients at forks, and gradients that are ready at branches."""

    def __init__(
        self, forks: Sequence["_Fork"], ready: Sequence[Arrival], outputs: Sequence[GradientEdge]
    ) -> None:
        self.forks, self.ready = list(forks), list(ready)
        # only the graph owns the node of a custom Function, so the graph must be kept alive
        self.outputs = list(outputs) if ready else []

    def weights(self) -> None:
        """W: accumulates each parameter's gradient once, and runs its post-accumulate hooks. Forks
        that share parameters give their branches' gradients first, so that autograd adds them up.
        """
        ready, self.ready = self.ready, []
        while self.forks:
            fork = self.forks.pop(0)
            edges, grads = zip(*fork.arrived, strict=True)
            if fork.alone:
                torch.autograd.backward(edges, grads, inputs=fork.parameters)
            else:
                places = list(dict.fromkeys(fork.branches.values()))
                found = torch.autograd.grad(edges, places, grads, allow_unused=True)
                ready += _arrived(places, found)
        if ready:
            edges, grads = zip(*ready, strict=True)
            torch.autograd.backward(edges, grads)
        self.outputs = []


@dataclass(eq=False)
class _Fork:
    """A node of the way and its branches: the index of each among its edges, and its target.

    `entries` are the edges by which gradients arrive, `arrived` those edges with their gradients.
    `again`: W runs the node a second time. `alone`: nothing else uses its parameters.
    """

    node: Node
    branches: dict[int, GradientEdge]
    entries: list[GradientEdge]
    parameters: list[Tensor]
    again: bool
    alone: bool
    arrived: list[Arrival] = field(default_factory=list)


class _Graph:
    """The graph of a stage: every node with its edges, parents first, and the way to `ends`."""

    def __init__(self, outputs: Sequence[GradientEdge], ends: Collection[Node]) -> None:
        self.outputs = outputs
        self.nodes = _parents_first(edge.node for edge in outputs)
        self.way = set(ends) & self.nodes.keys()
        for node in reversed(self.nodes):
            if any(child in self.way for child, _ in self.nodes[node]):
                self.way.add(node)
        self.apart = self._apart()

    def _apart(self) -> dict[Node, int]:
        """Nodes of the way that postpone a parameter's gradient, with the only edge to it."""
        able = {node: place for node in self.nodes if (place := _able(node)) is not None}
        ends = {self.nodes[node][place][0] for node, place in able.items()}
        for node, edges in self.nodes.items() if ends else ():
            ends -= {c for k, (c, _) in enumerate(edges) if c in ends and able.get(node) != k}
        apart = {node: place for node, place in able.items() if node in self.way}
        return {node: k for node, k in apart.items() if self.nodes[node][k][0] in ends}

    @property
    def can_be_halved(self) -> bool:
        """Whether autograd can run the graph in two parts, each branch once."""
        own = (node.name() for node in self.nodes if isinstance(node, BackwardCFunction))
        reentrant = "CheckpointFunctionBackward" in own
        return not reentrant and not any(map(_hooked, self.nodes.keys() - self.way))

    @property
    def branches_read(self) -> bool:
        """Whether any branch has saved a tensor, which may be a weight."""
        return any(_saved(node) for node in self.nodes.keys() - self.way)

    def forks(self, freed: bool) -> list[_Fork]:
        """The forks, those nearest to the outputs first."""
        branches = {node: found for node in self.nodes if (found := self._branches(node))}
        leaves = {node: _leaves(edge.node for edge in branches[node].values()) for node in branches}
        others = _leaves(edge.node for edge in self.outputs if edge.node not in self.way)
        apart = [self.nodes[node][place][0] for node, place in self.apart.items()]
        users = Counter(leaf for found in (*leaves.values(), others, apart) for leaf in found)
        ends = {edge.node for found in branches.values() for edge in found.values()}
        into = self._into({*branches, *ends})
        forks: list[_Fork] = []
        for node, found in branches.items():
            # for gradients of its branches alone, autograd runs this node and no other
            own = all({parent for parent, _ in into[e.node]} == {node} for e in found.values())
            again = own and not isinstance(node, BackwardCFunction) and not _hooked(node)
            again = again and (not freed or node.name() in PRODUCTS or not _saved(node))
            alone = all(users[leaf] == 1 for leaf in leaves[node])
            entries = [GradientEdge(node, k) for k in sorted({k for _, k in into[node]})]
            parameters = [getattr(leaf, "variable") for leaf in leaves[node]]  # noqa: B009
            forks.append(_Fork(node, found, entries, parameters, again, alone))
        return forks

    def _branches(self, node: Node) -> dict[int, GradientEdge]:
        if node not in self.way:
            return {}
        apart = self.apart.get(node)
        return {
            place: GradientEdge(child, number)
            for place, (child, number) in enumerate(self.nodes[node])
            if child is not None and child not in self.way and place != apart
        }

    def _into(self, nodes: Collection[Node]) -> dict[Node, set[tuple[Node | None, int]]]:
        """For each of these nodes, the nodes that send it gradients, and to which output number."""
        into: dict[Node, set[tuple[Node | None, int]]] = {node: set() for node in nodes}
        for edge in self.outputs:
            if edge.node in into:
                into[edge.node].add((None, edge.output_nr))
        for node, edges in self.nodes.items():
            for child, number in edges:
                if child in into:
                    into[child].add((node, number))
        return into


def _able(node: Node) -> int | None:
    """The edge of a node to the parameter whose gradient it can postpone; None without one."""
    return getattr(node, "can_put_off", None) if isinstance(node, BackwardCFunction) else None


def _leaves(roots: Iterable[Node]) -> list[Node]:
    below = _parents_first(roots)
    return [n for n in below if not isinstance(n, BackwardCFunction) and hasattr(n, "variable")]


def _parents_first(roots: Iterable[Node]) -> dict[Node, Edges]:
    edges: dict[Node, Edges] = {}
    finished: list[Node] = []
    stack = [(node, False) for node in roots]
    while stack:
        node, left = stack.pop()
        if left:
            finished.append(node)
        elif node not in edges:
            edges[node] = node.next_functions
            stack.append((node, True))
            stack += [(child, False) for child, _ in edges[node] if child is not None]
    return {node: edges[node] for node in reversed(finished)}


def _along_the_way(
    arrivals: Sequence[Arrival], inputs: Sequence[Tensor], forks: Sequence[_Fork]
) -> tuple[list[Tensor | None], list[Arrival]]:
    """Run from the outputs to `inputs`: their gradients, and those of branches that are ready."""
    again = [fork for fork in forks if fork.again]
    once = [fork for fork in forks if not fork.again]
    leaves = [get_gradient_edge(x) for x in inputs if x.requires_grad]
    entries = [edge for fork in again for edge in fork.entries]
    asked = [edge for fork in once for edge in fork.branches.values()]
    kept: dict[int, Sequence[Tensor | None]] = {}
    hooks = [fork.node.register_hook(partial(_keep, kept, k)) for k, fork in enumerate(once)]
    edges, grads = zip(*arrivals, strict=True)
    wanted = dict.fromkeys([*leaves, *entries, *asked])
    try:
        found = torch.autograd.grad(
            edges, list(wanted), grads, retain_graph=True, allow_unused=True
        )
    finally:
        for hook in hooks:
            hook.remove()
    came = dict(zip(wanted, found, strict=True))
    for fork in again:
        fork.arrived = _arrived(fork.entries, [came[edge] for edge in fork.entries])
    ready = [
        arrival
        for k, grads in kept.items()
        for arrival in _arrived(once[k].branches.values(), [grads[j] for j in once[k].branches])
    ]
    order = iter(leaves)
    return [came[next(order)] if x.requires_grad else None for x in inputs], ready


def _keep(
    kept: dict[int, Sequence[Tensor | None]],
    key: int,
    grads: Sequence[Tensor | None],
    _: Sequence[Tensor | None],
) -> None:
    kept[key] = grads


def _arrived(places: Iterable[GradientEdge], grads: Sequence[Tensor | None]) -> list[Arrival]:
    pairs = zip(places, grads, strict=True)
    return [(place, grad) for place, grad in pairs if grad is not None]


def _hooked(node: Node) -> bool:
    """Whether unpack hooks return the node's saved tensors (checkpointing, offload)."""
    for name in _saved_names(type(node)):
        saved = getattr(node, name)
        saved = saved if isinstance(saved, Sequence) else (saved,)
        if any(getattr(one, "unpack_hook", None) is not None for one in saved):
            return True
    return False


def _saved(node: Node) -> bool:
    """Whether the node has saved tensors; a custom Function may always have some."""
    leaf = hasattr(node, "variable")
    return not leaf and (isinstance(node, BackwardCFunction) or bool(_saved_names(type(node))))


@lru_cache(maxsize=1024)
def _saved_names(kind: type) -> tuple[str, ...]:
    """The attributes of this kind of node that hold saved tensors, before unpacking."""
    return tuple(name for name in dir(kind) if name.startswith("_raw_saved_"))
