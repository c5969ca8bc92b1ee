"""``pager doctor`` on a real GPU: what it says of page-locking is what copies show."""

from __future__ import annotations

import json

import pytest

from pager.tools.cli import main


@pytest.mark.gpu
def test_the_lines_of_the_gpu_have_their_figures(capsys: pytest.CaptureFixture[str]) -> None:
    main(["doctor", "--json"])
    checks = {check["name"]: check for check in json.loads(capsys.readouterr().out)["checks"]}
    assert checks["GPU"]["verdict"] == "ok"
    assert checks["page-locking, GPU"]["verdict"] == "ok", checks["page-locking, GPU"]["found"]
    assert checks["page-locking, GPU"]["values"]["is_known"] is True
    pageable, registered = (checks[f"link, {kind}"]["values"] for kind in ("pageable", "registered"))
    assert registered["in_bytes_per_second"] > pageable["in_bytes_per_second"] > 0
    assert checks["link, both ways"]["values"]["each_bytes_per_second"] > 0
