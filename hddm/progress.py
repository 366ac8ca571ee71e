"""Progress of long work: a bar on a terminal, a plain line every tenth elsewhere."""

import shutil
import sys
from types import TracebackType

from tqdm import tqdm


class Progress:
    """``with Progress(total, "train") as advance: advance(n)``; written to standard error."""

    def __init__(self, total: int, label: str) -> None:
        self._total, self._label, self._done = total, label, 0
        self._bar: tqdm[None] | None = None
        if sys.stderr.isatty():
            # tqdm draws nothing on a terminal that reports no size, as in some containers.
            columns, lines = shutil.get_terminal_size()
            self._bar = tqdm(
                total=total, desc=label, unit_scale=True, smoothing=0.05, ncols=columns, nrows=lines
            )

    def __enter__(self) -> "Progress":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.close()

    def reach(self, step: int, loss: float) -> None:
        """Be at ``step``, wherever it was before, and show the loss there."""
        if self._bar is not None:
            self._bar.set_postfix_str(f"loss {loss:.4f}", refresh=False)
        self(step - self._done)

    def __call__(self, units: int) -> None:
        """Count ``units`` more."""
        before, self._done = self._done, self._done + units
        if self._bar is not None:
            self._bar.update(units)
        elif 10 * before // self._total != 10 * self._done // self._total:
            print(f"{self._label}: {100 * self._done // self._total} %", file=sys.stderr, flush=True)
