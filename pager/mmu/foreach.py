"""Operations on lists of tensors (``torch._foreach_*``) that together do not fit the device: run in parts.

They work element by element of the lists, so parts give the same bits, except where a kernel's reduction
depends on how the list is cut (``_foreach_norm`` on CUDA; see the exactness table in the README).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pager.mmu.binding import Binding

# Share one part may take of the frames that can be emptied: half leaves room for holes and for what is in
# flight.
_PART = 2


def is_foreach(func: Any) -> bool:
    """Whether ``func`` maps over lists of tensors."""
    name = getattr(func, "__name__", "")
    return name.startswith(("_foreach_", "_amp_foreach_"))


def split(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], bindings: Sequence[Binding]
) -> list[tuple[Any, ...]] | None:
    """Arguments of each part, or None if the call needs no splitting or cannot be split."""
    if not is_foreach(func):
        return None
    engine = bindings[0].mmu.engine
    arena = engine.arena
    with engine.lock:
        kept = sum(run.num_pages for run in engine.resident_runs() if run.is_kept or run.pins)
    limit = (arena.capacity_bytes - kept * arena.page_size) // _PART
    if sum(binding.segment.num_pages for binding in bindings) * arena.page_size <= limit:
        return None
    lists = [arg for arg in args if isinstance(arg, (list, tuple))]
    length = len(lists[0]) if lists else 0
    if length < 2 or any(len(values) != length for values in lists):
        return None
    parts: list[tuple[int, int]] = []
    begin = filled = 0
    for index in range(length):
        need = sum(_paged_bytes(values[index], arena.page_size) for values in lists)
        if index > begin and filled + need > limit:
            parts.append((begin, index))
            begin, filled = index, 0
        filled += need
    parts.append((begin, length))
    if len(parts) == 1:
        return None
    return [tuple(arg[a:b] if isinstance(arg, (list, tuple)) else arg for arg in args) for a, b in parts]


def join(results: list[Any]) -> Any:
    """One result from those of the parts: lists are put together, None stays None."""
    if results[0] is None:
        return None
    joined = [tensor for result in results for tensor in result]
    return tuple(joined) if isinstance(results[0], tuple) else joined


def _paged_bytes(value: Any, page_size: int) -> int:
    binding = getattr(value, "_pager", None)
    return binding.segment.num_pages * page_size if binding is not None else 0
