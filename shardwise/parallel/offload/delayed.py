"""Updates made beside the next step: the delayed parameter update of ZeRO-Offload.

    main thread    forward 3, backward 3 | publish 2 | forward 4, backward 4 | publish 3 | ...
    host thread    update 2 ............             | update 3 ............             | ...

Step 4 computes with the parameters that the update of step 2 made.

(ZeRO-Offload, arXiv 2101.06840, section 5.2.)
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

#: An update, and what makes it visible once it is over.
Update = tuple[Callable[[], Any], Callable[[], Any]]


class NextStep:
    """The updates of one step, in order on a thread of the host, until `finish`.

    `late`: they are made by `finish`, as on a slow host. The result must be the same.
    """

    def __init__(self) -> None:
        self.late = False
        self._running: list[Update] = []

    @property
    def pending(self) -> bool:
        """Whether updates have begun that `finish` has not made visible."""
        return bool(self._running)

    def begin(self, updates: Sequence[Update]) -> None:
        """Start `updates`; those before must be finished."""
        assert not self._running
        if self.late:
            self._running = list(updates)
            return
        threads = torch.get_num_threads()
        pool = ThreadPoolExecutor(1, "shardwise-update", torch.set_num_threads, (threads,))
        self._running = [(pool.submit(update).result, publish) for update, publish in updates]
        pool.shutdown(wait=False)  # the thread ends after the last update

    def finish(self) -> None:
        """Wait for the updates, and publish each here. An error of an update is raised."""
        running, self._running = self._running, []
        for update, publish in running:
            update()
            publish()
