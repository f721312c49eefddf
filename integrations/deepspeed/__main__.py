"""main: a training script as it is, whose ``deepspeed.initialize`` reads the section of ds_config."""

from __future__ import annotations

import argparse
import runpy
import sys
from pathlib import Path

from cce_dist.integrations.deepspeed import engine
from cce_dist.integrations.options import SECTION
from cce_dist.integrations.patching import say_once


def main(argv: list[str] | None = None) -> None:
    """Run a training script after ``install()``, and say at its end if no ds_config had the section enabled.

    The script finds the modules of its own folder first, as under ``python SCRIPT ...``. A ``--local_rank`` before the script's
    name, where DeepSpeed's launcher puts it, goes to the script.
    """
    parser = argparse.ArgumentParser(
        prog="python -m cce_dist.integrations.deepspeed",
        description=f'Run a training script whose ds_config has the section "{SECTION}": deepspeed.initialize then reads it.',
        allow_abbrev=False,
    )
    parser.add_argument("--local_rank", "--local-rank", help=argparse.SUPPRESS)
    parser.add_argument("script", type=Path, help="train.py, say")
    parser.add_argument("args", nargs=argparse.REMAINDER, help="its usual arguments")
    args = parser.parse_args(argv)
    if not args.script.is_file():
        parser.error(f"no such script: {args.script}")
    try:
        engine.install()
    except ImportError as error:
        parser.error(str(error))
    if not getattr(sys.flags, "safe_path", False):
        sys.path[0] = str(args.script.resolve().parent)  # as python itself does for a script
    local_rank = [] if args.local_rank is None else [f"--local_rank={args.local_rank}"]
    sys.argv = [str(args.script), *local_rank, *args.args]
    runpy.run_path(str(args.script), run_name="__main__")
    if engine.num_converted == 0:
        say_once(
            f'no model was converted: no ds_config that reached deepspeed.initialize had "{SECTION}": {{"enabled": true}}'
        )


if __name__ == "__main__":
    main()
