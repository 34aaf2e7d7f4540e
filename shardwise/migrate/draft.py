"""Converts another system's file, key by key, to a plan and a configuration.

Each system has a table of rules, one for each key. A rule records the value in the draft and
returns "", or returns why the value cannot be carried over. A key that ends in * matches a group.
"""

import json
import textwrap
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from shardwise.core.errors import bad
from shardwise.core.plan.plan import Plan
from shardwise.core.plan.plan_check import problems
from shardwise.techniques.offload.word import share_text


@dataclass
class Draft:
    """An incomplete plan and configuration; None means not set."""

    row: str | None = None
    precision: str | None = None
    accumulate: int | None = None
    recompute: str | None = None
    schedule: str | None = None
    microbatches: int | None = None
    sequence: bool = False
    ulysses: bool = False  # `cp` is that of Ulysses
    offload: bool = False  # of the optimizer state to host memory
    offload_share: float = 1.0  # the fraction of it
    offload_param: bool = False  # of parameters too
    disk: bool = False  # the optimizer state to a disk
    disk_param: bool = False  # parameters too
    activations: bool = False  # the same of activations
    axes: dict[str, int] = field(default_factory=dict)
    values: dict[str, dict[str, Any]] = field(default_factory=dict)
    left: list[tuple[str, Any, str]] = field(default_factory=list)
    assumed: list[tuple[str, Any, str]] = field(default_factory=list)  # defaults of the system
    model: str | None = None  # the other system's name
    foreign: str | None = None  # an optimizer that `shardwise train` does not have
    processes: int | None = None
    hosts: int = 1
    hybrid: bool = False

    def set(self, key: str, value: Any) -> str:
        """Set a key of the configuration, `section.name`; the first of several values stays."""
        section, _, name = key.partition(".")
        kept = self.values.setdefault(section, {}).setdefault(name, value)
        return "" if kept == value else f"{key} is {json.dumps(kept)} by another key"

    def set_field(self, name: str, value: Any) -> str:
        """Set a field that a plan word comes from; the first of several values stays."""
        if getattr(self, name) not in (None, value):
            return f"another key says {getattr(self, name)}"
        setattr(self, name, value)
        return ""

    @property
    def _offload(self) -> list[str]:
        """The word `offload`; rows that keep all parameters and update a block have no `param`."""
        has_param = self.row in ("zero3", "ddp", None)
        if self.disk or self.disk_param:
            return ["offload:param@disk" if self.disk_param and has_param else "offload:optim@disk"]
        if self.offload_param and has_param:
            return ["offload:param"]
        if self.offload and self.offload_share < 1:
            return [f"offload:optim={share_text(self.offload_share)}"] * (self.offload_share > 0)
        return ["offload:optim"] * (self.offload or self.offload_param)

    @property
    def words(self) -> list[str]:
        """The plan in words."""
        axes = {name: size for name, size in self.axes.items() if size > 1}
        if self.hybrid and self.processes and self.hosts > 1:
            axes |= {"dp_replicate": self.hosts, "dp_shard": self.processes // self.hosts}
        if "dp_replicate" in axes and "dp_shard" not in axes:
            axes["dp"] = axes.pop("dp_replicate")  # copies of the whole, which no ranks share
        elif "dp_shard" in axes and "dp_replicate" not in axes:
            axes["dp"] = axes.pop("dp_shard")
        form = {"cp": ":ulysses" * self.ulysses}
        found = [f"{name}{size}{form.get(name, '')}" for name, size in axes.items()]
        found += [self.row] if self.row else []
        found += ["sp"] if self.sequence and "tp" in axes else []
        if "pp" in axes:
            count = self.microbatches or self.accumulate or 2 * axes["pp"]
            found.append(_schedule(self.schedule or "1f1b", count))
        elif self.accumulate and self.accumulate > 1:
            found.append(f"accumulate:{self.accumulate}")
        found += [f"recompute:{self.recompute}"] if self.recompute else []
        found += ["activations:host"] * self.activations + self._offload
        return [*found, *([self.precision] if self.precision else [])]

    @property
    def plan(self) -> str:
        """The plan's text; without a number of data ranks, they are the remaining ranks."""
        return str(Plan.parse(" ".join(self.words)))

    @property
    def carried(self) -> list[str]:
        """The lines of what is carried over."""
        lines = ["", "[plan]", f"text = {json.dumps(self.plan)}"]
        for section, values in self.values.items():
            lines += ["", f"[{section}]"]
            lines += [f"{key} = {json.dumps(value)}" for key, value in values.items()]
        if self.processes:
            lines += ["", f"# start it with --nproc {self.processes}"]
        return lines

    def toml(self, file: str, project: str) -> str:
        """A configuration of `shardwise train`, with what could not be carried over as comments."""
        lines = [f"# from {file}, a configuration of {project}"]
        if self.foreign:
            lines += [f"# It trains with AdamW instead of {self.foreign}: see optimizer below."]
        lines += self.carried
        refused = [str(problem) for problem in problems(Plan.parse(self.plan))]
        if refused:
            lines += ["", "# This version refuses the plan:", *(f"#   {text}" for text in refused)]
        reasoned = [each for each in self.left if each[2] != NO_COUNTERPART]
        for title, keys in (
            (f"Not in the file; {project} has other defaults than Shardwise:", self.assumed),
            ("Not carried over:", reasoned),
        ):
            lines += ["", f"# {title}"] * bool(keys)
            lines += [f"#   {key} = {_shown(value)}: {why}" for key, value, why in keys]
        rest = [key for key, _, why in self.left if why == NO_COUNTERPART]
        lines += ["", "# Without a counterpart here, or not needed:"] * bool(rest)
        lines += textwrap.wrap(", ".join(rest), 96, initial_indent="#   ", subsequent_indent="#   ")
        return "\n".join(lines) + "\n"


def _schedule(name: str, microbatches: int) -> str:
    return (
        f"{name}:{microbatches}x2" if name in ("interleaved", "bfs") else f"{name}:{microbatches}"
    )


def _shown(value: Any) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= 60 else f"{text[:57]}..."


@dataclass(frozen=True)
class Wrong:
    """The answer of a rule for a value that the other system does not accept either."""

    allowed: str
    instead: str


Rule = Callable[[Draft, Any], "str | Wrong"]
Rules = Mapping[str, Rule]

NO_COUNTERPART: Final = "no counterpart here"
AUTO: Final = "auto: the program that reads the file decides; set the value that it takes"
SAME: Final = "nothing to write: it is the default here, or another key of the file says it"


def why(text: str) -> Rule:
    """A key that is never carried over, and the reason."""
    return lambda _draft, _value: text


def key(name: str, kind: str = "a number") -> Rule:
    """A key that has the same meaning in the configuration of `shardwise train`.

    `kind` is "a number", "a whole number", "true or false" or "text".
    """

    def _rule(draft: Draft, value: Any) -> str | Wrong:
        if value == "auto":
            return AUTO
        if kind == "a whole number" and isinstance(value, float) and value.is_integer():
            value = int(value)  # JSON written as 1e4
        return draft.set(name, value) if _is(kind, value) else Wrong(kind, _EXAMPLES[kind])

    return _rule


def tracker(name: str) -> Rule:
    """Whether a tracker gets the metrics; `run.trackers` lists those that do."""

    def _rule(draft: Draft, value: Any) -> str | Wrong:
        if not isinstance(value, bool):
            return Wrong("true or false", "true")
        listed = draft.values.setdefault("run", {}).setdefault("trackers", [])
        listed += [name] * (value and name not in listed)
        return ""

    return _rule


_EXAMPLES: Final = {
    "a number": "1.0",
    "a whole number": "8",
    "true or false": "true",
    "text": '"x"',
}


def _is(kind: str, value: Any) -> bool:
    match kind:
        case "true or false":
            return isinstance(value, bool)
        case "text":
            return isinstance(value, str)
        case "a whole number":
            return whole(value)
    return isinstance(value, int | float) and not isinstance(value, bool)


def whole(value: Any) -> bool:
    """Whether a value is a whole number."""
    return isinstance(value, int) and not isinstance(value, bool)


#: Optimizers of other systems, in small letters, by their names in `shardwise train`.
_OPTIMIZERS: Final = {
    **dict.fromkeys(("adam", "adamw", "onebitadam", "zerooneadam"), "adamw"),
    "lion": "lion",
    "adafactor": "adafactor",
    "muon": "muon",
}


def optimizer(notes: Mapping[str, str]) -> Rule:
    """The class of the optimizer; `notes` say what differs here, by names in small letters."""

    def _rule(draft: Draft, value: Any) -> str | Wrong:
        name = str(value).lower()
        if name in _OPTIMIZERS:
            return draft.set("train.optimizer", _OPTIMIZERS[name]) or notes.get(name, "")
        draft.foreign = str(value)
        return (
            "shardwise train has adamw, lion, adafactor and muon, so that its lr and its other "
            "options are left out too; in a script, optimizer=sw.Optim(YourOptimizer, ...)"
        )

    return _rule


def of_optimizer(rule: Rule) -> Rule:
    """A key of the optimizer: it is left out with an optimizer that is not carried over."""

    def _rule(draft: Draft, value: Any) -> str | Wrong:
        if draft.foreign is None:
            return rule(draft, value)
        answer = rule(Draft(), value)
        text = f"an option of {draft.foreign}, which is not carried over"
        return answer if isinstance(answer, Wrong) else text

    return _rule


def axis(name: str) -> Rule:
    """A number of ranks along an axis; -1: the remaining ranks."""

    def _rule(draft: Draft, value: Any) -> str | Wrong:
        if value in ("auto", -1):
            return AUTO if value == "auto" else ""
        if not whole(value) or value < 1:
            return Wrong("a number of ranks from 1 up", "2")
        draft.axes[name] = value
        return ""

    return _rule


def ulysses(draft: Draft, value: Any) -> str | Wrong:
    """A number of ranks of Ulysses."""
    draft.ulysses = True
    return axis("cp")(draft, value)


def only_if(condition: Callable[[Any], bool], text: str) -> Rule:
    """A key without effect, except for values that satisfy `condition`."""
    return lambda _draft, value: text if condition(value) else ""


def word(
    name: str, words: Mapping[Any, str | None], what: str = "", others: tuple[str, ...] = ()
) -> Rule:
    """A key whose values stand for plan words (None: the default).

    `others` are values of the other system without a word here; `what` says why.
    """

    def _rule(draft: Draft, value: Any) -> str | Wrong:
        known = value.upper() if isinstance(value, str) else value
        if value == "auto":
            return AUTO
        if isinstance(value, list | dict):
            known = json.dumps(value)  # no key of `words`
        if isinstance(known, str) and known in others:
            return what
        if known not in words or not any(known is w or type(known) is type(w) for w in words):
            shown = [json.dumps(each) for each in (*words, *others)]
            return Wrong(f"{', '.join(shown)} (in any case)", shown[0])
        return draft.set_field(name, words[known]) if words[known] is not None else ""

    return _rule


def carry(
    draft: Draft,
    rules: Rules,
    values: Mapping[str, Any],
    project: str,
    defaults: Mapping[str, Any],
) -> None:
    """Apply the rules to every key of `values`, and to `defaults`, in the order of the rules.

    Raises InputError for a value that the other system does not accept either.
    """
    keys = {**dict(flat(values)), **defaults}
    order = {name: number for number, name in enumerate(rules)}
    found = {name: _rule_of(name, rules) for name in keys}
    for name in sorted(keys, key=lambda each: order.get(found[each] or "", len(order))):
        pattern, value = found[name], keys[name]
        if misplaced := _misplaced(name, rules):
            raise _wrong(name, value, misplaced, project)
        if pattern is None:
            draft.left.append((name, value, NO_COUNTERPART))
            continue
        answer = rules[pattern](draft, value)
        if isinstance(answer, Wrong):
            raise _wrong(name, value, answer, project)
        if answer:
            listed = draft.assumed if name in defaults else draft.left
            listed.append((name, value, answer))


def _misplaced(name: str, rules: Rules) -> Wrong | None:
    """A value in place of a section, or a section in place of a value."""
    if any(rule.startswith(f"{name}.") for rule in rules) and name not in rules:
        inner = next(rule for rule in rules if rule.startswith(f"{name}."))
        return Wrong("a section of keys", f"{inner} under it, or leave {name} out")
    parts = name.split(".")
    outer = next((o for i in range(1, len(parts)) if (o := ".".join(parts[:i])) in rules), None)
    return None if outer is None else Wrong(f"one value for {outer}", f"{outer} without keys in it")


def _wrong(name: str, value: Any, wrong: Wrong, project: str) -> Exception:
    return bad(f"{name} = {_shown(value)} in a file of {project}", wrong.allowed, wrong.instead)


def flat(values: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    """Every key with its value, dotted; without keys that are empty."""
    for name, value in values.items():
        if isinstance(value, dict):
            yield from flat(value, f"{before}{name}.")
        elif value is not None and value != []:
            yield f"{before}{name}", value


def _rule_of(name: str, rules: Rules) -> str | None:
    """The rule of a key: its own, or that of the nearest group."""
    if name in rules:
        return name
    parts = name.split(".")
    groups = [".".join([*parts[:i], "*"]) for i in range(len(parts) - 1, 0, -1)]
    return next((group for group in groups if group in rules), None)
