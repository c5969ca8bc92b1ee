"""The page that ``pager plan --out`` writes, opened in a browser: no errors, nothing fetched, and the map is there."""

from __future__ import annotations

import base64
import io
import os
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from PIL import Image, ImageColor

from pager.tools import cli
from pager.tools.plan_figures import COLOURS, TIERS
from pager.tools.plan_page import render_page
from tests.browser import Seen, open_page, why_not_here

# A small host budget, so that all three tiers are on the map.
OPTIONS = ("--update-at", "backward", "--host-budget", "30MiB", "--disk-budget", "1GiB")
# Within the map's axes, whatever is left and right of them: shares of the picture's height.
MAP_ROWS = (0.05, 0.28)
NARROW = 390  # a telephone


@pytest.fixture(scope="module", autouse=True)
def _browser() -> None:
    reason = why_not_here()
    if reason is not None and os.environ.get("PAGER_TESTS_NEED_A_BROWSER"):
        pytest.fail(f"CI opens pages in a browser. {reason}")
    elif reason is not None:
        pytest.skip(reason)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a plan."""
    folder = tmp_path_factory.mktemp("plan")
    assert cli.main(["plan", "small", "--out", str(folder), *OPTIONS]) == 0
    return folder


@pytest.fixture(scope="module")
def seen(written: Path) -> Seen:
    return open_page(written / "plan.html")


def shares_of_tiers(picture: npt.NDArray[np.uint8]) -> dict[str, float]:
    """Tier -> share of its colour among the pixels of the map. ``picture``: ``(height, width, 3)``."""
    first, last = (round(share * len(picture)) for share in MAP_ROWS)
    pixels = picture[first:last].astype(np.int16)
    return {
        tier: float((np.abs(pixels - ImageColor.getrgb(colour)).max(axis=-1) <= 2).mean())
        for tier, colour in zip(TIERS, COLOURS, strict=True)
    }


def thumbnail(picture: npt.NDArray[np.uint8]) -> npt.NDArray[np.int16]:
    return np.asarray(Image.fromarray(picture).resize((54, 82), Image.Resampling.BOX)).astype(np.int16)


def check_shows_the_map(seen: Seen) -> None:
    (picture,) = (picture for picture in seen.pictures if picture.id == "map")
    assert min(picture.box[2:]) > 100, f"the map is {picture.box[2:]} pixels"
    shares = shares_of_tiers(seen.part(picture))
    assert min(shares.values()) > 0.02, f"shares of the map by tier: {shares}"


def changed(written: Path, folder: Path, old: str, new: str) -> Path:
    """A copy of the page with a fault."""
    text = (written / "plan.html").read_text(encoding="utf-8")
    assert text.count(old) == 1
    page = folder / "broken.html"
    page.write_text(text.replace(old, new), encoding="utf-8")
    return page


def test_the_page_opens_without_errors_and_asks_for_nothing(seen: Seen) -> None:
    assert seen.faults == []
    assert seen.scripts == 0


def test_the_page_shows_the_map_with_every_tier(seen: Seen, written: Path) -> None:
    check_shows_the_map(seen)
    (picture,) = seen.pictures
    with Image.open(written / "plan.png") as file:
        assert picture.natural == file.size
        drawn = np.asarray(file.convert("RGB"))
    shown = seen.part(picture)
    assert shares_of_tiers(shown) == pytest.approx(shares_of_tiers(drawn), abs=0.02)
    # Seen from afar, since the browser scales lines and letters in its own way.
    assert np.abs(thumbnail(shown) - thumbnail(drawn)).max() < 25  # of 255


def test_what_the_plan_says_can_be_read(seen: Seen) -> None:
    assert seen.title == "small within 18.93 MiB"
    for text in ("Far beyond 18.93 MiB", "Figures", "all of the state", "blocks.*.gate.weight (6)"):
        assert text in seen.text
    assert "predicted per step with belady" in seen.text


def test_the_page_fits_a_narrow_window(written: Path) -> None:
    """Only tables may be wider, and can be scrolled to their ends."""
    seen = open_page(written / "plan.html", width=NARROW)
    assert seen.faults == []
    assert seen.scroll_width == NARROW
    assert seen.out_of_reach == (0, 0, 0)
    check_shows_the_map(seen)


def test_names_that_look_like_html_are_shown_as_they_are(tmp_path: Path) -> None:
    name = "<script>throw 1</script>\"'><img src=x onerror=alert(1)>&amp;</pre></table></title>"
    page = tmp_path / "page.html"
    text = render_page(
        title=name, verdict=name, figures=[(name, name)], table=name, png=None, sections=[(name, [name])]
    )
    page.write_text(text, encoding="utf-8")
    seen = open_page(page)
    assert seen.faults == []
    assert (seen.scripts, seen.pictures, seen.title) == (0, (), name)
    assert seen.text.count(name) == 7


# -- controls: what is wrong is seen ---------------------------------------------------------------------


def test_errors_and_requests_are_seen(written: Path, tmp_path: Path) -> None:
    wrong = """<script>null.map</script><script>Promise.reject(Error("late"))</script>
    <link rel="stylesheet" href="https://pages.invalid/style.css"><img src="other.png">
    <img src="data:image/png;base64,AA"></body>"""
    seen = open_page(changed(written, tmp_path, "</body>", wrong))
    faults = "\n".join(seen.faults)
    assert "console: ErrorMessageLevel: Uncaught TypeError" in faults
    assert "Uncaught (in promise) Error: late" in faults
    assert "asked for https://pages.invalid/style.css" in faults
    assert f"asked for file://{tmp_path}/other.png" in faults
    assert 'did not load: <img src="data:image/png;base64,AA">' in faults


def test_a_page_too_wide_for_its_window_is_seen(written: Path, tmp_path: Path) -> None:
    page = changed(written, tmp_path, "img { max-width: 100%; height: auto; }", "pre { overflow: visible; }")
    assert open_page(page, width=NARROW).scroll_width > NARROW


@pytest.mark.parametrize("style", ["opacity: 0", "display: none"])
def test_a_map_that_is_not_shown_is_seen(written: Path, tmp_path: Path, style: str) -> None:
    seen = open_page(changed(written, tmp_path, "</style>", f"#map {{ {style} }}</style>"))
    assert seen.faults == []
    with pytest.raises(AssertionError, match="the map"):
        check_shows_the_map(seen)


def test_an_empty_picture_is_seen(written: Path, tmp_path: Path) -> None:
    old = base64.b64encode((written / "plan.png").read_bytes()).decode("ascii")
    empty = io.BytesIO()
    Image.new("RGB", (1210, 1845), "white").save(empty, "PNG")
    seen = open_page(changed(written, tmp_path, old, base64.b64encode(empty.getvalue()).decode("ascii")))
    assert seen.faults == []
    with pytest.raises(AssertionError, match="the map"):
        check_shows_the_map(seen)
