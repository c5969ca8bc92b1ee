"""The machine that predictions are made for, as a file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pager.tools.errors import InputError
from pager.tools.machine import Machine, load_machine


def written(tmp_path: Path, content: Any) -> str:
    path = tmp_path / "mine.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return str(path)


def test_without_a_file_it_is_the_measured_one() -> None:
    assert load_machine(None) == Machine()


def test_a_file_changes_what_it_names(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        {"host_bytes": "1TiB", "link_in_bytes_per_second": 25e9, "flops_per_second": 1e14, "disk_bytes": 5},
    )
    machine = load_machine(path)
    assert machine.name == "mine"
    assert machine.host_bytes == 2**40
    assert machine.disk_bytes == 5
    assert machine.rates.link_in_bytes_per_second == 25e9
    assert machine.rates.link_out_bytes_per_second == Machine().rates.link_out_bytes_per_second
    assert machine.flops_per_second == 1e14


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "not valid JSON"),
        ([1], "holds list; expected a mapping"),
        ({"link_in_bytes": 1}, "unknown field 'link_in_bytes'; did you mean .*'link_in_bytes_per_second'"),
        ({"flops_per_second": "fast"}, "flops_per_second is 'fast'; expected a number above 0"),
        ({"cpu_bytes_per_parameter": 0}, "cpu_bytes_per_parameter is 0"),
        ({"cpu_threads": 2.5}, "cpu_threads is 2.5; expected a whole number above 0"),
        ({"cpu_threads": 0}, "cpu_threads is 0"),
        ({"host_bytes": "much"}, "host_bytes is 'much'"),
        ({"host_bytes": 1.5}, "host_bytes is 1.5"),
    ],
)
def test_a_wrong_file_is_refused_by_field(content: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=message):
        load_machine(written(tmp_path, content))


def test_a_missing_file_is_refused() -> None:
    with pytest.raises(InputError, match="--machine nowhere.json: cannot be read"):
        load_machine("nowhere.json")
