"""install, add_arguments and main: the value "cce" of Megatron's configuration and command lines, and the launcher."""

from __future__ import annotations

import argparse
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, NoReturn, get_args

from cce_dist.filter import GradFilter
from cce_dist.integrations.megatron.loss import Options
from cce_dist.integrations.megatron.swap import FLAG, convert, language_module
from cce_dist.integrations.options import FILTERS
from cce_dist.integrations.patching import Place

COMMAND = "cce_dist.integrations.megatron"
FUSION_FLAG = "--cross-entropy-fusion-impl"
SETUP = Place(
    "megatron.core.models.common.language_module.language_module", "LanguageModule.setup_embeddings_and_output_layer"
)
_defaults: dict[str, Any] = {}  # flags that the launcher has read, for a script whose parser has these flags, too


def install(options: Options | None = None, every_model: bool = False) -> None:
    """Convert models whose ``TransformerConfig`` or command line has ``cross_entropy_fusion_impl="cce"`` when they are built.

    ``LanguageModule.setup_embeddings_and_output_layer``, which every language model calls at the end of its construction, is
    wrapped. "cce" becomes a choice of Megatron-LM's argument parser (before 0.16 ``add_arguments`` adds it). It counts with or
    without ``cross_entropy_loss_fusion``, which ``--deterministic-mode`` refuses. A second call replaces the options.

    Args:
        options: Options of the models that are built from now on. None: the flags of ``add_arguments`` if Megatron's parser
            has read them, else the defaults.
        every_model: Convert every language model, whatever its configuration says.

    Raises:
        ImportError: megatron-core is missing, or lacks a function that this module replaces.
    """
    language_module()
    from megatron.core.model_parallel_config import ModelParallelConfig

    def setup_embeddings_and_output_layer(original: Callable, self: Any) -> None:
        original(self)
        if every_model or self.config.cross_entropy_fusion_impl == FLAG:
            convert(self, options or _options_of_the_command_line())

    SETUP.wrap(setup_embeddings_and_output_layer)
    field = ModelParallelConfig.__dataclass_fields__["cross_entropy_fusion_impl"]
    values = get_args(field.type)
    if values and FLAG not in values:
        field.type = Literal[(*values, FLAG)]  # pyright: ignore[reportAttributeAccessIssue]
        ModelParallelConfig.__annotations__["cross_entropy_fusion_impl"] = field.type


def uninstall() -> None:
    """Undo ``install``; models that are converted stay so."""
    SETUP.uninstall()


def add_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add ``--cce-...`` to a parser, and return it: an ``extra_args_provider`` for Megatron's ``pretrain``."""
    group = parser.add_argument_group("cce_dist")
    group.add_argument("--cce-filter", choices=FILTERS, help="whether gradients are filtered, and how (default: off)")
    group.add_argument(
        "--cce-filter-eps",
        type=float,
        help=f"softmax below which gradients are dropped (default: {GradFilter.eps:g})",
    )
    group.add_argument(
        "--cce-workspace-bytes", type=int, metavar="BYTES", help="memory budget (default: the shapes choose it)"
    )
    group.add_argument(
        "--cce-vocab-size", type=int, metavar="V", help="true size of the vocabulary: mask the rows that pad it"
    )
    for action in parser._actions:
        if action.dest == "cross_entropy_fusion_impl" and action.choices and FLAG not in action.choices:
            action.choices = [*action.choices, FLAG]
    parser.set_defaults(**_defaults)
    return parser


def options_from_args(args: argparse.Namespace) -> Options:
    """Read the flags of ``add_arguments``.

    Raises:
        ValueError: A value is out of range; the message names the flag.
    """
    keys = ("filter", "filter_eps", "workspace_bytes", "vocab_size")
    values = {key: getattr(args, f"cce_{key}") for key in keys}
    given = {key: value for key, value in values.items() if value is not None}
    return Options.read(given, lambda key: f"--cce-{key.replace('_', '-')}", "the command line")


def main(argv: list[str] | None = None) -> None:
    """Run a training script and convert every language model that it builds.

    With options of torchrun before the script, torchrun starts this command on each rank. Script and flags are checked first,
    because a rank's error would be followed by torchrun's traceback.

    The script's own folder comes first on sys.path, as under ``python SCRIPT ...``, so megatron-core is the one beside it.
    """
    parser = _Parser(
        prog=f"python -m {COMMAND}",
        usage="%(prog)s [options of torchrun] [flags] SCRIPT [its arguments] [flags]",
        description="Run a training script of Megatron with this loss. Flags may stand on either side of the script.",
        allow_abbrev=False,
    )
    add_arguments(parser)
    parser.add_argument("script", type=Path, help="pretrain_gpt.py, say")
    parser.add_argument("args", nargs=argparse.REMAINDER, help="its usual arguments")
    launch, line = _split(sys.argv[1:] if argv is None else argv)
    args = parser.parse_args(line)
    if not args.script.is_file():
        parser.error(f"no such script: {args.script}")
    behind = add_arguments(argparse.ArgumentParser(prog=parser.prog, add_help=False, allow_abbrev=False))
    _, rest = behind.parse_known_args(args.args, args)
    fusion = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    fusion.add_argument(FUSION_FLAG, dest="impl", default=FLAG)
    impl = fusion.parse_known_args(rest)[0].impl
    if impl != FLAG:
        # A warning would be missed in the log, and a run that names one loss would train with another.
        parser.error(f"{FUSION_FLAG} {impl} asks for a loss of Megatron's, this command for cce_dist's: leave one out")
    _defaults.update({key: value for key, value in vars(args).items() if key.startswith("cce_")})
    if not getattr(sys.flags, "safe_path", False):
        sys.path[0] = str(args.script.resolve().parent)  # as python itself does for a script
    try:
        install(options_from_args(args), every_model=True)
    except (ImportError, ValueError) as error:
        parser.error(str(error))
    if launch:
        from torch.distributed import run as torchrun

        torchrun.main([*launch, "-m", COMMAND, *line])
        return
    sys.argv = [str(args.script), *rest]
    runpy.run_path(str(args.script), run_name="__main__")


class _Parser(argparse.ArgumentParser):
    """Says in one line what is wrong with an argument."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message} (--help lists all flags)\n")


def _split(argv: list[str]) -> tuple[list[str], list[str]]:
    """Return the options of torchrun, which may stand before the script, and the line without them."""
    if not argv or argv[0] in ("-h", "--help"):
        return [], argv
    from torch.distributed import run as torchrun  # here, because every training script imports this module

    read = add_arguments(torchrun.get_args_parser()).parse_args(argv)
    script = len(argv) - len(read.training_script_args) - 1
    ours, launch = add_arguments(_Parser(add_help=False, allow_abbrev=False)).parse_known_args(argv[:script])
    given = {name: value for name, value in vars(ours).items() if value is not None}
    return launch, [*(f"--{name.replace('_', '-')}={value}" for name, value in given.items()), *argv[script:]]


def _options_of_the_command_line() -> Options | None:
    """Return the options that Megatron's parser has read, if ``add_arguments`` was its ``extra_args_provider``."""
    args: Any = getattr(sys.modules.get("megatron.training.global_vars"), "_GLOBAL_ARGS", None)
    return options_from_args(args) if hasattr(args, "cce_filter") else None
