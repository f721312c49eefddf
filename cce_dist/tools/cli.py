"""The command line ``cce-dist``: a table of subcommands, each imported only when it is run.

A subcommand is a module with ``add_arguments(parser)`` and ``run(args) -> int``; what ``run`` returns is the exit code.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, NoReturn

import cce_dist


class Command(NamedTuple):
    """One subcommand: where it lives, what it does in a line, and a command to copy."""

    module: str
    summary: str
    example: str


COMMANDS = {
    "pretrain": Command(
        "cce_dist.tools.pretrain",
        "pre-train a GPT with tensor and data parallelism on a folder of text",
        "cce-dist pretrain --tp 2",
    ),
    "plot": Command(
        "cce_dist.tools.pretrain.plot",
        "overlay the loss curves of several pre-training runs",
        "cce-dist plot runs/exact/metrics.jsonl runs/dense/metrics.jsonl",
    ),
    "verify": Command(
        "cce_dist.tools.verify",
        "compare loss and gradients with the dense reference on your ranks and devices",
        "torchrun --nproc-per-node 8 -m cce_dist verify",
    ),
    "plan": Command(
        "cce_dist.tools.plan",
        "predict what the head costs, what fits, and how to cut the pipeline, without a GPU",
        "cce-dist plan --model llama-3-8b --tokens 8192 --tp 8 --pp 4",
    ),
}

OPTIONAL = ("tokenizers", "filelock", "matplotlib", "tqdm")  # packages of the extra "train"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the subcommand that ``argv`` (default: the process's arguments) names and return its exit code."""
    argv = list(sys.argv[1:] if argv is None else argv)
    name = _top_level_parser().parse_args(argv[:1]).command
    command = COMMANDS[name]
    parser = _Parser(
        prog=f"cce-dist {name}",
        description=f"{command.summary[0].upper()}{command.summary[1:]}.",
        epilog=f"example:\n  {command.example}",
        formatter_class=_HelpFormatter,
    )
    try:
        module = importlib.import_module(command.module)
        module.add_arguments(parser)
        code = module.run(parser.parse_args(argv[1:]))
        print(end="", flush=True)  # a full disk is noticed here, not while Python shuts down
        return code
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in OPTIONAL:
            raise
        print(
            f'cce-dist {name} needs {missing}, which is not installed: pip install "cce-dist[train]"',
            file=sys.stderr,
        )
        return 1
    except KeyboardInterrupt:
        print(f"cce-dist {name}: stopped", file=sys.stderr)
        return 130
    except OSError as error:
        try:
            print(end="", flush=True)
        except OSError:  # Python would try again at its end
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if isinstance(error, BrokenPipeError):  # the reader of our output, such as head, has seen enough
            return 141
        if os.environ.get("CCE_DIST_DEBUG") == "1":
            raise
        print(f"cce-dist {name}: {error}", file=sys.stderr)
        return 1


class _Parser(argparse.ArgumentParser):
    """Says in one line what is wrong with an argument."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message} (--help lists all options)\n")


class _HelpFormatter(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Keeps line breaks, and adds a default where the text does not name it."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        unset = action.default is None or action.default is False or action.default in ("", ())
        silent = unset or "default" in (action.help or "")
        return action.help if silent else super()._get_help_string(action)


class _Version(argparse.Action):
    """Prints the versions that a report needs. Torch is not imported."""

    def __call__(self, *_: object) -> NoReturn:
        found = {"cce-dist": cce_dist.__version__ + _commit(), "python": platform.python_version()}
        for package in ("torch", "triton"):
            with contextlib.suppress(importlib.metadata.PackageNotFoundError):
                found[package] = importlib.metadata.version(package)
        print(", ".join(f"{name} {version}" for name, version in found.items()))
        raise SystemExit(0)


def _commit() -> str:
    """Return the commit of the checkout that runs, or that pip installed from a repository, or ""."""
    checkout = Path(cce_dist.__file__).resolve().parents[1]
    with contextlib.suppress(OSError, subprocess.CalledProcessError, importlib.metadata.PackageNotFoundError, KeyError):
        if (checkout / ".git").exists():
            command = ["git", "-C", checkout, "describe", "--always", "--dirty", "--exclude", "*", "--abbrev=10"]
            return f" (commit {subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()})"
        source = importlib.metadata.distribution("cce-dist").read_text("direct_url.json")
        return f" (commit {json.loads(source or '{}')['vcs_info']['commit_id'][:10]})"
    return ""


def _top_level_parser() -> argparse.ArgumentParser:
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {c.summary}\n  {'':<{width}}  $ {c.example}" for name, c in COMMANDS.items()]
    parser = argparse.ArgumentParser(
        prog="cce-dist",
        usage="cce-dist COMMAND [options]",
        description="Cross-entropy of a language-model head without the logits: train with it, check it, plan it.",
        epilog="\n".join(["commands:", *lines, "", "'cce-dist COMMAND --help' lists the options of one command."]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        add_help=False,
    )
    parser.add_argument("command", choices=COMMANDS, metavar="COMMAND", help=argparse.SUPPRESS)
    parser.add_argument("-h", "--help", action="help", help=argparse.SUPPRESS)
    parser.add_argument("--version", action=_Version, nargs=0, help=argparse.SUPPRESS)
    return parser
