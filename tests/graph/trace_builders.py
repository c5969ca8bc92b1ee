"""Builders of segments and traces shared by the tests of this room."""

from __future__ import annotations

from hypothesis import strategies as st

from pager.graph.access_trace import AccessRow, AccessTrace, Phase, SegmentSpec


def make_segments(
    num_pages: list[int], kinds: list[str] | None = None, page_size: int = 4
) -> list[SegmentSpec]:
    """Segments of these pages, one after the other."""
    segments: list[SegmentSpec] = []
    first_page = 0
    for index, count in enumerate(num_pages):
        kind = kinds[index] if kinds else "parameter"
        segments.append(
            SegmentSpec(
                index=index,
                name=f"layers.{index}.{kind}",
                kind=kind,
                num_bytes=count * page_size,
                first_page=first_page,
                num_pages=count,
            )
        )
        first_page += count
    return segments


@st.composite
def steps(draw: st.DrawFn) -> tuple[list[SegmentSpec], AccessTrace]:
    """Any few segments (gaps between their pages, some without pages) and any step over ranges of them."""
    segments: list[SegmentSpec] = []
    first_page = 0
    for index in range(draw(st.integers(1, 4))):
        first_page += draw(st.integers(0, 2))
        count = draw(st.integers(0, 7))
        segments.append(
            SegmentSpec(
                index=index,
                name=f"s{index}",
                kind="state",
                num_bytes=count,
                first_page=first_page,
                num_pages=count,
            )
        )
        first_page += count
    rows: list[AccessRow] = []
    tick = 0
    for _ in range(draw(st.integers(0, 14))):
        spec = draw(st.sampled_from(segments))
        begin = draw(st.integers(0, spec.num_pages))
        count = draw(st.integers(0, spec.num_pages - begin))
        rows.append(AccessRow(tick, spec.index, begin, count, draw(st.booleans()), Phase.FORWARD))
        tick += draw(st.integers(0, 1))
    num_ticks = rows[-1].tick + 1 if rows else 0
    seconds = draw(st.lists(st.integers(0, 9), min_size=num_ticks, max_size=num_ticks))
    return segments, AccessTrace.from_rows(rows, seconds=seconds)


def make_training_step(num_layers: int) -> tuple[list[SegmentSpec], AccessTrace]:
    """Per layer a parameter and a gradient of 2 pages, a state of 4; forward, backward, update in halves."""
    kinds = ["parameter", "gradient", "state"] * num_layers
    segments = make_segments([2, 2, 4] * num_layers, kinds, page_size=1024)
    rows: list[AccessRow] = []
    tick = 0
    for layer in range(num_layers):
        rows.append(AccessRow(tick, 3 * layer, 0, 2, False, Phase.FORWARD))
        tick += 1
    for layer in reversed(range(num_layers)):
        rows.append(AccessRow(tick, 3 * layer, 0, 2, False, Phase.BACKWARD))
        rows.append(AccessRow(tick, 3 * layer + 1, 0, 2, True, Phase.GRADIENT))
        tick += 1
    for layer in range(num_layers):
        for half in range(2):
            rows.append(AccessRow(tick, 3 * layer, half, 1, True, Phase.UPDATE))
            rows.append(AccessRow(tick, 3 * layer + 1, half, 1, False, Phase.UPDATE))
            rows.append(AccessRow(tick, 3 * layer + 2, 2 * half, 2, True, Phase.UPDATE))
            tick += 1
    return segments, AccessTrace.from_rows(rows, seconds=[1e-3] * tick)
