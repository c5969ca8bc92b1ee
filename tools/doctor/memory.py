"""What host memory carries by the number of threads: updates on the CPU and both directions of the link share it."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator, Mapping

import numpy as np

from pager.tools.doctor.result import CheckResult

__all__ = ["check_dram", "measure_dram", "thread_counts"]

# Per thread, beyond the caches that are its own; all threads together beyond those that are shared.
BLOCK_BYTES = 2**26
MOST_BYTES = 2**32
SECONDS_EACH = 0.15

# What one channel of DDR4-2666 carries.
ONE_CHANNEL = 21.3e9
# From one thread to eight a machine with several channels gains 2 to 6 times.
ENOUGH_GAIN = 1.3
THREADS_FOR_GAIN = 4


def thread_counts(num_cores: int) -> Iterator[int]:
    """1, 2, 4, ... and ``num_cores`` itself."""
    count = 1
    while count < num_cores:
        yield count
        count *= 2
    yield num_cores


def measure_dram(num_threads: int, *, block_bytes: int = BLOCK_BYTES, seconds: float = SECONDS_EACH) -> float:
    """Bytes per second, read and written, of so many threads that copy blocks for about ``seconds``."""
    size = max(min(block_bytes, MOST_BYTES // (2 * num_threads)), 2**16)
    begin = threading.Barrier(num_threads + 1)
    moved = [0] * num_threads
    failed: list[BaseException] = []

    def work(index: int) -> None:
        try:
            # Touched by the thread that copies them: on several nodes memory is where it was first written.
            source, target = np.ones(size, np.uint8), np.ones(size, np.uint8)
        except MemoryError as error:
            failed.append(error)
            begin.abort()
            return
        try:
            begin.wait()
        except threading.BrokenBarrierError:
            return
        deadline = time.perf_counter() + seconds
        while not moved[index] or time.perf_counter() < deadline:
            np.copyto(target, source)
            moved[index] += 2 * size

    threads = [
        threading.Thread(target=work, args=(index,), name="pager-dram") for index in range(num_threads)
    ]
    for thread in threads:
        thread.start()
    with contextlib.suppress(threading.BrokenBarrierError):
        begin.wait()
    began = time.perf_counter()
    for thread in threads:
        thread.join()
    if failed:
        raise failed[0]
    return sum(moved) / (time.perf_counter() - began)


def check_dram(rates: Mapping[int, float]) -> CheckResult:
    """``rates``: bytes per second, read and written, by number of threads."""
    name = "DRAM"
    best = max(rates.values())
    shown = ", ".join(f"{rate / 1e9:.0f} with {threads}" for threads, rate in rates.items())
    found = f"GB/s read and written by threads: {shown}"
    values = {"bytes_per_second": {str(threads): rate for threads, rate in rates.items()}}
    if best < ONE_CHANNEL:
        return CheckResult(
            name=name,
            verdict="slow",
            found=f"{found}; less than one memory channel carries",
            advice="end what else uses the memory and measure again; else fill the channels of the mainboard",
            values=values,
        )
    if max(rates) >= THREADS_FOR_GAIN and best < ENOUGH_GAIN * rates[min(rates)]:
        return CheckResult(
            name=name,
            verdict="slow",
            found=f"{found}; more threads bring nothing, as with a single channel",
            advice="fill all memory channels (`dmidecode -t memory`), and give the process cores of its own",
            values=values,
        )
    return CheckResult(name=name, verdict="ok", found=found, values=values)
