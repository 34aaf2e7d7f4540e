"""The sample: text that the trained model continues, one token at a time.

Every rank computes the same tokens: under a sharded engine each forward pass is collective, and
the draw depends on the seed alone. The number of passes never depends on what is drawn, so no rank
can be left waiting. The whole window is computed again for each token: a cache of keys and values
would be more code than a sample at the end of a run is worth.
"""

import torch
from torch import Tensor, nn

from shardwise.train.config import SampleSection
from shardwise.train.tokens import Vocabulary


@torch.no_grad()
def sample(
    model: nn.Module, vocabulary: Vocabulary, window: int, how: SampleSection, seed: int
) -> str:
    """The prompt and its continuation by `how.tokens` tokens, as text.

    `window` is how many tokens the model sees at most. The model may have more rows than the
    vocabulary has tokens: those are never drawn. Without a prompt a new document begins.
    """
    device = next(model.parameters()).device
    generator = torch.Generator().manual_seed(seed)
    numbers = [vocabulary.separator, *vocabulary.encode(how.prompt).tolist()]
    was_training = model.training
    model.eval()
    try:
        for _ in range(how.tokens):
            seen = torch.tensor([numbers[-window:]], device=device)
            logits_V = model(seen)[0, -1, : vocabulary.size].float().cpu()
            numbers.append(draw(logits_V, how.temperature, how.top_k, generator))
    finally:
        model.train(was_training)
    return vocabulary.decode(numbers[1:])


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
