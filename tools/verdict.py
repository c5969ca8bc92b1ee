"""What a prediction means, in words: whether to use pager for this model on this machine, and what would help."""

from __future__ import annotations

from dataclasses import dataclass

from pager.graph.step_model import StepModel
from pager.tools.prediction import Prediction
from pager.units import format_bytes

__all__ = ["Verdict", "tokens_to_hide", "verdict_of"]

# A step of so many times its computation is just over the device; beyond, the copies are the step.
_JUST_OVER = 2.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """``kind``: "fits", "just over", "far beyond", "not predicted" or "does not fit". ``text``: a few sentences."""

    kind: str
    text: str


def verdict_of(prediction: Prediction, step: StepModel) -> Verdict:
    """The verdict on one budget."""
    budget = format_bytes(prediction.wanted.budget_bytes)
    if prediction.fits:
        return Verdict(
            kind="fits",
            text=f"Fits: parameters, gradients and optimizer state have room in {budget}. Do not use pager for this; "
            "it would leave the model alone.",
        )
    result = prediction.step
    if result is None and prediction.may_train:
        return Verdict(
            kind="not predicted",
            text=f"Too tight to predict: {prediction.reason}. It may train, slowly; a lower batch or a larger budget "
            "lets it stream.",
        )
    if result is None:
        return Verdict(
            kind="does not fit",
            text=f"Does not fit: {prediction.reason}. More of what is named would help, a disk, or more machines.",
        )
    times = result.seconds / step.compute_seconds if step.compute_seconds else float("inf")
    cause, waited = next(iter(result.stall_seconds.items()), ("nothing", 0.0))
    waits = f"it waits {result.stall_share:.0%} of a step, most for {cause} ({waited:.2f} s)"
    if times <= _JUST_OVER:
        return Verdict(
            kind="just over",
            text=f"Just over {budget}, which is where paging pays most: a step takes {times:.2f} times its "
            f"computation; {waits}.",
        )
    return Verdict(
        kind="far beyond",
        text=f"Far beyond {budget}, and bound by bandwidth: a step takes {times:.1f} times its computation; {waits}. "
        f"What would help: {_what_helps(prediction, step)}.",
    )


def _what_helps(prediction: Prediction, step: StepModel) -> str:
    result, wanted = prediction.step, prediction.wanted
    assert result is not None
    ideas = []
    most = max(tokens_to_hide(prediction, step).values(), default=0)
    if next(iter(result.stall_seconds), "") == "host":
        ideas.append("more tokens a step, since the work of the host's thread is the wall")
    elif most > step.tokens > 0:
        ideas.append(f"more tokens a step ({most:,} instead of {step.tokens:,} would hide the copies)")
    if result.disk_read_bytes:
        ideas.append(
            f"{format_bytes(result.tier_bytes['disk'])} more host memory, since the disk is the slowest"
        )
    if wanted.update_at == "step":
        ideas.append('update_at="backward", if nothing needs all gradients at once')
    if wanted.update_on == "device":
        ideas.append('update_on="auto", which gives a part of the update to the CPU')
    if prediction.bound is not None and prediction.bound.wall == "device_memory":
        ideas.append("a larger device budget")
    return "; ".join(ideas) or "a faster link, or more host memory bandwidth"


def tokens_to_hide(prediction: Prediction, step: StepModel) -> dict[str, int]:
    """Tokens a step at which each engine that moves data is busy no longer than the computation it runs under.

    Updates in backward run under backward alone; those of ``update_at="step"`` under the whole step, since gradients
    leave in backward and states stream in forward.
    """
    result = prediction.step
    if result is None or not step.tokens or not step.compute_seconds:
        return {}
    forward, backward = step.phase_seconds()
    under = backward if prediction.wanted.update_at == "backward" else forward + backward
    engines = ("h2d", "d2h", "disk read", "disk write", "cpu update")
    return {
        engine: round(result.busy_seconds[engine] / under * step.tokens)
        for engine in engines
        if result.busy_seconds[engine] > 0
    }
