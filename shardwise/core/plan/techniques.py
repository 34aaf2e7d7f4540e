"""The list of techniques. A new one is a folder with a word.py, and one line here."""

from itertools import chain

from shardwise.core.plan.run_words import AXES_OF_A_PLAN
from shardwise.core.plan.run_words import TECHNIQUE as RUN
from shardwise.core.plan.technique import Field, Technique, Word
from shardwise.techniques.context.word import TECHNIQUE as CONTEXT
from shardwise.techniques.data.word import TECHNIQUE as DATA
from shardwise.techniques.expert.word import TECHNIQUE as EXPERT
from shardwise.techniques.offload.word import TECHNIQUE as OFFLOAD
from shardwise.techniques.pipeline.word import TECHNIQUE as PIPELINE
from shardwise.techniques.recompute.word import TECHNIQUE as RECOMPUTE
from shardwise.techniques.tensor.word import TECHNIQUE as TENSOR
from shardwise.techniques.tile.word import TECHNIQUE as TILE

TECHNIQUES: tuple[Technique, ...] = (
    *(DATA, TENSOR, CONTEXT, PIPELINE, EXPERT),
    *(RECOMPUTE, OFFLOAD, TILE, RUN),
)

#: The table of plan words.
WORDS: tuple[Word, ...] = tuple(chain.from_iterable(each.words for each in TECHNIQUES))
#: What they set.
FIELDS: dict[str, Field] = {
    field.name: field
    for field in (AXES_OF_A_PLAN, *chain.from_iterable(each.fields for each in TECHNIQUES))
}
