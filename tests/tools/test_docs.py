"""The pages: short where they must be, links that lead somewhere, tables and code that are the code's."""

import ast
import inspect
import re
import subprocess
import sys
from pathlib import Path

import kernel_table
import pytest
import run_example
from commands import outputs_of

import cce_dist
from records import Results, read_json

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()
FILES = (*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("benchmarks/**/*.md"))
PAGES = {path.relative_to(ROOT).as_posix(): path.read_text() for path in FILES}
CODE = re.compile(r"^ *```(\w*)\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
FOLDERS = "cce_dist|kernels|integrations|benchmarks|launch|tests|docs"
MOST_LINES, MOST_WORDS = 150, 900


def blocks(page: str, language: str) -> list[str]:
    return [text for name, text in CODE.findall(PAGES[page]) if name == language]


def anchors(page: str) -> set[str]:
    """The anchors that GitHub gives a page's headings."""
    headings = re.findall(r"^#+ (.*)$", CODE.sub("", PAGES[page]), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_the_readme_is_short() -> None:
    assert len(README.splitlines()) <= MOST_LINES
    assert len(README.split()) <= MOST_WORDS


def test_links_lead_somewhere() -> None:
    """Catches a page, a picture or a heading that was renamed."""
    wrong = []
    for page, text in PAGES.items():
        for link in re.findall(r"\]\(([^)\s]+)\)", CODE.sub("", text)):
            if link.startswith("http"):
                continue
            path, _, anchor = link.partition("#")
            target = (ROOT / page).parent / path if path else ROOT / page
            there = target.exists()
            if not there or (anchor and anchor not in anchors(target.resolve().relative_to(ROOT).as_posix())):
                wrong.append(f"{page}: {link}")
    assert not wrong, "\n".join(wrong)


def test_the_readme_leads_to_every_page() -> None:
    """Pages of results are the business of docs/results.md, and of test_results.py."""
    linked = set(re.findall(r"\]\(([^)#\s]+)", README))
    assert {page for page in PAGES if page != "README.md" and not page.startswith("benchmarks/results/")} <= linked


def test_files_that_pages_name_are_there() -> None:
    """Catches a source file that moved."""
    wrong = []
    for page in PAGES.keys() - {"CHANGELOG.md"}:
        for name in re.findall(rf"`((?:{FOLDERS})/[\w./]*)`", PAGES[page]):
            if not (ROOT / name).exists():
                wrong.append(f"{page}: {name}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.slow
def test_the_readmes_examples_run(tmp_path: Path) -> None:
    """The first two on one device; the third on two ranks, with the same loss on both, and each its own rows."""
    *alone, on_ranks = blocks("README.md", "python")
    for example in alone:  # in an interpreter that has imported nothing else
        ran = subprocess.run([sys.executable, "-c", example], cwd=tmp_path, capture_output=True, text=True, timeout=200)
        assert ran.returncode == 0, ran.stderr
    script = tmp_path / "head.py"
    script.write_text(on_ranks)
    said = "".join(outputs_of(run_example.main, [str(script)], tmp_path, 2))
    said = re.findall(r"rank (\d): loss (\d+\.\d{6}), weight.grad (\(\d+, \d+\))", said)
    (_, loss, shape), (_, other_loss, other_shape) = sorted(said)
    assert loss == other_loss and shape == other_shape == "(16000, 256)"


def test_the_readmes_claim_is_in_the_raw_rounds() -> None:
    """Catches a number of the first table that the stored rounds of whole steps do not have, and a faster loss left out."""
    columns = ("stock", "torch-compile", "cce-dist-default", "cce-dist-filtered")
    for title, name in (("Gemma-3-270m", "gemma-3-270m"), ("Qwen3-0.6B", "qwen-3-0.6b")):
        cases = read_json(ROOT / "benchmarks" / "results" / f"h200-models-{name}.json", Results).cases
        (case,) = (case for case in cases if case.num_tokens == 32_768)
        rows = {row.name.removesuffix("+layers"): row for row in case.rows}
        found = [f"{1000 * rows[x].total.median:.0f}; {(rows[x].peak_bytes or 0) / 2**30:.3g}" for x in columns]
        assert f"| {title} | {' | '.join(found)} |" in README
        assert min((row.total.median, name) for name, row in rows.items() if not row.ours)[1] == "torch-compile"


def test_the_table_of_kernels_is_that_of_the_source() -> None:
    """Catches a kernel that the page lacks, one that is gone or that nobody launches, and a file under another name."""
    page = PAGES["docs/kernels.md"]
    assert kernel_table.with_table(page) == page, "run python tests/kernel_table.py"
    assert all((ROOT / "tests" / file).is_file() for file in kernel_table.TESTS.values())


def test_public_names_are_all_there() -> None:
    """Catches a public name that the page of the API lacks, and one on any page that cannot be imported."""
    page = PAGES["docs/api.md"]
    headings = " ".join(re.findall(r"^## (.*)$", page, re.MULTILINE))
    assert set(re.findall(r"`(\w+)`", headings)) == set(cce_dist.__all__)
    for field in cce_dist.LinearCrossEntropyOutput._fields + cce_dist.LogProbs._fields:
        assert f"`{field}`" in page
    for other in PAGES:
        for block in blocks(other, "python"):
            for node in ast.walk(ast.parse(block)):
                if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("cce_dist"):
                    exec(ast.unparse(node), {})


def test_docstrings_tell_every_argument() -> None:
    """Catches an argument or a field that the generated reference lacks, and one that it invents."""
    wrong = []
    for name in cce_dist.__all__:
        public = getattr(cce_dist, name)
        text = inspect.getdoc(public) or ""
        section = re.search(r"^(?:Args|Attributes):\n((?:    .*\n|\n)*)", text + "\n", re.MULTILINE)
        told = re.findall(r"^    (\**\w+(?:, \**\w+)*):", section[1] if section else "", re.MULTILINE)
        stands = {argument.strip("*") for names in told for argument in names.split(", ")}
        parameters = set(inspect.signature(public).parameters)
        if stands != parameters:
            wrong.append(f"{name}: {sorted(stands ^ parameters)}")
    assert not wrong, "\n".join(wrong)
