"""How an optimizer step is cut into units, in which order, and which pages each unit accesses.

The order is that of the next forward: what it needs first is updated first. A parameter is cut into slices whose
bounds are page bounds in every dtype involved, so that a unit's pages belong to it alone. The same cut serves the step
itself (`pager.optim.update`) and the plan, which knows the step's accesses before the first one happened.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from pager.graph.access_trace import AccessRow, Phase
from pager.optim.probe import Cut, ProbeResult
from pager.units import ceil_div

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from typing import Any

    from pager.address_space import Segment
    from pager.engine.engine import Engine
    from pager.mmu.binding import Binding
    from pager.optim.adopted import AdoptedOptimizer


class Slice(NamedTuple):
    """Elements ``[begin, end)`` of a tensor in the order of its storage; ``whole`` if it may not be cut."""

    begin: int
    end: int
    whole: bool

    def pages(self, segment: Segment) -> tuple[int, int]:
        """First page and number of pages that hold these elements of ``segment``."""
        if self.whole:
            return 0, segment.num_pages
        first = self.begin * segment.dtype.itemsize // segment.page_size
        return first, ceil_div((self.end - self.begin) * segment.dtype.itemsize, segment.page_size)


def cut(adopted: AdoptedOptimizer, group: Mapping[str, Any], binding: Binding) -> list[Slice]:
    """The slices in which ``adopted`` updates a parameter with these group values."""
    segment = binding.segment
    probed = adopted.probed(group, binding)
    if probed.cut is not Cut.SLICEABLE or not segment.dense or not _slices_match(adopted, binding, probed):
        return [Slice(0, segment.num_elements, True)]
    step = adopted.unit_elements(binding, probed)
    return [
        Slice(begin, min(begin + step, segment.num_elements), False)
        for begin in range(0, segment.num_elements, step)
    ]


def _slices_match(adopted: AdoptedOptimizer, binding: Binding, probed: ProbeResult) -> bool:
    """Whether a slice is the same elements of parameter, gradient and states, and the states keep their dtypes.

    Not so after a conversion in mid-training (channels_last): states keep the layout they have, as in torch.
    """
    segment = binding.segment
    states = adopted.paged_states(binding)
    others = [state.segment for state in states.values()]
    if binding.gradient is not None:
        others.append(binding.gradient.segment)
    return all(other.stride == segment.stride for other in others) and all(
        probed.state_dtypes.get(key, state.segment.dtype) == state.segment.dtype
        for key, state in states.items()
    )


def unit_ranges(adopted: AdoptedOptimizer, binding: Binding, piece: Slice) -> list[tuple[Segment, int, int]]:
    """The page ranges a unit accesses: parameter, gradient, then each paged state."""
    assert binding.gradient is not None
    segment = binding.segment
    # A parameter that is not too large comes in whole: then it is there, in one piece, for the next forward.
    own = (0, segment.num_pages) if adopted.keeps_whole(segment) else piece.pages(segment)
    others = [binding.gradient.segment, *(state.segment for state in adopted.paged_states(binding).values())]
    return [(segment, *own), *((other, *piece.pages(other)) for other in others)]


def note_accesses(engine: Engine, ranges: Iterable[tuple[Segment, int, int]]) -> None:
    """Tell the timeline of a unit's accesses."""
    with engine.lock:
        engine.timeline.new_tick()
        for segment, first, num_pages in ranges:
            engine.timeline.access(segment.index, first, num_pages, write=True, phase=Phase.UPDATE)


def expected_rows(adopted: AdoptedOptimizer) -> list[AccessRow]:
    """The accesses of a step in which every trainable parameter has a gradient; ticks from 0."""
    found = [
        (adopted.next_use(binding), group, binding)
        for group in adopted.optimizer.param_groups
        for binding in map(adopted.binding_of, group["params"])
        if binding is not None and binding.gradient is not None and binding.tensor.requires_grad
    ]
    rows: list[AccessRow] = []
    tick = 0
    for _, group, binding in sorted(found, key=lambda item: item[0]):
        for piece in cut(adopted, group, binding):
            for segment, first, num_pages in unit_ranges(adopted, binding, piece):
                rows.append(AccessRow(tick, segment.index, first, num_pages, True, Phase.UPDATE))
            tick += 1
    return rows
