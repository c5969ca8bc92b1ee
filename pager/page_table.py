"""The page table: where each page is, and the only code that changes it.

The problem: a page's bytes exist in up to two places (its home tier and a device frame), several threads want
to move them, and moves take time. If any part of the program could write "it is over there now", sooner or
later two parts would disagree and a page would be read where it no longer is.

The protocol: a page has one small state, and the verbs below are its only transitions. Each verb takes a
range of neighbouring pages, checks that all of them are in a state it starts from, and changes them together
(numpy slices: the cost does not depend on the number of pages). A verb that finds anything else raises
`PagerInternalError` and changes nothing. A move is ``begin -> (bytes move) -> end(success)``; failure goes
through the same verb with ``success=False``, so there is no second, rarely run code for it.

::

    EMPTY ----- store_home -----> ABSENT ---- begin_page_in ----> ARRIVING ---- end_page_in(True) ----> CLEAN
      |                            ^  ^ '<--- end_page_in(False) ----'                                  |  ^
      |                            |  '------------------------------ evict ----------------------------'  |
      '--- materialize ---> DIRTY <------------------------------ mark_dirty ---------- CLEAN, LEAVING     |
                             | '<----- end_page_out(False) ----- LEAVING ----- end_page_out(True) ---------'
                             '------------ begin_page_out ----------^
      any state, unpinned --- discard ---> EMPTY

EMPTY: no value (a gradient that is None). ABSENT: the value is at home only. ARRIVING: a copy to the device
is under way. CLEAN: device and home agree. DIRTY: the device is newer, or it is the home. LEAVING: a copy to
the home is under way.

Why not reference counts or locks per page: 70 B parameters are nine million pages, and every access covers a
run of them. Why columns and not objects: the same reason.

Not thread-safe by itself: the engine's lock is held around every verb (they take microseconds).
"""

from __future__ import annotations

import enum

import numpy as np
import numpy.typing as npt

from pager.columns import resized
from pager.errors import PagerInternalError


class PageState(enum.IntEnum):
    """The closed set of states of a page; what each costs is in the module's essay."""

    EMPTY = 0
    ABSENT = 1
    ARRIVING = 2
    CLEAN = 3
    DIRTY = 4
    LEAVING = 5


class Home(enum.IntEnum):
    """The tier where a page's bytes belong."""

    DEVICE = 0
    HOST = 1
    DISK = 2


_RESIDENT = (PageState.ARRIVING, PageState.CLEAN, PageState.DIRTY, PageState.LEAVING)


class PageTable:
    """Columns of per-page facts: ``state``, ``home``, ``home_frame``, ``frame`` (on the device), ``pins``."""

    def __init__(self) -> None:
        self.num_pages = 0
        # ``state`` over the same memory: to find a byte in a short range numpy takes ten times as long.
        self._state_bytes = bytearray()
        self.state: npt.NDArray[np.uint8] = np.zeros(0, np.uint8)
        self.home: npt.NDArray[np.uint8] = np.zeros(0, np.uint8)
        self.home_frame: npt.NDArray[np.int32] = np.zeros(0, np.int32)
        self.frame: npt.NDArray[np.int32] = np.zeros(0, np.int32)
        self.pins: npt.NDArray[np.int32] = np.zeros(0, np.int32)

    def grow(self, num_pages: int) -> None:
        """Make room for pages up to ``num_pages``; new ones are EMPTY, at home on the host, in no frame."""
        extra = num_pages - self.num_pages
        if extra < 0:
            raise PagerInternalError(f"page table cannot shrink from {self.num_pages} to {num_pages} pages")
        if num_pages > len(self.state):
            # Grow by half again, so that many small additions stay linear.
            capacity = max(num_pages, len(self.state) * 3 // 2)
            self._state_bytes = bytearray(resized(self.state, capacity, PageState.EMPTY).tobytes())
            self.state = np.frombuffer(self._state_bytes, np.uint8)
            self.home = resized(self.home, capacity, Home.HOST)
            self.home_frame = resized(self.home_frame, capacity, -1)
            self.frame = resized(self.frame, capacity, -1)
            self.pins = resized(self.pins, capacity, 0)
        self.num_pages = num_pages

    # -- homes -------------------------------------------------------------------------------------

    def settle(self, begin: int, end: int, home: Home, home_frame: int) -> None:
        """Give pages their home. On the device no other frame is needed (``home_frame`` is -1)."""
        self.home[begin:end] = home
        self.home_frame[begin:end] = -1 if home_frame < 0 else np.arange(home_frame, home_frame + end - begin)

    def store_home(self, begin: int, end: int) -> None:
        """The home now holds a new value and no device copy exists: EMPTY or ABSENT -> ABSENT."""
        self._check("store_home", begin, end, (PageState.EMPTY, PageState.ABSENT))
        self.state[begin:end] = PageState.ABSENT

    # -- towards the device ------------------------------------------------------------------------

    def begin_page_in(self, begin: int, end: int, frame: int) -> None:
        """ABSENT -> ARRIVING, in the frames from ``frame`` on."""
        self._check("begin_page_in", begin, end, (PageState.ABSENT,))
        self.state[begin:end] = PageState.ARRIVING
        self.frame[begin:end] = np.arange(frame, frame + end - begin)

    def end_page_in(self, begin: int, end: int, *, success: bool) -> None:
        """ARRIVING -> CLEAN, or back to ABSENT: the home copy was never given up."""
        self._check("end_page_in", begin, end, (PageState.ARRIVING,))
        self.state[begin:end] = PageState.CLEAN if success else PageState.ABSENT
        if not success:
            self.frame[begin:end] = -1

    def materialize(self, begin: int, end: int, frame: int) -> None:
        """EMPTY or ABSENT -> DIRTY without reading the home: the caller overwrites every byte."""
        self._check("materialize", begin, end, (PageState.EMPTY, PageState.ABSENT))
        self.state[begin:end] = PageState.DIRTY
        self.frame[begin:end] = np.arange(frame, frame + end - begin)

    def mark_dirty(self, begin: int, end: int) -> None:
        """CLEAN, LEAVING or DIRTY -> DIRTY: somebody wrote to the device copy."""
        self._check("mark_dirty", begin, end, (PageState.CLEAN, PageState.LEAVING, PageState.DIRTY))
        self.state[begin:end] = PageState.DIRTY

    # -- away from the device ----------------------------------------------------------------------

    def begin_page_out(self, begin: int, end: int) -> None:
        """DIRTY -> LEAVING; only for pages whose home is below the device."""
        self._check("begin_page_out", begin, end, (PageState.DIRTY,))
        if (self.home[begin:end] == Home.DEVICE).any():
            raise PagerInternalError(f"begin_page_out: pages {begin}..{end} have their home on the device")
        self.state[begin:end] = PageState.LEAVING

    def end_page_out(self, begin: int, end: int, *, success: bool) -> None:
        """LEAVING -> CLEAN, or back to DIRTY: a failed write leaves the page where it was.

        Pages that were written again meanwhile are DIRTY and stay so.
        """
        self._check("end_page_out", begin, end, (PageState.LEAVING, PageState.DIRTY))
        state = self.state[begin:end]
        state[state == PageState.LEAVING] = PageState.CLEAN if success else PageState.DIRTY

    def evict(self, begin: int, end: int) -> None:
        """CLEAN -> ABSENT; refuses pinned pages. The caller frees the frames afterwards."""
        self._check("evict", begin, end, (PageState.CLEAN,))
        self._check_unpinned("evict", begin, end)
        self.state[begin:end] = PageState.ABSENT
        self.frame[begin:end] = -1

    def discard(self, begin: int, end: int) -> None:
        """Any settled state -> EMPTY: the value is not wanted any more (``grad = None``, a retired tensor)."""
        if (self.state[begin:end] == PageState.LEAVING).any():
            raise PagerInternalError(f"discard: pages {begin}..{end} are on their way out")
        self._check_unpinned("discard", begin, end)
        self.state[begin:end] = PageState.EMPTY
        self.frame[begin:end] = -1

    # -- pins --------------------------------------------------------------------------------------

    def pin(self, begin: int, end: int) -> None:
        """The pages may not move until :meth:`unpin`; they must have frames."""
        self._check("pin", begin, end, _RESIDENT)
        self.pins[begin:end] += 1

    def unpin(self, begin: int, end: int) -> None:
        """Undo one :meth:`pin`."""
        if (self.pins[begin:end] <= 0).any():
            raise PagerInternalError(f"unpin: pages {begin}..{end} are not all pinned")
        self.pins[begin:end] -= 1

    # -- questions ---------------------------------------------------------------------------------

    def has_value(self, begin: int, end: int) -> bool:
        """Whether every page of the range has a good copy somewhere."""
        return self._state_bytes.find(PageState.EMPTY, begin, end) < 0

    def is_dirty(self, begin: int, end: int) -> bool:
        """Whether the device copy of any page of the range is newer than its home, or on its way there."""
        find = self._state_bytes.find
        return find(PageState.DIRTY, begin, end) >= 0 or find(PageState.LEAVING, begin, end) >= 0

    def num_resident(self) -> int:
        """Pages that own a device frame."""
        return int((self.frame[: self.num_pages] >= 0).sum())

    def _check(self, verb: str, begin: int, end: int, allowed: tuple[PageState, ...]) -> None:
        # All pages of a run share their state nearly always, so comparing with the first is the cheap common
        # case.
        first = self._state_bytes[begin]
        if first in allowed and self._state_bytes.count(first, begin, end) == end - begin:
            return
        states = self.state[begin:end]
        wrong = ~np.isin(states, allowed)
        if wrong.any():
            page = begin + int(np.argmax(wrong))
            found = PageState(int(self.state[page])).name
            names = " or ".join(state.name for state in allowed)
            raise PagerInternalError(f"{verb}: page {page} of {begin}..{end} is {found}, expected {names}")

    def _check_unpinned(self, verb: str, begin: int, end: int) -> None:
        if self.pins[begin:end].any():
            page = begin + int(np.argmax(self.pins[begin:end] != 0))
            raise PagerInternalError(f"{verb}: page {page} of {begin}..{end} has {self.pins[page]} pins")
