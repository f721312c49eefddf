"""install, add_arguments and main: Megatron's configuration and command lines learn the name of this loss."""

from __future__ import annotations

import argparse
import functools
import runpy
import sys
from pathlib import Path
from typing import Any, Literal, get_args

from cce_dist import GradFilter
from cce_dist.integrations.megatron.loss import Options
from cce_dist.integrations.megatron.swap import FLAG, convert, language_module

FILTERS = ("off", "compensated", "plain")


def install(options: Options | None = None, every_model: bool = False) -> None:
    """Make ``cross_entropy_fusion_impl="cce"`` mean this module, in ``TransformerConfig`` and on the command line.

    One function of Megatron is wrapped, ``LanguageModule.setup_embeddings_and_output_layer``, with which every language model
    ends its construction; and "cce" is added to the values of ``cross_entropy_fusion_impl``, from which the argument parser
    takes its choices (Megatron-LM >= 0.16; before that it is ``add_arguments`` that adds it). The value counts with or
    without ``cross_entropy_loss_fusion``, which ``--deterministic-mode`` refuses to see; this loss is deterministic. A
    second call replaces the options.

    Args:
        options: Of every model that is built from now on. None: the flags of ``add_arguments`` where Megatron's parser has
            read them, else the defaults.
        every_model: Convert every language model, whatever its configuration says.

    Raises:
        ImportError: megatron-core is missing, or has not the names that this module builds on.
    """
    base = language_module()
    from megatron.core.model_parallel_config import ModelParallelConfig

    uninstall()
    original = base.setup_embeddings_and_output_layer

    @functools.wraps(original)
    def setup_embeddings_and_output_layer(self: Any) -> None:
        original(self)
        if every_model or self.config.cross_entropy_fusion_impl == FLAG:
            convert(self, options or _options_of_the_command_line())

    wrapped: Any = setup_embeddings_and_output_layer
    wrapped.cce_original = original
    base.setup_embeddings_and_output_layer = wrapped
    field = ModelParallelConfig.__dataclass_fields__["cross_entropy_fusion_impl"]
    values = get_args(field.type)
    if values and FLAG not in values:
        field.type = Literal[(*values, FLAG)]  # pyright: ignore[reportAttributeAccessIssue]
        ModelParallelConfig.__annotations__["cross_entropy_fusion_impl"] = field.type


def uninstall() -> None:
    """Undo ``install``; models that are converted stay so."""
    base = language_module()
    wrapped = base.setup_embeddings_and_output_layer
    base.setup_embeddings_and_output_layer = getattr(wrapped, "cce_original", wrapped)


def add_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add ``--cce-...`` to a parser, and return it: an ``extra_args_provider`` for Megatron's ``pretrain``."""
    group = parser.add_argument_group("cce_dist")
    group.add_argument("--cce-filter", choices=FILTERS, default="off", help="which gradient tiles to drop, and how")
    group.add_argument("--cce-filter-eps", type=float, default=2**-12, help="softmax below which a tile is dropped")
    group.add_argument(
        "--cce-vocab-size", type=int, metavar="V", help="true size of the vocabulary: mask the rows that pad it"
    )
    for action in parser._actions:
        if action.dest == "cross_entropy_fusion_impl" and action.choices and FLAG not in action.choices:
            action.choices = [*action.choices, FLAG]
    return parser


def options_from_args(args: argparse.Namespace) -> Options:
    """Read the flags of ``add_arguments``."""
    grad_filter = None
    if args.cce_filter != "off":
        grad_filter = GradFilter(eps=args.cce_filter_eps, compensate=args.cce_filter == "compensated")
    return Options(grad_filter, args.cce_vocab_size)


def main(argv: list[str] | None = None) -> None:
    """Run a training script with every language model that it builds converted."""
    parser = argparse.ArgumentParser(
        prog="python -m cce_dist.integrations.megatron",
        description="Run a training script of Megatron with this loss. Flags before the script are read here, the rest is its.",
        allow_abbrev=False,
    )
    add_arguments(parser)
    parser.add_argument("script", type=Path, help="pretrain_gpt.py, say")
    parser.add_argument("args", nargs=argparse.REMAINDER, help="its usual arguments")
    args = parser.parse_args(argv)
    if not args.script.is_file():
        parser.error(f"no such script: {args.script}")
    try:
        install(options_from_args(args), every_model=True)
    except (ImportError, ValueError) as error:
        parser.error(str(error))
    sys.argv = [str(args.script), *args.args]
    sys.path[0] = str(args.script.resolve().parent)  # as python itself does for a script
    runpy.run_path(str(args.script), run_name="__main__")


def _options_of_the_command_line() -> Options | None:
    """Return the options that Megatron's parser has read, if ``add_arguments`` was its ``extra_args_provider``."""
    args: Any = getattr(sys.modules.get("megatron.training.global_vars"), "_GLOBAL_ARGS", None)
    return options_from_args(args) if hasattr(args, "cce_filter") else None
