"""Processes that another one started."""

import os
import signal
import threading
import time


def end_with(parent: int) -> None:
    """Ends this process once its parent is gone; else it would keep its run's folder from whoever starts again."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()
