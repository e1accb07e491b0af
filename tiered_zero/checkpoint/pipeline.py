"""Read ahead | work | retire: the way of a save and of a load through the sub-groups.

They move bytes by `SubGroupIO`, as the update does, whose own loop (`StreamingStepper`) takes sub-groups as their
gradients come, skips some, and reads ahead from step to step: none of that is here.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from tiered_zero.errors import InternalError
from tiered_zero.rules.state_layout import StateLayout
from tiered_zero.update.subgroup_io import SubGroupIO, SubGroupWork

_READ_AHEAD = 4
_MOST_WRITTEN = 32
"""Sub-groups whose writes are in flight. Those in host memory need no buffer, which would bound them."""


def run_ahead(
    io: SubGroupIO,
    layouts: Sequence[StateLayout],
    begin: Callable[[StateLayout], SubGroupWork | None],
    work: Callable[[SubGroupWork], None],
    retire: Callable[[SubGroupWork], None] = lambda written: None,
) -> None:
    """Begin, work on and retire each sub-group once, in order; several are begun before the first is worked on.

    `begin`: starts its reads; None while no buffer is free. `work`: waits for them, and adds what it writes to the
    work's `writes`. `retire`: called when these are done. Raises what they raise, once nothing uses a buffer any more.
    """
    waiting, begun, written = deque(layouts), deque[SubGroupWork](), deque[SubGroupWork]()

    def finish() -> None:
        io.finish(written[0])
        retire(written.popleft())

    try:
        while waiting or begun:
            while waiting and len(begun) < _READ_AHEAD and (opened := begin(waiting[0])) is not None:
                begun.append(opened)
                waiting.popleft()
            if begun:
                work(begun[0])
                written.append(begun.popleft())
            elif written:
                finish()
            else:
                raise InternalError("A staging buffer was expected to be free for a checkpoint; all are in use.")
            while written and (len(written) > _MOST_WRITTEN or written[0].is_written()):
                finish()
        while written:
            finish()
    except BaseException:
        io.cancel([*written, *begun])
        raise
