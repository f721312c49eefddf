"""A hook of mkdocs: the README is the site's first page, and links to files outside of docs/ lead to the repository."""

import re
from pathlib import Path, PurePosixPath
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent.parent


def on_files(files: Files, config: Any) -> Files:
    files.append(File.generated(config, "index.md", content=(ROOT / "README.md").read_text().replace("](docs/", "](")))
    files.append(File.generated(config, "reference.md", content=_reference()))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Replace relative links that leave docs/ by links to the repository."""

    def absolute(match: re.Match) -> str:
        link = match[1]
        if re.match(r"[a-z]+:|#", link):
            return match[0]
        path = PurePosixPath("docs", page.file.src_uri).parent / link.partition("#")[0]
        inside = (ROOT / path).exists() and not link.startswith("..")
        if inside or (page.is_homepage and files.get_file_from_path(link.partition("#")[0])):
            return match[0]
        return f"]({config.repo_url}/blob/main/{link.removeprefix('../')})"

    return re.sub(r"\]\(([^)\s]+)\)", absolute, markdown)


def _reference() -> str:
    """One section for each public name, from its docstring."""
    source = (ROOT / "cce_dist" / "__init__.py").read_text()
    names = re.findall(r'^    "(\w+)": "([\w.]+)",$', source, re.MULTILINE)
    sections = [f"::: cce_dist.{module}.{name}" for name, module in names]
    return "\n\n".join(
        ["# Reference", "Every public name, from its docstring. All are imported from `cce_dist`.", *sections]
    )
