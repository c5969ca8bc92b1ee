"""``pager plan`` and ``pager estimate``: what they print and write, and what they refuse."""

from __future__ import annotations

import base64
import io
import itertools
import json
import os
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageColor

from pager.tools import cli
from pager.tools.captured import capture_model
from pager.tools.estimate import memory_of
from pager.tools.machine import Machine
from pager.tools.model_source import load_model
from pager.tools.plan import make_plan_of
from pager.tools.plan_figures import DEVICE, HOST, NOWHERE, page_map
from pager.tools.plan_locality import locality_of
from pager.tools.plan_page import render_page
from pager.tools.prediction import Prediction, Wanted, predict
from pager.tools.verdict import tokens_to_hide, verdict_of
from tests.bench_simulator import MACHINE, captured

GIB = 2**30


def run(*argv: str) -> int:
    return cli.main([*argv])


def of_7b(*, keep_tasks: bool = False, **knobs: Any) -> Prediction:
    values: dict[str, Any] = {"budget_bytes": 24 * GIB, "host_bytes": 125 * GIB, "update_at": "backward"}
    return predict(captured("7b", 1), MACHINE, Wanted(**(values | knobs)), keep_tasks=keep_tasks)


# -- plan --------------------------------------------------------------------------------------------


def test_plan_prints_the_table_the_figures_and_a_verdict(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("plan", "small", "--update-at", "backward") == 0
    out = capsys.readouterr().out
    for text in (
        "blocks.*.gate.weight (6)",
        "predicted per step with belady",
        "least possible",
        "Far beyond 18.93 MiB",
    ):
        assert text in out
    assert re.search(r"^  1/2 of the state +40.00 MiB +29.0% +64.6% +62.3%$", out, re.MULTILINE)
    assert re.search(r"^  all of the state +80.00 MiB +0.0% +0.0% +0.0%$", out, re.MULTILINE)
    assert re.search(r"^  10% of the step, 19 ticks +\S+ MiB +\S+ MiB$", out, re.MULTILINE)


def test_plan_as_json_is_one_object(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("plan", "small", "--json", "--batch", "4", "--seq", "64", "--compute-seconds", "2.5") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["tokens"] == 256
    assert found["forward_seconds"] + found["backward_seconds"] == pytest.approx(2.5)
    assert found["step"]["seconds"] >= 2.5
    assert found["verdict"] == "just over"
    assert found["num_segments"] == 4 * (6 * 7 + 2)
    ratios, windows = found["miss_ratio"], found["working_set"]
    assert set(ratios["share_of_state"]) == {0.125, 0.25, 0.5, 0.75, 1.0, None}
    arena = ratios["device_bytes"][ratios["share_of_state"].index(None)]
    assert arena == found["arena_bytes"]
    assert ratios["device_bytes"] == sorted(ratios["device_bytes"])
    for name in ("belady", "clock", "lru"):
        assert (len(ratios[name]), ratios[name][-1]) == (6, 0.0)
    assert all(best <= other for best, other in zip(ratios["belady"], ratios["lru"], strict=True))
    assert windows["ticks"] == [3, 29]  # of some 290, the update's among them
    assert windows["max_bytes"][0] < windows["max_bytes"][1]
    assert all(mean <= most for mean, most in zip(windows["mean_bytes"], windows["max_bytes"], strict=True))


class Page(HTMLParser):
    """Tags that are open, and pictures."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.pictures: list[str] = []
        self.links: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        self.links += [value for name, value in values.items() if name in ("src", "href") and value]
        if tag == "img":
            self.pictures.append(values["src"] or "")
        if tag not in ("img", "meta", "link", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def colours_in(png: bytes) -> int:
    return len(np.unique(np.asarray(Image.open(io.BytesIO(png)).convert("RGB")).reshape(-1, 3), axis=0))


def columns_with(png: bytes, colour: str) -> int:
    """How many of the picture's columns of pixels hold a colour."""
    pixels = np.asarray(Image.open(io.BytesIO(png)).convert("RGB"))
    return int((pixels == ImageColor.getrgb(colour)).all(axis=-1).any(axis=0).sum())


def test_plan_writes_a_page_that_needs_nothing_else(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    knobs = ("--update-at", "backward", "--update-on", "auto", "--pages", "csv")
    assert run("plan", "small", "--out", str(tmp_path / "new"), *knobs) == 0
    folder = tmp_path / "new"
    assert sorted(path.name for path in folder.iterdir()) == [
        *("pages.csv", "plan.html", "plan.json", "plan.png", "trace.json")
    ]
    text = (folder / "plan.html").read_text()
    page = Page()
    page.feed(text)
    assert page.open == []
    assert all(link.startswith("data:") for link in page.links)
    (picture,) = page.pictures
    png = base64.b64decode(picture.partition("base64,")[2])
    assert png == (folder / "plan.png").read_bytes()
    assert colours_in(png) > 20
    assert columns_with(png, "#4d9221") > 50  # of computation, each bar of which is narrower than a pixel
    assert "Far beyond" in text
    assert "<h2>Miss ratio by device memory" in text
    assert "all of the state" in text
    assert json.loads((folder / "trace.json").read_text())["traceEvents"]
    plan = json.loads((folder / "plan.json").read_text())
    assert len((folder / "pages.csv").read_text().splitlines()) == plan["num_pages"] + 1


def test_a_picture_without_a_step_shows_what_there_is(tmp_path: Path) -> None:
    """Everything fits, so nothing is simulated; distances, curves and working sets are there all the same."""
    assert run("plan", "tiny", "--device-budget", "40GiB", "--out", str(tmp_path)) == 0
    with Image.open(tmp_path / "plan.png") as picture:
        width, height = picture.size
    assert height < width
    assert colours_in((tmp_path / "plan.png").read_bytes()) > 20


def test_curves_of_a_picture_hold_the_rows_of_the_table() -> None:
    plan = make_plan_of(captured("7b", 1), of_7b())
    few, many = (locality_of(plan, 10 * GIB, fine=fine) for fine in (False, True))
    assert (len(few.sizes), len(many.sizes)) == (6, 17)
    assert few.as_dict() == many.as_dict()
    assert few.sections() == many.sections()


def test_names_of_the_user_are_escaped_in_the_page() -> None:
    page = render_page(
        title="<b>",
        verdict="a & b",
        figures=[("<x>", "<script>alert(1)</script>")],
        sections=[("<b>", ["<script>"])],
        table="<i>",
        png=None,
    )
    assert "<script" not in page
    assert "<b>" not in page
    assert "a &amp; b" in page
    assert "<img" not in page


def test_the_map_shows_where_pages_are_over_the_step() -> None:
    prediction = of_7b(keep_tasks=True)
    assert prediction.placement is not None
    assert prediction.step is not None
    codes, starts = page_map(captured("7b", 1), prediction.placement, prediction.step, num_lines=280)
    weights, gradients, states = (codes[low:high] for low, high in itertools.pairwise(starts))
    assert np.all(weights == DEVICE)  # all stay
    # With updates in backward they have no home; some wait on the device for its end.
    elements, is_late = captured("7b", 1).step.num_elements, prediction.placement.late
    seen = np.any(gradients != NOWHERE, axis=1)
    assert seen.mean() == pytest.approx(elements[is_late].sum() / elements.sum(), abs=0.05)
    assert 0 < seen.mean() < 0.1
    assert set(np.unique(gradients)) <= {NOWHERE, DEVICE}
    assert set(np.unique(states)) == {DEVICE, HOST}
    # At any time a few slots and what stays are there; over the step all of it was, some time or other.
    kept = captured("7b", 1).step.num_elements[prediction.placement.keeps_states].sum()
    share = kept / captured("7b", 1).step.num_parameters
    there = (states == DEVICE).mean(axis=0)
    assert share <= there.max() < share + 0.1
    assert np.all((states == DEVICE).any(axis=1))


def test_a_page_map_of_what_streams_moves_through_the_weights() -> None:
    prediction = of_7b(keep_tasks=True, budget_bytes=8 * GIB, update_on="auto", weights="belady")
    assert prediction.placement is not None
    assert prediction.step is not None
    codes, starts = page_map(captured("7b", 1), prediction.placement, prediction.step)
    weights = codes[starts[0] : starts[1]] == DEVICE
    streams = ~weights.all(axis=1)
    assert 0.3 < streams.mean() < 0.95
    assert weights[streams].any(axis=1).all()  # but each is there at some time


# -- estimate ------------------------------------------------------------------------------------------


def test_estimate_prints_memory_budgets_and_a_verdict(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("estimate", "3b", "--update-at", "backward", "--update-on", "auto", "--batch", "8") == 0
    out = capsys.readouterr().out
    for kind in ("parameters", "gradients", "master", "moments", "activations", "workspace"):
        assert re.search(rf"^  {kind} ", out, re.MULTILINE)
    assert re.search(r"16.00 GiB +0\.9\d+ +1\d,\d{3} ", out)
    assert re.search(r"120.00 GiB .* fits", out)
    assert "Just over" in out


def test_estimate_as_json_has_a_row_for_each_budget(capsys: pytest.CaptureFixture[str]) -> None:
    budgets = ("--device-budget", "12GiB", "--device-budget", "0.2")
    assert run("estimate", "3b", "--json", *budgets) == 0
    found = json.loads(capsys.readouterr().out)
    rows = found["budgets"]
    assert [row["budget_bytes"] for row in rows] == [12 * GIB, int(0.2 * Machine().device_bytes)]
    assert rows[0]["seconds"] > rows[1]["seconds"]
    assert all(row["disk_write_bytes_per_day"] == 0 for row in rows)
    assert found["memory"]["moments"]["plain"] == 8 * found["num_parameters"]


def test_the_disk_is_written_so_much_a_day(capsys: pytest.CaptureFixture[str]) -> None:
    knobs = ("--device-budget", "12GiB", "--host-budget", "20GiB", "--disk-budget", "1TiB")
    assert run("estimate", "3b", "--json", "--update-at", "backward", *knobs) == 0
    (row,) = json.loads(capsys.readouterr().out)["budgets"]
    assert row["disk_bytes"] > 10 * GIB
    written = row["disk_write_bytes_per_day"] * row["seconds"] / 86400
    assert written == pytest.approx(row["disk_bytes"], rel=0.01)  # states, once a step


def test_memory_adds_up() -> None:
    model, prediction = captured("7b", 1), of_7b(update_on="auto")
    assert prediction.step is not None
    table = memory_of(model, prediction)
    assert sum(row["device"] for row in table.values()) == prediction.wanted.budget_bytes
    assert sum(row["host"] for row in table.values()) == prediction.step.tier_bytes["host"]
    assert sum(row["plain"] for row in table.values()) == 16 * model.num_parameters + model.activation_bytes


# -- verdicts ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("knobs", "kind", "text"),
    [
        ({"budget_bytes": 110 * GIB}, "fits", "Do not use pager"),
        ({"compute_seconds": 1.7}, "just over", "paging pays most"),
        ({"compute_seconds": 0.3}, "far beyond", "more tokens a step"),
        ({"compute_seconds": 0.3, "update_at": "step"}, "far beyond", 'update_at="backward"'),
        ({"host_bytes": GIB}, "does not fit", "bytes are missing"),
        ({"host_bytes": 40 * GIB, "disk_bytes": 200 * GIB}, "far beyond", "more host memory, since the disk"),
    ],
)
def test_the_verdict_is_in_words(knobs: dict[str, Any], kind: str, text: str) -> None:
    prediction = of_7b(**knobs)
    step = captured("7b", 1).step
    if "compute_seconds" in knobs:
        step = step.scaled_to(knobs["compute_seconds"])
    verdict = verdict_of(prediction, step)
    assert verdict.kind == kind
    assert text in verdict.text


def test_tokens_that_hide_the_copies_do() -> None:
    """With so many tokens in a step the step is bound by its computation."""
    step = captured("7b", 1).step.scaled_to(0.3)
    need = tokens_to_hide(of_7b(compute_seconds=0.3), step)
    factor = max(need.values()) / step.tokens
    assert factor > 2
    found = of_7b(compute_seconds=0.3 * factor).step
    assert found is not None
    assert found.seconds < 1.2 * found.compute_seconds
    half = of_7b(compute_seconds=0.3 * factor / 2).step
    assert half is not None
    assert half.seconds > 1.4 * half.compute_seconds


# -- bad input -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["plan", "estimate"])
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("7bb",), "unknown model '7bb'; did you mean '7b'"),
        (("tiny", "--batch", "0"), "--batch is 0; expected at least 1"),
        (("tiny", "--seq", "1"), "--seq is 1; expected at least 2"),
        (("tiny", "--device-budget", "large"), "--device-budget is 'large'"),
        (("tiny", "--host-budget", "1.5"), "--host-budget is '1.5'"),
        (("tiny", "--compute-seconds", "-1"), "--compute-seconds is -1.0"),
        (("tiny", "--page-size", "100KiB"), "page_size is '100KiB'"),
        (("tiny", "--machine", "none.json"), "--machine none.json: cannot be read"),
    ],
)
def test_wrong_options_are_one_line_and_a_code(
    command: str, options: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(command, *options) == 2
    captured_text = capsys.readouterr()
    assert message in captured_text.err
    assert captured_text.err.count("\n") == 1
    assert captured_text.out == ""


def test_a_budget_in_which_nothing_runs_is_a_failure_that_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("plan", "small", "--device-budget", "2MiB") == 1
    printed = capsys.readouterr().out
    assert "Too tight to predict: of a budget of 2.00 MiB" in printed
    assert "It may train, slowly" in printed  # and does: the update then goes through the arena, whole
    assert run("estimate", "small", "--device-budget", "300KiB", "--device-budget", "299KiB") == 1
    assert "Does not fit: of a budget of 299.00 KiB" in capsys.readouterr().out


def test_a_folder_that_cannot_be_written_is_refused_before_any_work(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "file"
    file.write_text("")
    assert run("plan", "tiny", "--out", str(file)) == 2
    assert f"--out {file}: cannot write there" in capsys.readouterr().err
    folder = tmp_path / "readonly"
    folder.mkdir()
    folder.chmod(0o500)
    if not os.access(folder, os.W_OK):  # the superuser may write everywhere
        assert run("plan", "tiny", "--out", str(folder)) == 2
    folder.chmod(0o700)


def test_what_the_model_says_comes_before_our_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "mine.py"
    path.write_text("def make():\n    raise RuntimeError('no such size')\n")
    assert run("plan", f"{path}:make") == 2
    err = capsys.readouterr().err
    assert err.startswith("Traceback")
    assert err.endswith(f"pager: {path}:make raised RuntimeError: no such size\n")


def test_small_models_are_planned_for_as_on_the_simulated_device() -> None:
    tiny = capture_model(load_model("tiny", batch=2, seq=64), MACHINE, page_size=2**17)
    wanted = Wanted(budget_bytes=4 * 2**20, host_bytes=GIB, simulated=True)
    assert predict(tiny, MACHINE, wanted).step is not None
    assert "nothing is left" in (
        predict(tiny, MACHINE, Wanted(budget_bytes=4 * 2**20, host_bytes=GIB)).reason or ""
    )
