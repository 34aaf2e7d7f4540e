"""Updates made beside the next step: the delayed parameter update of ZeRO-Offload.

    main thread    forward 3, backward 3 | publish 2 | forward 4, backward 4 | publish 3 | ...
    host thread    update 2 ............             | update 3 ............             | ...

Step 4 computes with the parameters that the update of step 2 made.

(ZeRO-Offload, arXiv 2101.06840, section 5.2.)
"""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Event
from typing import Any, Final

import torch

#: An update, and what makes it visible once it is over.
Update = tuple[Callable[[], Any], Callable[[], Any]]
#: How much later than `finish` a late update is made; and the most that it waits for `finish`.
LATE_S: Final = 0.02
MOST_S: Final = 10.0


class NextStep:
    """The updates of one step, in order on a thread of the host, until `finish`.

    `late`: the thread makes them only when `finish` waits for them, as on a slow host. The result
    must be the same.
    """

    def __init__(self) -> None:
        self.late = False
        self._asked = Event()  # `finish` waits
        self._running: list[Update] = []

    @property
    def pending(self) -> bool:
        """Whether updates have begun that `finish` has not made visible."""
        return bool(self._running)

    def begin(self, updates: Sequence[Update]) -> None:
        """Start `updates`; those before must be finished."""
        assert not self._running
        self._asked = Event()
        threads = torch.get_num_threads()
        pool = ThreadPoolExecutor(1, "shardwise-update", torch.set_num_threads, (threads,))
        self._running = [
            (pool.submit(self._run, update).result, publish) for update, publish in updates
        ]
        pool.shutdown(wait=False)  # the thread ends after the last update

    def _run(self, update: Callable[[], Any]) -> None:
        if self.late:
            self._asked.wait(MOST_S)
            time.sleep(LATE_S)
        update()

    def finish(self) -> None:
        """Wait for the updates, and publish each here. An error of an update is raised."""
        running, self._running = self._running, []
        self._asked.set()
        for update, publish in running:
            update()
            publish()
