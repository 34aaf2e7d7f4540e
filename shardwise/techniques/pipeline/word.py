"""The plan words of pipelines: the axis, a schedule with its numbers, and the blocks of stages."""

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from shardwise.core.errors import InputError, Problem, bad
from shardwise.core.mesh import PIPELINE
from shardwise.core.plan.words import MOST, Field, Technique, Word, whole
from shardwise.core.schedule.library import LIBRARY, Entry, allowed, updates
from shardwise.core.zero import row_of

if TYPE_CHECKING:
    from shardwise.core.plan.plan import Plan


#: What stands behind the name of a schedule, by the numbers that it takes, and an example.
_FORMS: Final = {"": ("", ""), "M": (":M", ":8"), "MxV": (":MxV", ":8x2")}


def _schedule(word: str) -> str | None:
    name, _, value = word.partition(":")
    if name not in LIBRARY:
        return None
    takes, numbers = LIBRARY[name].numbers, value.split("x")
    if len(numbers) == len(takes.split("x")) and all(map(whole, numbers)) and takes:
        return f"{name}:{'x'.join(str(int(number)) for number in numbers)}"
    if word == name and not takes:
        return name
    form, example = _FORMS[takes]
    allowed = f"{name}{form}: M microbatches and V chunks a rank, each from 1 to {MOST}"
    raise bad(f"the plan word '{word}'", allowed if takes else name, f"{name}{example}")


def _stages(word: str) -> tuple[int, ...] | None:
    key, _, value = word.partition(":")
    if key != "stages":
        return None
    counts = tuple(map(whole, value.split(",")))
    if all(counts):
        return counts
    numbers = "stages: and the number of blocks of each stage, from 1 up, with commas between them"
    raise bad(f"the plan word '{word}'", numbers, "stages:9,8,8,7")


def _stages_word(counts: tuple[int, ...]) -> str:
    return f"stages:{','.join(map(str, counts))}"


def _word(name: str, entry: Entry) -> Word:
    form, example = _FORMS[entry.numbers]
    return Word(f"{name}{form}", f"{name}{example}", entry.meaning)


def _problems(plan: "Plan", _: int | None) -> Iterator[Problem]:
    try:
        stale = updates(plan.pipeline, plan.mesh.size_of(PIPELINE)) > 0
    except InputError as error:
        yield from error.problems
        return
    if plan.stages is not None:
        yield from _miscounted(plan, plan.stages)
    if stale:
        yield from _stale(plan)


def _miscounted(plan: "Plan", counts: tuple[int, ...]) -> Iterator[Problem]:
    given, instead = f"'{_stages_word(counts)}'", f"'{replace(plan, stages=None)}'"
    if plan.pipeline is None:
        yield Problem(f"{given} without a pipeline", "stages beside ppN", instead)
        return
    _, size = allowed(plan.pipeline, plan.mesh.size_of(PIPELINE))
    if len(counts) != size.p * size.v:
        stages = f"'{plan.pipeline}' on {size.p} ranks, which has {size.p * size.v} stages"
        wanted = "one number of blocks for each stage; without the word, stages are balanced"
        yield Problem(f"{given}, {len(counts)} numbers, with {stages}", wanted, instead)


def _stale(plan: "Plan") -> Iterator[Problem]:
    wrong: list[tuple[str, dict[str, Any]]] = []
    if plan.precision == "fp16":  # an overflow would have to skip the update of all stages
        wrong.append(("fp16", {"precision": "bf16"}))
    if plan.accumulate > 1:
        wrong.append((f"accumulate:{plan.accumulate}", {"accumulate": 1}))
    if row_of(plan.row).moves().reshards:  # full versions of the weights are kept
        wrong.append((plan.row, {"row": "zero2"}))
    if plan.offload is not None:
        wrong.append((f"offload:{plan.offload}", {"offload": None}))
    allowed = "a schedule that updates at the end; or ddp, zero1 or zero2 in bf16, fp32 or fp64, "
    allowed += "without accumulate and offload"
    for word, change in wrong:
        given = f"{word} with {plan.pipeline}, which updates each stage by itself during the pass"
        yield Problem(given, allowed, f"'{replace(plan, **change)}'")


def _beside_layers(plan: "Plan") -> str:
    stale = updates(plan.pipeline, plan.mesh.size_of(PIPELINE)) > 0
    return f"'{plan.pipeline}', which updates each stage by itself," * stale


TECHNIQUE: Final = Technique(
    words=(
        Word("ppN", "pp2", "pipeline on N ranks, under a schedule (the default: 1f1b:2N)"),
        *(_word(name, entry) for name, entry in LIBRARY.items()),
        Word(
            "stages:COUNTS",
            "stages:9,8,8,7",
            "blocks of each pipeline stage, in the order of the model; by default balanced",
        ),
    ),
    fields=(
        Field("schedule", "pipeline schedule", _schedule),
        Field("stages", "number of blocks for each stage", _stages, _stages_word),
    ),
    problems=_problems,
    beside_layers=_beside_layers,
)
