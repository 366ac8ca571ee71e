"""Workers that do not outlive who started them."""

import multiprocessing
import os
import signal
import threading
from multiprocessing.connection import wait

_watching = False


def end_with_parent() -> None:
    """End this process when its parent is gone, however that happened; in the main process, do nothing.

    A killed benchmark leaves workers that nobody waits for, and that would hold what the next one needs. What
    a terminal sends to all is left to the parent, which tells its workers once to stop.
    """
    global _watching
    parent = multiprocessing.parent_process()
    if parent is None or _watching:
        return
    _watching = True
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    sentinel = parent.sentinel

    def watch() -> None:
        wait([sentinel])
        os._exit(1)

    threading.Thread(target=watch, daemon=True, name="ends with its parent").start()
