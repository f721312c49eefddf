"""Count the architectures of transformers whose loss and gradients stay what they are after ``convert``.

    python benchmarks/count_architectures.py                        all causal language models
    python benchmarks/count_architectures.py LlamaForCausalLM       these classes

Every class of a mapping of transformers is built small from its own default configuration, and runs in a child process, so
that a model that hangs or dies is a line of the table. ``--write`` puts the table into docs/huggingface.md.
"""

import argparse
import collections
import re
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parent.parent / "tests"))

from support.architectures import Result, names_of, quiet, run

LIMIT_SECONDS = 120  # for one class
PAGE = Path(__file__).resolve().parent.parent / "docs" / "huggingface.md"


def table(results: Sequence[Result]) -> str:
    """Return the Markdown of the results: how many of each outcome, and every one that is not equal."""
    import transformers

    counts = collections.Counter(result.outcome for result in results)
    built = len(results) - counts["not built"]
    rows = [
        f"transformers {transformers.__version__}: {built} of {len(results)} classes were built, "
        f"**{counts['equal']} of these are equal**.",
        "",
        "| class | outcome | line |",
        "|---|---|---|",
    ]
    others = [result for result in results if result.outcome not in ("equal", "not built")]
    rows += [f"| {result.name} | {result.outcome} | {result.line.replace('|', '')} |" for result in others]
    return "\n".join(rows) + "\n"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the script with these arguments (default: the process's own); 1 if a class differs, or gives no answer."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="classes; none: all of the mapping")
    parser.add_argument("--mapping", default="causal_lm", help="causal_lm, image_text_to_text, masked_lm, ...")
    parser.add_argument("--write", action="store_true", help="put the table into docs/huggingface.md")
    args = parser.parse_args(argv)
    quiet()
    results = []
    for name in args.names or names_of(args.mapping):
        results.append(run(name, LIMIT_SECONDS))
        print(f"{name:40} {results[-1].outcome:10} {results[-1].seconds:5.1f} s  {results[-1].line}", flush=True)
    print("\n" + table(results))
    if args.write:
        marks = f"<!-- {args.mapping} -->\n", f"<!-- end of {args.mapping} -->\n"
        pattern = re.escape(marks[0]) + ".*?" + re.escape(marks[1])
        PAGE.write_text(re.sub(pattern, lambda _: marks[0] + table(results) + marks[1], PAGE.read_text(), flags=re.S))
    return int(any(result.outcome in ("differs", "no answer") for result in results))


if __name__ == "__main__":
    sys.exit(main())
