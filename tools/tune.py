"""Find the page size and the prefetch distance that train a model fastest here: one knob at a time, first in the
simulator, then in short runs on this machine, until nothing gains more than the noise, which is measured.

A device that is busy less than 70 % of a step gets a longer prefetch distance, then another page size; a peak near the
limit, with pages that leave unused, a shorter distance. Prints every trial and the YAML that pager.Config.from_yaml
reads; --out writes it. Without a GPU the device is simulated. Exit code 0: done; 1: no run could be made; 2: wrong use.

    pager tune 3b --device-budget 12GiB --update-at backward --out tuned.yaml
    pager tune small --simulate-only --json"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pager.tools.errors import CommandFailed, InputError
from pager.tools.plan_options import (
    add_shared_options,
    capture_from,
    default_budget,
    parse_budget,
    plain,
)
from pager.tools.tuner import Setting, Trial, Tuning, tune

if TYPE_CHECKING:
    from pager.tools.captured import CapturedModel

__all__ = ["add_arguments", "knobs_of", "run", "yaml_of"]


# Between two runs of one setting; beyond, only a gain that large would be seen.
LOUD = 0.1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``pager tune``."""
    add_shared_options(parser)
    parser.add_argument(
        "--device-budget",
        metavar="SIZE",
        help='"24GiB", or a fraction such as 0.9 of the machine\'s device (default: as for pager plan)',
    )
    parser.add_argument("--device", default="auto", help="auto, cuda, cuda:1, or cpu: the simulated device")
    parser.add_argument("--disk", metavar="DIR", help="folder of a third tier (default: none)")
    parser.add_argument("--steps", type=int, default=7, help="steady steps of a run (default: 7)")
    parser.add_argument("--seed", type=int, default=0, help="of weights and inputs (default: 0)")
    parser.add_argument("--simulate-only", action="store_true", help="run nothing on this machine")
    parser.add_argument("--out", metavar="FILE", help="write the YAML there")


def run(arguments: argparse.Namespace) -> int:
    """``pager tune``; 0 where a setting was found."""
    out = _checked(arguments)
    from pager.tools.tune_runs import SimulatedRuns

    _say("capturing a step on meta ...")
    captured, machine = capture_from(arguments)
    given = arguments.device_budget
    budget = default_budget(captured, machine) if given is None else parse_budget(given, machine)
    start = Setting(page_bytes=captured.page_size, prefetch_distance=arguments.prefetch_distance)
    stages = {
        "simulated": tune(start, SimulatedRuns(arguments, budget).measure, on_trial=_say_trial, repeat=False)
    }
    if not arguments.simulate_only:
        stages["machine"] = _on_machine(arguments, captured, budget, start, stages["simulated"].best)
    last = list(stages.values())[-1]
    if last.best is None:
        reason = last.trials[-1].measurement.reason
        raise CommandFailed(f"there is nothing to tune: {reason}")
    text = yaml_of(knobs_of(arguments, captured, budget) | _tuned(last.best.setting), last)
    if arguments.json:
        print(json.dumps(plain(as_dict(captured, budget, stages, last))))
    else:
        print("\n".join(_text(captured, stages, last)))
        print(f"\n{text}", end="")
    if out is not None:
        try:
            out.write_text(text, encoding="utf-8")
        except OSError as error:
            raise CommandFailed(f"cannot write {out}: {error.strerror or error}") from error
    return 0


def _on_machine(
    arguments: argparse.Namespace,
    captured: CapturedModel,
    budget: int,
    start: Setting,
    simulated: Trial | None,
) -> Tuning:
    from pager.tools.model_source import ModelSource, load_model
    from pager.tools.tune_runs import MachineRuns

    def make_source() -> ModelSource:
        return load_model(
            arguments.model,
            batch=arguments.batch,
            seq=arguments.seq,
            checkpoint=not arguments.no_checkpoint,
            seed=arguments.seed,
        )

    runs = MachineRuns(
        make_source, knobs=knobs_of(arguments, captured, budget), steps=arguments.steps, seed=arguments.seed
    )
    candidates = [] if simulated is None else [(simulated.setting, "the simulator's choice")]
    return tune(start, runs.measure, candidates=candidates, on_trial=_say_trial)


def _checked(arguments: argparse.Namespace) -> Path | None:
    """Where to write, if anywhere. InputError or ConfigError for options that cannot be."""
    from pager.config import Config

    for name, lowest in (("steps", 2), ("prefetch_distance", 1), ("seed", 0)):
        value = getattr(arguments, name)
        if not lowest <= value < 2**63:
            raise InputError(
                f"--{name.replace('_', '-')} is {value}; expected at least {lowest}, and 64 bits"
            )
    Config(page_size=arguments.page_size, device=arguments.device)
    if arguments.disk is not None and not os.path.isdir(arguments.disk):
        raise InputError(f"--disk {arguments.disk}: there is no such folder; make it or name another")
    if arguments.out is None:
        return None
    out = Path(arguments.out)
    if out.is_dir() or not os.access(out if out.exists() else out.parent, os.W_OK):
        raise InputError(f"--out {out}: cannot write there; name a file in a folder that exists")
    return out


def knobs_of(arguments: argparse.Namespace, captured: CapturedModel, budget: int) -> dict[str, Any]:
    """The knobs that are not turned, as pager.Config takes them; those at their defaults are left out."""
    from pager.config import Config

    knobs: dict[str, Any] = {
        "device": arguments.device,
        "device_budget": budget,
        "host_budget": arguments.host_budget,
        "disk": arguments.disk,
        "disk_budget": arguments.disk_budget if arguments.disk is not None else None,
        "eviction": arguments.eviction,
        "update_at": arguments.update_at,
        "update_on": arguments.update_on,
        "master": "float32" if captured.dtype == "bfloat16" and not arguments.no_master else None,
    }
    defaults = Config()
    return {name: value for name, value in knobs.items() if value not in (None, getattr(defaults, name))}


def _tuned(setting: Setting) -> dict[str, Any]:
    return {
        "page_size": f"{setting.page_bytes // 1024}KiB",
        "prefetch_distance": setting.prefetch_distance,
    }


def yaml_of(knobs: dict[str, Any], tuning: Tuning) -> str:
    """What ``pager.Config.from_yaml`` reads, with where it comes from above it."""
    import yaml

    assert tuning.best is not None
    text: str = yaml.safe_dump(knobs, sort_keys=True)
    return f"# pager tune: {tuning.best.measurement.seconds:.4g} s a step; {tuning.stopped}\n{text}"


def as_dict(captured: CapturedModel, budget: int, stages: dict[str, Tuning], last: Tuning) -> dict[str, Any]:
    """All trials as plain values, and the setting that was found."""
    assert last.best is not None
    return {
        "model": captured.name,
        "device_budget_bytes": budget,
        "setting": _tuned(last.best.setting),
        "seconds": last.best.measurement.seconds,
        "gain": last.gain,
        "stages": {
            stage: {
                "noise": tuning.noise,
                "stopped": tuning.stopped,
                "trials": [
                    {**_tuned(trial.setting), **dataclasses.asdict(trial.measurement)}
                    | {"why": trial.why, "better": trial.better}
                    for trial in tuning.trials
                ],
            }
            for stage, tuning in stages.items()
        },
    }


def _text(captured: CapturedModel, stages: dict[str, Tuning], last: Tuning) -> list[str]:
    assert last.best is not None
    lines = [f"{captured.name}: {captured.num_parameters / 1e9:.3g} G parameters, {captured.dtype}"]
    for stage, tuning in stages.items():
        lines += ["", "in the simulator" if stage == "simulated" else "on this machine"]
        lines += [f"  {_line(trial)}" for trial in tuning.trials]
        lines.append(f"  {tuning.stopped}")
        if tuning.noise > LOUD:
            lines.append(
                f"  two runs of one setting were {tuning.noise:.0%} apart: other work on this machine hides what a "
                "knob gains; try again when it is quiet, or with more --steps"
            )
    return [*lines, "", f"{last.best.setting}: {last.gain:.1%} faster than as given"]


def _line(trial: Trial) -> str:
    found = trial.measurement
    if found.reason is not None:
        return f"{trial.setting}: not run, {found.reason}"
    return (
        f"{trial.setting}: {found.seconds:.4g} s a step (+-{found.noise:.1%}), busy {found.busy_share:.0%}"
        f"{', better' if trial.better else ''} ({trial.why})"
    )


def _say_trial(trial: Trial) -> None:
    _say(_line(trial))


def _say(message: str) -> None:
    """Progress, for people who watch: on stderr, and only there."""
    if sys.stderr.isatty():
        print(message, file=sys.stderr)
