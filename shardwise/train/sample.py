"""The sample: text that the trained model continues, one token at a time.

Every rank computes the same tokens: under a sharded engine each forward pass is collective, and
the draw depends on the seed alone. The number of passes never depends on what is drawn, so no rank
can be left waiting. The whole window is computed again for each token: a cache of keys and values
would be more code than a sample at the end of a run is worth.
"""

import unicodedata
from collections.abc import Callable, Sequence
from typing import Final

import torch
from torch import Tensor

from shardwise.train.config import SampleSection
from shardwise.train.tokens import Vocabulary

#: The logits of the vocabulary's tokens, [V] in fp32, after the tokens that were seen.
NextToken = Callable[[Sequence[int]], Tensor]
#: Unicode's categories of what is not seen and changes what is: controls, formats, separators.
HIDDEN: Final = ("Cc", "Cf", "Zl", "Zp", "Cs")


def sample(
    after: NextToken, vocabulary: Vocabulary, window: int, how: SampleSection, seed: int
) -> str:
    """The prompt and its continuation by `how.tokens` tokens, as text.

    `window` is how many tokens are seen at most. Without a prompt a new document begins.
    """
    generator = torch.Generator().manual_seed(seed)
    numbers = [vocabulary.separator, *vocabulary.encode(how.prompt).tolist()]
    for _ in range(how.tokens):
        numbers.append(draw(after(numbers[-window:]), how.temperature, how.top_k, generator))
    return vocabulary.decode(numbers[1:])


def visible(text: str) -> str:
    """The text as it can be shown anywhere: control characters but line ends and tabs escaped.

    A model of bytes may draw any of them, and a terminal would obey.
    """
    return "".join(
        char if char in "\n\t" or unicodedata.category(char) not in HIDDEN else _escaped(char)
        for char in text
    )


def _escaped(char: str) -> str:
    return char.encode("unicode_escape").decode("ascii")


def draw(logits_V: Tensor, temperature: float, top_k: int, generator: torch.Generator) -> int:
    """One token: the likeliest at temperature 0, else drawn from the `top_k` likeliest (0: all)."""
    if temperature == 0:
        return int(logits_V.argmax())
    if 0 < top_k < len(logits_V):
        least = logits_V.topk(top_k).values[-1]
        logits_V = logits_V.masked_fill(logits_V < least, float("-inf"))
    # from the likeliest, and in fp64: a temperature near 0 then makes its share 1, and not NaN
    share_V = torch.softmax((logits_V.double() - logits_V.max()) / temperature, 0)
    return int(torch.multinomial(share_V, 1, generator=generator))
