"""The plan: figures per page, prediction, text, files."""

from __future__ import annotations

import csv
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import networkx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pager.graph import plan_view
from pager.graph.access_trace import TIER_NAMES, AccessTrace, SegmentSpec
from pager.graph.plan import PAGE_DTYPE, Plan, make_plan
from pager.policies.belady import Belady
from pager.policies.lru import Lru
from tests.graph.trace_builders import make_segments, make_training_step, steps

PAGE = 1024


def make_example(num_layers: int = 4, **more: Any) -> Plan:
    """Four layers of 8 pages; the first is wired, the last lives on disk; 14 pages of device budget."""
    segments, trace = make_training_step(num_layers)
    homes = [0] * 3 + [1] * 3 * (num_layers - 2) + [2] * 3
    arguments: dict[str, Any] = {
        "page_size": PAGE,
        "homes": homes,
        "budgets": {"device": 14 * PAGE, "host": 10**6, "disk": None},
        "policy": Belady(),
    }
    return make_plan(segments, trace, **{**arguments, **more})


def oracle_rows(segments: list[SegmentSpec], trace: AccessTrace) -> dict[int, tuple[float, ...]]:
    """page -> the six distances, from sets of pages over two steps."""
    touched = [
        set(range(segments[s].first_page + f, segments[s].first_page + f + n))
        for s, f, n in zip(trace.segment.tolist(), trace.first_page, trace.num_pages, strict=True)
    ]
    num, ticks, starts = len(touched), trace.tick.tolist(), trace.tick_start_seconds.tolist()
    result: dict[int, tuple[float, ...]] = {}
    for spec in segments:
        for page in range(spec.first_page, spec.first_page + spec.num_pages):
            rows = [row for row in range(num) if page in touched[row]]
            if not rows:
                result[page] = (-1, -1, np.nan, -1, -1, np.nan)
                continue
            first, last = rows[0], rows[-1]
            distinct = set().union(*touched[last + 1 :], *touched[:first])
            result[page] = (
                ticks[first],
                PAGE * sum(len(pages) for pages in touched[:first]),
                starts[ticks[first]],
                ticks[first] - ticks[last] + trace.num_ticks,
                PAGE * len(distinct),
                starts[ticks[first]] - starts[ticks[last]] + trace.step_seconds,
            )
    return result


@settings(max_examples=150, deadline=None)
@given(steps(), st.integers(0, 12), st.integers(0, 12))
def test_pages_equal_the_oracle(step: tuple[list[SegmentSpec], AccessTrace], begin: int, length: int) -> None:
    segments, trace = step
    homes = [index % 3 for index in range(len(segments))]
    plan = make_plan(segments, trace, page_size=PAGE, homes=homes)
    pages = plan.pages()
    expected = oracle_rows(segments, trace)
    assert pages.dtype == PAGE_DTYPE
    assert pages["page"].tolist() == list(expected)
    owner = [spec.index for spec in segments for _ in range(spec.num_pages)]
    assert pages["segment"].tolist() == owner
    assert pages["tier"].tolist() == [homes[index] for index in owner]
    assert all(plan.kinds[code] == "state" for code in pages["kind"])
    found = [tuple(row)[4:] for row in pages.tolist()]
    np.testing.assert_array_equal(
        np.array(found).reshape(-1, 6), np.array([*expected.values()]).reshape(-1, 6)
    )
    part = plan.pages(begin, begin + length)
    assert part.tobytes() == pages[begin : begin + length].tobytes()
    assert plan.pages(-3).tobytes() == pages[-3:].tobytes()


def test_prediction_by_hand() -> None:
    predicted = make_example().predicted
    assert predicted.tier_bytes == {"device": 8 * PAGE, "host": 16 * PAGE, "disk": 8 * PAGE}
    assert (predicted.wired_bytes, predicted.largest_tick_bytes) == (8 * PAGE, 4 * PAGE)
    assert predicted.policy == "belady"
    assert predicted.peak_resident_bytes is not None
    assert predicted.resident_bytes is not None
    assert predicted.peak_resident_bytes <= 14 * PAGE
    assert len(predicted.resident_bytes) == 16
    assert predicted.resident_bytes.min() >= 8 * PAGE
    # Six pages for streaming: each of the three streamed states of 4 pages comes once a step.
    assert predicted.page_in_bytes is not None
    assert predicted.disk_read_bytes is not None
    assert predicted.page_in_bytes >= 12 * PAGE
    assert 4 * PAGE <= predicted.disk_read_bytes <= predicted.page_in_bytes


def test_nothing_moves_where_all_is_wired_or_fits() -> None:
    wired = make_example(homes=[0] * 12, budgets={"device": 32 * PAGE}).predicted
    assert (wired.page_in_bytes, wired.page_out_bytes, wired.peak_resident_bytes) == (0, 0, 32 * PAGE)
    assert wired.hit_rate == 1.0
    fits = make_example(homes=None, budgets={"device": 32 * PAGE}).predicted
    assert (fits.page_in_bytes, fits.page_out_bytes) == (0, 0)
    # Applied gradients are gone at the end of the step, so the device is not full all the time.
    assert fits.resident_bytes is not None
    assert fits.resident_bytes.min() < fits.resident_bytes.max() <= 32 * PAGE


def test_belady_is_predicted_to_move_no_more_than_lru() -> None:
    belady, lru = make_example().predicted, make_example(policy=Lru()).predicted
    assert belady.page_in_bytes is not None
    assert lru.page_in_bytes is not None
    assert belady.page_in_bytes < lru.page_in_bytes


def test_the_policy_handed_in_is_not_changed() -> None:
    policy = Lru()
    make_example(policy=policy)
    assert vars(policy).keys() == vars(Lru()).keys()
    assert policy._now == 0


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({"policy": None}, "no eviction policy was given"),
        ({"budgets": {}}, "no device budget was given"),
        ({"budgets": {"device": 11 * PAGE}}, "one tick needs 4096 bytes at once and wiring leaves 3072"),
    ],
)
def test_why_transfers_are_not_predicted(more: dict[str, Any], reason: str) -> None:
    plan = make_example(**more)
    assert plan.predicted.page_in_bytes is None
    assert plan.predicted.reason is not None
    assert reason in plan.predicted.reason
    assert f"transfers not predicted: {plan.predicted.reason}" in str(plan)


def cells(table: list[str], name: str) -> list[str]:
    """The cells of the row of ``name``, without it."""
    return re.split(r"  +", next(line for line in table if line.startswith(f"{name} ")))[1:]


def test_text_has_a_row_per_segment() -> None:
    lines = str(make_example(note="adapted to activations")).splitlines()
    assert lines[0] == "plan: 12 segments, 32 pages of 1.00 KiB (32.00 KiB); captured on meta"
    assert lines[1] == "trace: 36 accesses in 16 ticks, 16.00 ms a step"
    assert "device: home of 8.00 KiB of a budget of 14.00 KiB" in lines
    assert "disk: home of 8.00 KiB" in lines
    assert any(line.startswith("predicted per step with belady: page in ") for line in lines)
    assert "note: adapted to activations" in lines
    table = lines[lines.index("") + 1 :]
    assert len(table) == 2 + 12 + 1
    assert table[0].split("  ")[0].strip() == "segment"
    # Before it: 8 pages of forward, 16 of backward, 8 of the first layer's update, 2 of its own tick.
    assert cells(table, "layers.5.state") == [
        "state",
        "host",
        "4.00 KiB",
        "4",
        "no",
        "10",
        "34.00 KiB",
        "10.00 ms",
        "30.00 KiB",
    ]
    assert cells(table, "layers.0.parameter")[:5] == ["parameter", "device", "2.00 KiB", "2", "yes"]
    assert table[-1].split()[:5] == ["total", "32.00", "KiB", "32", "3"]


def test_a_long_table_is_folded_and_adds_up() -> None:
    lines = str(make_example(num_layers=40)).splitlines()
    table = lines[lines.index("") + 3 :]
    assert len(lines) < 30
    names = [re.split(r"  +", line)[0] for line in table]
    kinds = ("parameter", "gradient", "state")
    # The wired layer and the one on disk are groups of one, which keep their names.
    assert names[:3] == [f"layers.{index}.{kind}" for index, kind in enumerate(kinds)]
    assert names[3:6] == [f"layers.*.{kind} (38)" for kind in kinds]
    assert names[6:] == [f"layers.{117 + index}.{kind}" for index, kind in enumerate(kinds)] + ["total"]
    assert table[-1].split()[:4] == ["total", "320.00", "KiB", "320"]
    letters = [
        SegmentSpec(
            index=index, name=chr(0x391 + index), kind="state", num_bytes=4, first_page=index, num_pages=1
        )
        for index in range(70)
    ]
    assert "... 10 more" in str(make_plan(letters, None, page_size=4))


def test_without_a_trace_the_plan_says_so() -> None:
    plan = make_example()
    waiting = make_plan(plan.segments, None, page_size=PAGE)
    assert waiting.way == "waiting for the first batch"
    assert waiting.trace is None
    assert "waiting for the first batch" in str(waiting)
    assert "no trace yet: next use and reuse distance are unknown" in str(waiting)
    pages = waiting.pages()
    assert len(pages) == 32
    assert set(pages["next_use_ticks"].tolist()) == set(pages["reuse_distance_bytes"].tolist()) == {-1}
    assert np.all(np.isnan(pages["next_use_seconds"]))
    with pytest.raises(ValueError, match="nothing to plot: waiting for the first batch"):
        waiting.plot("never.png")


def test_a_plan_is_immutable() -> None:
    plan = make_example()
    with pytest.raises(AttributeError):
        plan.note = "other"  # type: ignore[misc]
    with pytest.raises(ValueError, match="read-only"):
        plan.homes[0] = 1
    assert plan.wired.tolist() == [True] * 3 + [False] * 9
    assert repr(plan) == "Plan(12 segments, 32 pages, captured on meta)"


def test_seconds_handed_in_replace_those_of_the_trace() -> None:
    plan = make_example(seconds=np.full(16, 2.0))
    assert plan.trace is not None
    assert plan.trace.step_seconds == 32.0
    assert plan.pages(8, 9)["next_use_seconds"].tolist() == [2.0]


def test_curves_and_working_sets_of_a_plan() -> None:
    plan = make_example()
    assert plan.accesses is not None
    total = plan.num_pages * PAGE
    sizes = np.array([[0, total // 4], [total // 2, total]])
    by_distance = plan.miss_ratio_curve("lru", sizes)
    assert by_distance.shape == (2, 2)
    assert plan.miss_ratio_curve(Lru(), sizes).tolist() == by_distance.tolist()
    best = plan.miss_ratio_curve(Belady(), sizes)
    assert best.tolist()[0][0] == by_distance.tolist()[0][0] == 1.0
    assert best.tolist()[1][1] == by_distance.tolist()[1][1] == 0.0
    assert np.all(best[:, 1:] <= by_distance[:, 1:])
    assert best[1, 0] < by_distance[1, 0]
    # A forward tick takes the two pages of a parameter; the whole step takes everything.
    assert plan.working_set(ticks=1).bytes.tolist()[:4] == [2 * PAGE] * 4
    assert plan.working_set(seconds=1e-3).bytes.tolist() == plan.working_set(ticks=1).bytes.tolist()
    assert plan.working_set(ticks=16).max_bytes == plan.working_set(seconds=1.0).max_bytes == total


def test_what_a_curve_cannot_be_made_of() -> None:
    plan = make_example()
    with pytest.raises(ValueError, match=r"only 'lru' .*make_eviction_policy\('belady'\)"):
        plan.miss_ratio_curve("belady", [1])  # type: ignore[arg-type]
    for wrong in (Lru, None):
        with pytest.raises(TypeError, match="is no eviction policy: an object with the methods resize"):
            plan.miss_ratio_curve(wrong, [1])  # type: ignore[arg-type]
    waiting = make_plan(make_segments([1]), None, page_size=PAGE)
    with pytest.raises(ValueError, match="no trace yet: waiting for the first batch"):
        waiting.miss_ratio_curve("lru", [1])
    with pytest.raises(ValueError, match="no trace yet: waiting for the first batch"):
        waiting.working_set(ticks=1)


def test_csv_and_json_hold_every_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_view, "CHUNK_PAGES", 3)  # so that an atom of four pages takes two chunks
    segments, trace = make_training_step(2)
    segments[2] = SegmentSpec(
        index=2, name='odd "name", here', kind="state", num_bytes=9, first_page=4, num_pages=4
    )
    idle = SegmentSpec(index=6, name="idle", kind="buffer", num_bytes=5000, first_page=16, num_pages=5)
    plan = make_plan([*segments, idle], trace, page_size=PAGE, homes=[0, 1, 2, 1, 1, 1, 2])
    pages = plan.pages()
    expected = []
    for row in pages.tolist():
        known = row[4] >= 0
        expected.append(
            [row[0], row[1], plan.kinds[row[2]], TIER_NAMES[row[3]], *(row[4:] if known else [None] * 6)]
        )
    plan.to_json(tmp_path / "plan.json")
    loaded = json.loads((tmp_path / "plan.json").read_text())
    assert loaded["pages"] == expected
    assert loaded["page_columns"] == list(PAGE_DTYPE.names or ())
    assert loaded["segments"][2]["name"] == 'odd "name", here'
    assert loaded["segments"][6]["next_use_ticks"] is None
    assert loaded["predicted"]["tier_bytes"] == plan.predicted.tier_bytes
    assert loaded["page_size"] == PAGE
    plan.to_csv(tmp_path / "plan.csv")
    with (tmp_path / "plan.csv").open(newline="") as file:
        lines = list(csv.DictReader(file))
    assert [int(line["page"]) for line in lines] == pages["page"].tolist()
    assert {line["name"] for line in lines if line["segment"] == "2"} == {'odd "name", here'}
    assert [line["tier"] for line in lines] == [row[3] for row in expected]
    assert [line["reuse_distance_bytes"] for line in lines] == [
        "" if row[8] is None else str(row[8]) for row in expected
    ]
    plan.to_json(tmp_path / "short.json", pages=False)
    assert "pages" not in json.loads((tmp_path / "short.json").read_text())


@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_plot_writes_a_picture_and_leaves_the_backend_alone(tmp_path: Path, suffix: str) -> None:
    from matplotlib import pyplot

    before = pyplot.get_backend()
    pyplot.switch_backend("pdf")
    try:
        make_example().plot(tmp_path / f"plan.{suffix}")
        assert pyplot.get_backend() == "pdf"
        assert pyplot.get_fignums() == []
    finally:
        pyplot.switch_backend(before)
    head = (tmp_path / f"plan.{suffix}").read_bytes()[:5]
    assert head in (b"\x89PNG\r", b"<?xml")


def test_plot_without_prediction_or_budget(tmp_path: Path) -> None:
    make_example(policy=None, budgets={}).plot(tmp_path / "plan.png")
    assert (tmp_path / "plan.png").stat().st_size > 1000


def test_plot_without_matplotlib_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"pip install torch-pager\[plot\]"):
        make_example().plot(tmp_path / "plan.png")
    assert not (tmp_path / "plan.png").exists()


def test_map_shows_each_access_once() -> None:
    plan = make_example()
    touched, num_pages = plan_view._touched_map(plan)
    assert num_pages == 32
    assert touched.shape == (32, 16)
    counts = np.expm1(touched).round().astype(int)
    assert plan.trace is not None
    expected = np.zeros((32, 16), dtype=int)
    for row in range(len(plan.trace)):
        first = plan.segments[plan.trace.segment[row]].first_page + plan.trace.first_page[row]
        expected[first : first + plan.trace.num_pages[row], plan.trace.tick[row]] += 1
    assert counts.tolist() == expected.tolist()


def test_graph_and_critical_path_are_made_when_asked_for_and_once() -> None:
    calls: list[str] = []

    def graph() -> networkx.DiGraph:
        calls.append("graph")
        return networkx.path_graph(3, create_using=networkx.DiGraph)

    plan = make_example(graph=graph, critical_path=lambda: [0, 1, 2])
    assert calls == []
    assert plan.graph is plan.graph
    assert isinstance(plan.graph, networkx.DiGraph)
    assert calls == ["graph"]
    assert plan.critical_path() == [0, 1, 2]
    recorded = make_example(way="recorded first step")
    with pytest.raises(ValueError, match="no graph: recorded first step"):
        _ = recorded.graph
    with pytest.raises(ValueError, match="no critical path"):
        recorded.critical_path()


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"page_size": 0}, "page_size is 0 bytes"),
        ({"homes": [0, 1]}, "homes must be 12 values"),
        ({"homes": [3] * 12}, "homes must be 12 values"),
        ({"budgets": {"gpu": 5}}, r"unknown tiers \['gpu'\]"),
        ({"seconds": [1.0]}, "1 entries for 16 ticks"),
    ],
)
def test_misfits_are_refused(more: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_example(**more)


def test_segments_must_be_listed_by_index() -> None:
    segments = make_segments([1, 1])
    with pytest.raises(ValueError, match="listed by index"):
        make_plan(segments[::-1], None, page_size=4)


def test_a_model_without_pages_has_a_plan() -> None:
    plan = make_plan([], AccessTrace.from_rows([]), page_size=4, policy=Belady(), budgets={"device": 4})
    assert len(plan.pages()) == plan.num_pages == 0
    assert "plan: 0 segments" in str(plan)


def test_metadata_benchmark_runs_small() -> None:
    root = Path(__file__).resolve().parents[2]
    result = subprocess.run(
        [sys.executable, "tests/bench_metadata.py", "--layers", "1", "--write"],
        cwd=root,
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    measured = json.loads(result.stdout)
    assert measured["num_pages"] > 300_000
    assert measured["peak_rss_bytes"] > measured["pages_bytes"]
    assert measured["total_seconds"] > 0
