"""The ring: host buffers between the disk and the link.

Direct input and output wants aligned memory, the link wants page-locked memory, and both want to go on while the other
works. So there are a few slots of one size, page-locked where the device has that, and each is in one of three hands:
an I/O thread's, the link's (until ``busy``, an event, has passed), or nobody's.

Not thread-safe by itself: the queue's lock (`pager.engine.disk_queue`) is held around ``take`` and ``give``.
"""

from __future__ import annotations

import logging
import sys
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pager.device.base import Region
from pager.errors import TierError
from pager.tiers.host_arena import map_memory

if TYPE_CHECKING:
    import torch

    from pager.device.base import Device, Event

logger = logging.getLogger("pager.engine.ring")


@dataclass(slots=True, eq=False)
class Slot:
    """One buffer; ``busy``: the event after which the link is done with it."""

    index: int
    memory: torch.Tensor
    busy: Event | None = None

    @property
    def region(self) -> Region:
        """What the checker is told of it."""
        return Region("ring", self.index, self.index + 1)

    def settle(self) -> None:
        """Wait until the link is done with it. Not under a lock: it takes as long as a copy."""
        if self.busy is not None:
            self.busy.synchronize()
            self.busy = None


class Ring:
    """``num_slots`` buffers of ``slot_bytes`` each."""

    def __init__(self, device: Device, slot_bytes: int, num_slots: int) -> None:
        self.slot_bytes = slot_bytes
        self.num_slots = num_slots
        self._device = device
        self._num_spares = 0
        self.spare_bytes = 0  # of slots beyond the ring
        memory = map_memory(slot_bytes * num_slots)
        self._address: int | None = memory.data_ptr()
        try:
            device.register_host(memory.data_ptr(), memory.numel())
        except (TierError, OSError, RuntimeError) as error:
            self._address = None
            logger.warning(
                "the buffers of the disk could not be page-locked (%s): copies through them are slow", error
            )
        self._free = deque(
            Slot(index, memory[index * slot_bytes : (index + 1) * slot_bytes]) for index in range(num_slots)
        )

    @property
    def has_free(self) -> bool:
        """Whether ``take`` gives a slot."""
        return bool(self._free)

    def take(self) -> Slot | None:
        """A slot that nobody has, one that the link is done with if there is one; call ``settle`` before using it."""
        for slot in self._free:
            if slot.busy is None or slot.busy.query():
                self._free.remove(slot)
                return slot
        return self._free.popleft() if self._free else None

    def give(self, slot: Slot, busy: Event | None) -> None:
        """Give a slot back; the link is done with it after ``busy``."""
        slot.busy = busy
        if slot.index < self.num_slots:
            self._free.append(slot)
        else:
            self.spare_bytes -= slot.memory.numel()

    def make_spare(self, num_bytes: int) -> Slot:
        """One more slot, of pageable memory, that is gone once it is given back. Raises TierFull."""
        memory = map_memory(num_bytes)
        self.spare_bytes += num_bytes
        self._num_spares += 1
        return Slot(self.num_slots + self._num_spares, memory)

    def close(self) -> None:
        """Unlock the memory. The caller has waited for the copies. Idempotent."""
        address, self._address = self._address, None
        if address is not None:
            self._device.unregister_host(address)

    def __del__(self) -> None:
        # A model that nobody closed: its memory must not stay registered with the device.
        if getattr(self, "_address", None) is None or sys.is_finalizing():
            return
        self._device.close()  # copies may be under way
        self.close()
