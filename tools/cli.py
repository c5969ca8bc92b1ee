"""The ``pager`` command: one parser, one subcommand per module in :data:`COMMANDS`.

A command's module has ``add_arguments(parser)`` and ``run(arguments) -> int``, and imports torch inside
``run`` only, so that ``--help`` answers at once. Exit codes: 0 done, 1 failed or "no", 2 wrong use, 130
interrupted.
"""

from __future__ import annotations

import argparse
import errno
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module

from pager import __version__
from pager.errors import ConfigError, PagerError, PagerInternalError
from pager.tools.errors import CommandFailed, InputError

__all__ = ["COMMANDS", "Command", "main", "make_parser"]

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130
EXIT_BROKEN_PIPE = 141


@dataclass(frozen=True, kw_only=True, slots=True)
class Command:
    """A subcommand: its name, its line in ``pager --help``, and the module that carries it out."""

    name: str
    help: str
    module: str


COMMANDS = (
    Command(
        name="train",
        help="train a byte-level language model whose state is larger than the device memory",
        module="pager.tools.train",
    ),
    Command(
        name="bench",
        help="training steps beside those of other systems, and beside the least time they could take",
        module="pager.tools.bench.command",
    ),
    Command(
        name="plan",
        help="where every page would live, when it is used next, and how a step would go",
        module="pager.tools.plan",
    ),
    Command(
        name="estimate",
        help="memory, step time and tokens per second by device budget, and whether pager is for you",
        module="pager.tools.estimate",
    ),
    Command(
        name="verify",
        help="train a few steps with and without pager and compare every bit",
        module="pager.tools.verify",
    ),
    Command(
        name="tune",
        help="find the page size and prefetch distance that train a model fastest here",
        module="pager.tools.tune",
    ),
    Command(
        name="doctor",
        help="what of this machine makes paging fast or slow, each with a verdict and what to do",
        module="pager.tools.doctor.command",
    ),
    Command(
        name="monitor",
        help="a run while it trains: tiers, hits, stalls, links, and what its waveform says",
        module="pager.tools.monitor.command",
    ),
)


def make_parser(commands: Sequence[Command] = COMMANDS) -> argparse.ArgumentParser:
    """The parser of ``pager`` with all ``commands``; a parsed command stands in ``arguments.run``."""
    parser = argparse.ArgumentParser(prog="pager", description=__doc__.splitlines()[0] if __doc__ else None)
    parser.description = "Paged, tiered memory for training PyTorch models that are larger than GPU memory."
    parser.add_argument("--version", action="version", version=f"pager {__version__}")
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for command in commands:
        module = import_module(command.module)
        subparser = subparsers.add_parser(
            command.name,
            help=command.help,
            description=module.__doc__,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        module.add_arguments(subparser)
        subparser.set_defaults(run=module.run)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``pager`` with ``argv`` (default: the process's arguments) and return its exit code."""
    try:
        code = _run(argv)
        if sys.stdout is not None:  # it is, where the shell closed it (`pager ... >&-`)
            sys.stdout.flush()
    except BrokenPipeError:
        # Whoever read our output has gone (`pager ... | head`). The interpreter would complain again at exit.
        _drop_output()
        return EXIT_BROKEN_PIPE
    except OSError as error:
        # Commands put what they know of a file into words themselves: this is our own output, redirected.
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO):
            raise
        _drop_output()
        _complain(f"cannot write the output: {error.strerror}; free space there, or write it elsewhere")
        return EXIT_FAILED
    return code


def _drop_output() -> None:
    """Nothing that is still to be printed, at exit too, meets the same error."""
    with open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), sys.stdout.fileno())


def _run(argv: Sequence[str] | None) -> int:
    try:
        arguments = make_parser().parse_args(argv)
        code: int = arguments.run(arguments)
    except SystemExit as exit_:  # argparse: 0 after --help and --version, 2 after wrong use
        return exit_.code if isinstance(exit_.code, int) else EXIT_USAGE
    except KeyboardInterrupt:
        _complain("interrupted")
        return EXIT_INTERRUPTED
    except (InputError, ConfigError) as error:
        _complain(str(error))
        return EXIT_USAGE
    except PagerInternalError:
        raise
    except (CommandFailed, PagerError) as error:
        _complain(str(error))
        return EXIT_FAILED
    return code


def _complain(message: str) -> None:
    # Messages of the library that are not shown by this command say themselves whose they are.
    print(f"pager: {message.removeprefix('pager: ')}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
