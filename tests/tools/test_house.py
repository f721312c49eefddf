"""The shape of the code: few arguments, functions of a screen, imports that point one way, a README that is read."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = {"cce_dist": ROOT / "cce_dist"} | {f"cce_dist.{link}": ROOT / link for link in ("kernels", "integrations")}
# The first three stand in the reference, too.
PUBLIC = {"linear_cross_entropy", "linear_kl_divergence", "linear_log_probs"}
PUBLIC |= {"topk_kl_divergence", "VocabParallelHead.__init__"}
MOST_ARGUMENTS, MOST_LINES = 10, 70


MODULES = {
    ".".join((package, *(part for part in path.relative_to(folder).with_suffix("").parts if part != "__init__"))): path
    for package, folder in FOLDERS.items()
    for path in sorted(folder.rglob("*.py"))
}


def launches(function: ast.FunctionDef) -> bool:
    """Whether it is the wrapper of a kernel's launch: ``kernel[grid](...)``, or one of ``prepared``, which is named so."""
    called = [n.func for n in ast.walk(function) if isinstance(n, ast.Call)]
    return any(isinstance(f, ast.Subscript) or re.match(r"\w*launch(es\.|\(|$)", ast.unparse(f)) for f in called)


def functions(tree: ast.AST, prefix: str = "") -> Iterator[tuple[str, ast.FunctionDef]]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            name = prefix + node.name
            if isinstance(node, ast.FunctionDef):
                yield name, node
            yield from functions(node, name + ".")


def test_functions_are_small() -> None:
    """Host functions have few arguments and fit a screen; docstrings do not count, and public ones may take more arguments."""
    wrong = []
    everywhere = ((module, *found) for module in MODULES for found in functions(ast.parse(MODULES[module].read_text())))
    for module, name, function in everywhere:
        decorators = [ast.unparse(decorator) for decorator in function.decorator_list]
        if any(re.match(r"kernel\b|triton\.jit", decorator) for decorator in decorators):
            continue
        arguments = function.args
        count = len([*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs])
        count -= bool(arguments.args) and arguments.args[0].arg in ("self", "cls")
        if count > MOST_ARGUMENTS and not (launches(function) or "overload" in decorators or name in PUBLIC):
            wrong.append(f"{module}: {name} has {count} arguments")
        first = function.body[0]
        is_docstring = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
        docstring = (first.end_lineno or 0) - first.lineno + 1 if is_docstring else 0
        lines = (function.end_lineno or 0) - function.lineno + 1 - docstring
        if lines > MOST_LINES + len(arguments.kwonlyargs) * (name in PUBLIC):
            wrong.append(f"{module}: {name} has {lines} lines")
    assert not wrong, "\n".join(wrong)


def imports() -> dict[str, set[str]]:
    """The modules of the project that each one imports, wherever in its text."""
    edges: dict[str, set[str]] = {}
    for module, path in MODULES.items():
        edges[module] = set()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module:
                # A submodule if there is one of that name, else the package's own file.
                whole = [f"{node.module}.{alias.name}" for alias in node.names]
                names = [name if name in MODULES else node.module for name in whole]
            else:
                continue
            edges[module] |= {name for name in names if name in MODULES} - {module}
    return edges


def test_imports_point_one_way() -> None:
    """Catches a circle, also one that is closed inside a function."""
    edges = imports()
    while edges:
        free = {module for module, names in edges.items() if not names & edges.keys()}
        assert free, f"a circle among {sorted(edges)}: { {m: sorted(n & edges.keys()) for m, n in edges.items()} }"
        edges = {module: names for module, names in edges.items() if module not in free}


def test_the_library_does_without_its_tools() -> None:
    """Catches: the loss, a kernel or an adapter that imports a command. ``python -m cce_dist`` alone does."""
    outside = {module: names for module, names in imports().items() if not module.startswith("cce_dist.tools")}
    users = {module for module, names in outside.items() if any(name.startswith("cce_dist.tools") for name in names)}
    assert users == {"cce_dist.__main__"}


def test_the_wheel_does_without_the_benchmarks() -> None:
    scripts = {path.stem for path in ROOT.glob("benchmarks/*.py")}
    texts = [path.read_text() for path in MODULES.values()]
    used = {name for text in texts for name in re.findall(r"^\s*(?:from|import) (\w+)", text, re.MULTILINE)}
    assert len(scripts) > 9 and not used & scripts


def test_one_place_makes_the_default_group() -> None:
    makers = [module for module, path in MODULES.items() if "init_process_group(" in path.read_text()]
    assert makers == ["cce_dist.tools.ranks"]
