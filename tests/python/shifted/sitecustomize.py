"""For processes whose clock libfaketime shifts: it spoils the call by which Python sleeps."""

import select
import time


def _sleep(seconds: float) -> None:
    select.select([], [], [], seconds)


time.sleep = _sleep  # type: ignore[assignment]
