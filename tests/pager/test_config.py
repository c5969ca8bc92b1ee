"""Knobs: what is accepted, what is refused and in which words."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from pager import config
from pager.config import Checks, Config, resolve_budget
from pager.errors import ConfigError
from pager.policies.lru import Lru


@pytest.mark.parametrize(
    ("knobs", "error", "message"),
    [
        (
            {"page_size": 100_000},
            ConfigError,
            r"page_size is 100000 .* power of two from 16.00 KiB to 4.00 MiB",
        ),
        ({"page_size": "8KiB"}, ConfigError, "power of two"),
        ({"page_size": "8MiB"}, ConfigError, "power of two"),
        ({"page_size": 0}, ConfigError, "power of two"),
        ({"page_size": "big"}, ConfigError, "page_size is 'big'"),
        ({"page_size": 1.5}, TypeError, "page_size is 1.5"),
        ({"prefetch_distance": -1}, ConfigError, "cannot be negative"),
        ({"prefetch_distance": True}, TypeError, "prefetch_distance is True"),
        ({"prefetch_distance": 1.0}, TypeError, "number of extents"),
        ({"prefetch_distance": "far"}, TypeError, '"auto"'),
        ({"eviction": "fifo"}, ConfigError, "'belady', 'clock', 'lru'"),
        ({"eviction": Lru}, TypeError, "pass an object of it"),
        ({"eviction": object()}, TypeError, "lacks"),
        ({"device_budget": 0}, ConfigError, "device_budget is 0 bytes"),
        ({"device_budget": 1.5}, ConfigError, "fraction must be above 0 and at most 1"),
        ({"device_budget": 0.0}, ConfigError, "fraction must be above 0"),
        ({"device_budget": -5}, ConfigError, "cannot be negative"),
        ({"device_budget": "0.9"}, ConfigError, "device_budget is '0.9', a decimal without a unit; .*float"),
        ({"host_budget": "1.5"}, ConfigError, "host_budget is '1.5', a decimal without a unit"),
        ({"device": "gpu"}, ConfigError, "device is 'gpu'; expected \"auto\""),
        ({"device": "cuda:x"}, ConfigError, "cuda:<number>"),
        ({"device": 0}, TypeError, "device is 0; expected text"),
        ({"disk": 5}, TypeError, "disk is 5; expected the path of a folder"),
        ({"disk": ""}, ConfigError, "disk is empty text"),
        ({"host_budget": None}, TypeError, "host_budget is None"),
        ({"host_budget": "x"}, ConfigError, "host_budget is 'x'"),
        ({"device_headroom": "x"}, ConfigError, "device_headroom is 'x'"),
        ({"disk_budget": "1GiB"}, ConfigError, "disk is None"),
        ({"disk": ".", "disk_budget": "x"}, ConfigError, "disk_budget is 'x'"),
        ({"disk_compression": "zstd"}, ConfigError, "disk_compression is set but disk is None"),
        ({"disk": ".", "disk_compression": True}, TypeError, 'disk_compression is True; expected "zstd"'),
        ({"disk": ".", "disk_compression": 1.5}, TypeError, "disk_compression is 1.5"),
        ({"disk": ".", "disk_compression": "lz4"}, ConfigError, "disk_compression is 'lz4'"),
        ({"disk": ".", "disk_compression": 0}, ConfigError, "a level from 1 to 22"),
        ({"disk": ".", "disk_compression": 23}, ConfigError, "a level from 1 to 22"),
        ({"update_on": "gpu"}, ConfigError, 'expected "device", "auto" or "cpu"'),
        ({"update_at": "later"}, ConfigError, 'expected "step" or "backward"'),
        ({"master": "bfloat16"}, ConfigError, "master is 'bfloat16'; expected \"float32\" or None"),
        ({"master": True}, ConfigError, "master is True; expected"),
        ({"example_inputs": 3}, TypeError, "tuple of positional"),
        ({"init": 3}, TypeError, "callable taking a module"),
        ({"checks": 5}, TypeError, "checks is a int"),
        ({"pagesize": "64KiB"}, TypeError, "unknown knob pagesize; known: page_size, "),
    ],
)
def test_what_cannot_work_is_refused_at_once(
    knobs: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        Config().replace(**knobs)


@pytest.mark.parametrize(
    "knobs",
    [
        {"page_size": "16KiB"},
        {"page_size": 4 * 2**20},
        {"prefetch_distance": 0},
        {"prefetch_distance": "auto"},
        {"eviction": "clock"},
        {"eviction": Lru()},
        {"device_budget": None},
        {"device_budget": "24GiB"},
        {"device_budget": 1.0},
        {"device_headroom": "1GiB"},
        {"device": "cuda:1"},
        {"device": "cpu"},
        {"host_budget": 2**30},
        {"disk": Path("."), "disk_budget": "1GiB"},
        {"example_inputs": (1,)},
        {"example_inputs": {"x": 1}},
        {"init": print},
    ],
)
def test_what_can_work_is_kept_as_it_was_given(knobs: dict[str, Any]) -> None:
    config = Config(**knobs)
    assert {name: getattr(config, name) for name in knobs} == knobs


def test_a_copy_with_other_knobs_leaves_the_first_alone() -> None:
    config = Config(page_size="64KiB")
    other = config.replace(prefetch_distance=8)
    assert (config.prefetch_distance, other.prefetch_distance) == (4, 8)
    assert other.page_bytes == 65536
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.page_size = "1MiB"  # type: ignore[misc]


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        ({"streams": "slow"}, 'expected "early" or "late"'),
        ({"daemon": "none"}, 'expected "thread" or "inline"'),
    ],
)
def test_checks_are_checked(knobs: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Checks(**knobs)


@pytest.mark.parametrize(
    ("value", "expected"), [(0.25, 250), (1.0, 1000), (400, 400), ("2KiB", 2048), (5000, 5000)]
)
def test_a_float_is_a_share_and_the_rest_are_bytes(value: int | float | str, expected: int) -> None:
    assert resolve_budget(value, 1000, name="device_budget") == expected


# -- files -----------------------------------------------------------------------------------------------------


def write(folder: Path, text: str) -> Path:
    """A YAML file."""
    path = folder / "pager.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def test_a_file_of_knobs(tmp_path: Path) -> None:
    path = write(
        tmp_path, "page_size: 64KiB\ndevice_budget: 0.5\nprefetch_distance: auto\nchecks:\n  poison: true\n"
    )
    expected = Config(
        page_size="64KiB", device_budget=0.5, prefetch_distance="auto", checks=Checks(poison=True)
    )
    assert Config.from_yaml(path) == expected


def test_an_empty_file_is_the_defaults(tmp_path: Path) -> None:
    assert Config.from_yaml(write(tmp_path, "")) == Config()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[1, 2]", "expected a mapping of knobs, found a list"),
        ("a: b: c", "not YAML"),
        ("pagesize: 1", "unknown knob pagesize"),
        ("page_size: 5", "power of two"),
        ("checks:\n  streams: slow", 'expected "early" or "late"'),
        ("checks:\n  colour: red", "colour"),
        ("checks: 5", "checks"),
    ],
)
def test_a_wrong_file_is_named(tmp_path: Path, text: str, message: str) -> None:
    path = write(tmp_path, text)
    with pytest.raises(ConfigError, match=f"pager.yaml: .*{message}"):
        Config.from_yaml(path)


def test_a_binary_file_is_not_yaml(tmp_path: Path) -> None:
    path = tmp_path / "pager.yaml"
    path.write_bytes(b"\xff\xfe\x00page_size")
    with pytest.raises(ConfigError, match="pager.yaml: not YAML"):
        Config.from_yaml(path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.yaml: cannot be read: No such file"):
        Config.from_yaml(tmp_path / "none.yaml")
    with pytest.raises(ConfigError, match="cannot be read: Is a directory"):
        Config.from_yaml(tmp_path)


@pytest.mark.parametrize(("given", "level"), [(None, None), ("zstd", 1), (1, 1), (22, 22)])
def test_the_level_of_compression(given: Any, level: int | None) -> None:
    assert Config(disk=".", disk_compression=given).compression_level == level


def test_compression_without_its_package_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config, "find_spec", lambda name: None)
    message = r"disk_compression='zstd' needs the package zstandard.*pip install \"torch-pager\[zstd\]\""
    with pytest.raises(ConfigError, match=message):
        Config(disk=".", disk_compression="zstd")
    assert Config(disk=".").disk_compression is None
