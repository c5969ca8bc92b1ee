"""The log of steps: what is written is read, while it is written and after."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from pager.statistics import Statistics
from pager.tools.errors import InputError
from pager.tools.step_log import LOG_NAME, SAMPLES_PER_STEP, StepLog, StepReader, thin


def write(
    log: StepLog, step: int, history: list[tuple[float, int]] | None = None, loss: float = 2.5
) -> str | None:
    statistics = Statistics(hits=10 * step, num_steps=step, stall_seconds=0.5)
    return log.write(step, loss=loss, seconds=0.25, statistics=statistics, history=history or [])


def test_steps_are_read_as_they_come(tmp_path: Path) -> None:
    reader = StepReader(tmp_path)
    assert reader.read() == []
    log = StepLog(tmp_path)
    history = [(0.1, 5), (0.2, 7)]
    write(log, 1, history)
    (line,) = reader.read()
    assert (line.step, line.seconds, line.loss) == (1, 0.25, 2.5)
    assert line.statistics == Statistics(hits=10, num_steps=1, stall_seconds=0.5)
    assert line.resident == ((0.1, 5), (0.2, 7))
    assert reader.read() == []
    history += [(0.3, 9)]
    write(log, 2, history, loss=math.nan)
    write(log, 3, history)
    second, third = reader.read()
    assert (second.loss, second.resident, third.resident) == (None, ((0.3, 9),), ())
    log.close()
    log.close()


def test_a_half_written_line_waits_for_its_end(tmp_path: Path) -> None:
    log = StepLog(tmp_path)
    write(log, 1)
    log.close()
    whole = (tmp_path / LOG_NAME).read_text()
    (tmp_path / LOG_NAME).write_text(whole + whole[:20])
    reader = StepReader(tmp_path)
    assert [line.step for line in reader.read()] == [1]
    (tmp_path / LOG_NAME).write_text(whole * 2)
    assert [line.step for line in reader.read()] == [1]
    assert [line.step for line in StepReader(tmp_path).read()] == [1, 1]


def test_a_reader_knows_whether_the_writer_lives(tmp_path: Path) -> None:
    reader = StepReader(tmp_path)
    assert reader.is_being_written() is None
    log = StepLog(tmp_path)
    assert reader.is_being_written() is True
    log.close()
    assert reader.is_being_written() is False


def test_a_counter_of_another_version_is_left_out(tmp_path: Path) -> None:
    line: dict[str, Any] = {
        "step": 1,
        "seconds": 1,
        "loss": 1,
        "resident": [],
        "statistics": {"new": 1, "hits": 2},
    }
    (tmp_path / LOG_NAME).write_text(json.dumps(line) + "\n")
    assert StepReader(tmp_path).read()[0].statistics == Statistics(hits=2)


@pytest.mark.parametrize("text", ["not json", "[]", '{"step": 1}', '{"step": "x"}', "\xff"])
def test_what_is_no_log_is_told_with_its_line(text: str, tmp_path: Path) -> None:
    log = StepLog(tmp_path)
    write(log, 1)
    log.close()
    with (tmp_path / LOG_NAME).open("a", encoding="latin-1") as file:
        file.write(text + "\n")
    with pytest.raises(InputError, match=r"steps.jsonl, line 2: not a step of `pager train`"):
        StepReader(tmp_path).read()


def test_a_full_disk_ends_the_log_and_not_the_training(tmp_path: Path) -> None:
    log = StepLog(tmp_path)

    class Full:
        def write(self, text: str) -> None:
            raise OSError(28, "No space left on device")

        def close(self) -> None:
            raise OSError(28, "No space left on device")

    log._file.close()
    log._file = Full()
    message = write(log, 1)
    assert message == f"no more lines in {tmp_path / LOG_NAME}: No space left on device"
    assert write(log, 2) is None


@pytest.mark.parametrize(("count", "most"), [(0, 4), (4, 4), (5, 4), (1000, 64), (1000, 2)])
def test_thinned_samples_keep_their_order_and_extremes(count: int, most: int) -> None:
    samples = [(float(place), (place * 37) % 101) for place in range(count)]
    kept = thin(samples, most)
    assert len(kept) <= most
    assert kept == [sample for sample in samples if sample in kept]
    sizes = [size for _, size in samples]
    assert {size for _, size in kept} >= ({min(sizes), max(sizes)} if sizes else set())
    assert len(kept) == count or count > most


def test_a_step_with_many_moves_is_thinned(tmp_path: Path) -> None:
    log = StepLog(tmp_path)
    write(log, 1, [(place / 1000, place % 7) for place in range(1000)])
    log.close()
    (line,) = StepReader(tmp_path).read()
    assert len(line.resident) <= SAMPLES_PER_STEP
    assert {size for _, size in line.resident} >= {0, 6}
