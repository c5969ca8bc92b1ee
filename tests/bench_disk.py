"""How fast the disk is, and how fast the pager's queue makes it: JSON lines, one for each measurement.

    python tests/bench_disk.py --folder /mnt/nvme [--gib 4] [--extent-mib 4] [--threads 1,2,4,8] [--checksum]
        [--compression 1 --dtype bfloat16] [--disk-gb-per-second 0.2]

For reads, writes, and both at once (half of the bytes each) it moves the same bytes twice: by a plain loop of
``os.preadv`` and ``os.pwritev`` past the page cache, with so many threads and extents, each with a buffer of its own,
and through `pager.engine.disk_queue` with its ring, as pages go in training (the copy over the link is that of the
simulated device, or of the GPU with ``--device cuda``). ``share`` is the engine's rate over the plain loop's. The
folder's disk decides, so state which one it was; on a shared or virtual disk repeat it. With ``--compression`` the
engine moves normal numbers of ``--dtype`` compressed (rates are of plain bytes), the plain loop as they are;
``--disk-gb-per-second`` plays a slower disk for both, one for reads and writes together.
"""

from __future__ import annotations

import argparse
import json
import mmap
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from pager.device.base import Device, make_device
from pager.engine.disk_queue import DiskQueue
from pager.engine.disk_requests import Extent, Job
from pager.engine.ring import Ring
from pager.statistics import Counters
from pager.tiers.disk_file import DiskFile

PAGE = 128 * 2**10
WAYS = ("read", "write", "mixed")


def plan_of(way: str, num_extents: int) -> list[tuple[str, int]]:
    """What is done with which extent, in order; each is touched once."""
    return [(("read", "write")[index % 2] if way == "mixed" else way, index) for index in range(num_extents)]


def plain(file: DiskFile, plan: list[tuple[str, int]], extent: int, num_threads: int) -> float:
    """Seconds of a loop that does nothing else."""
    todo: Iterator[tuple[str, int]] = iter(plan)
    lock = threading.Lock()

    def work() -> None:
        buffer = memoryview(mmap.mmap(-1, extent))
        while True:
            with lock:
                item = next(todo, None)
            if item is None:
                return
            call = file._pread if item[0] == "read" else file._pwrite
            if call(buffer, item[1] * extent) != extent:
                raise OSError(f"short {item[0]}")

    threads = [threading.Thread(target=work) for _ in range(num_threads)]
    began = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return time.perf_counter() - began


def engine(
    file: DiskFile,
    plan: list[tuple[str, int]],
    extent: int,
    num_threads: int,
    device: Device,
    numbers: torch.Tensor,
) -> float:
    """Seconds of the same through the queue, to and from memory of the device."""
    ring = Ring(device, extent, 2 * num_threads + 4)
    counters = Counters()
    queue = DiskQueue(file, ring, device, counters, num_threads=num_threads, spare_room=int)
    memory = device.allocate_slab(extent)
    memory.copy_(numbers)

    def use(offset: int, buffer: torch.Tensor, region: object) -> object:
        device.h2d.copy(memory, buffer, reads=None, writes=None)
        return device.h2d.record()

    def fill(buffer: torch.Tensor, region: object) -> object:
        device.d2h.copy(buffer, memory, reads=None, writes=None)
        return device.d2h.record()

    frames = extent // PAGE
    began = time.perf_counter()
    reads = [Extent(index * frames, extent, 0) for what, index in plan if what == "read"]
    job = Job(use)  # type: ignore[arg-type]
    if reads:
        queue.read(job, reads)
    for what, index in plan:
        if what == "write":
            queue.write(index * frames, extent, fill)  # type: ignore[arg-type]
    if reads:
        queue.join(job)
    queue.settle()
    seconds = time.perf_counter() - began
    queue.stop()
    for stream in (device.h2d, device.d2h):
        stream.synchronize()
    ring.close()
    return seconds


def slow_down(bytes_per_second: float) -> None:
    """Have every paging file stand on a disk that moves no more than this, one request after the other."""
    lock, free, never = threading.Lock(), [0.0], threading.Event()

    def slowed(call: Callable[..., int]) -> Callable[..., int]:
        def move(file: DiskFile, view: memoryview, offset: int) -> int:
            count = call(file, view, offset)
            with lock:
                free[0] = max(free[0], time.perf_counter() - 0.01) + count / bytes_per_second
                wait = free[0] - time.perf_counter()
            never.wait(max(wait, 0))
            return count

        return move

    for name in ("_pread", "_pwrite"):
        setattr(DiskFile, name, slowed(getattr(DiskFile, name)))


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--gib", type=float, default=2.0)
    parser.add_argument("--extent-mib", default="1,4,16")
    parser.add_argument("--threads", default="1,2,4,8")
    parser.add_argument("--checksum", action="store_true")
    parser.add_argument("--compression", type=int)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--disk-gb-per-second", type=float)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--ways", default=",".join(WAYS))
    options = parser.parse_args()
    device = make_device(options.device, streams="early", check_races=False)
    num_frames = int(options.gib * 2**30) // PAGE // 128 * 128
    file = DiskFile(
        options.folder, PAGE, num_frames, checksum=options.checksum, compression=options.compression
    )
    file.allocate(num_frames)
    # Blocks that were never written are slower to write and faster to read than those of a run that goes on.
    plain(file, plan_of("write", num_frames * PAGE // 2**22), 2**22, 4)
    if options.disk_gb_per_second is not None:
        slow_down(options.disk_gb_per_second * 1e9)
    dtype: torch.dtype = getattr(torch, options.dtype)
    for extent in (int(text) * 2**20 for text in options.extent_mib.split(",")):
        numbers = torch.randn(extent // dtype.itemsize, generator=torch.Generator().manual_seed(0))
        numbers = numbers.to(dtype).view(torch.uint8)
        for index in range(num_frames * PAGE // extent):  # what is read first is packed too
            file.write(index * extent // PAGE, numbers)
        for num_threads in map(int, options.threads.split(",")):
            for way in options.ways.split(","):
                plan = plan_of(way, num_frames * PAGE // extent)
                seconds = [plain(file, plan, extent, num_threads)]
                seconds += [engine(file, plan, extent, num_threads, device, numbers)]
                rates = [len(plan) * extent / each / 1e9 for each in seconds]
                line = {
                    "way": way,
                    "extent_bytes": extent,
                    "num_threads": num_threads,
                    "is_direct": file.is_direct,
                    "checksum": options.checksum,
                    "compression": options.compression,
                    "dtype": options.dtype,
                    "disk_gb_per_second": options.disk_gb_per_second,
                    "num_bytes": len(plan) * extent,
                    "plain_gb_per_second": round(rates[0], 3),
                    "engine_gb_per_second": round(rates[1], 3),
                    "share": round(rates[1] / rates[0], 3),
                }
                sys.stdout.write(json.dumps(line) + "\n")
                sys.stdout.flush()
    file.close()
    device.close()


if __name__ == "__main__":
    main()
