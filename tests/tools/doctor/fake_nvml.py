"""An NVML that answers what it is given."""

from __future__ import annotations

from typing import Any


class NvmlError(Exception):
    pass


class FakeNvml:
    """Answers what it is given; every other question is not supported. ``open`` counts sessions."""

    NVMLError = NvmlError

    def __init__(self, **answers: Any) -> None:
        self.answers = answers
        self.open = 0

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("nvml") or name == "nvmlNotInThisVersion":
            raise AttributeError(name)

        def answer(*arguments: Any) -> Any:
            found = self.answers.get(name)
            if found is None:
                raise NvmlError("Not Supported")
            return found

        return answer

    def nvmlInit(self) -> None:
        if self.answers.get("no_driver"):
            raise NvmlError("Driver Not Loaded")
        self.open += 1

    def nvmlShutdown(self) -> None:
        self.open -= 1


def make_nvml(**answers: Any) -> FakeNvml:
    return FakeNvml(nvmlDeviceGetHandleByUUID="handle", **answers)
