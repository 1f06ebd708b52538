"""Pages of the site that are not files of `docs`: README, other pages of the repository, and the public functions.

`mkdocs build` runs this file. Links in `docs`, README and CONTRIBUTING are those that work in the repository; here they
become links between pages of the site.
"""

import ast
import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[2]

PAGES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "benchmarks/RESULTS.md": "results.md",
    "benchmarks/real_models/PROTOCOL.md": "protocol.md",
}
"""Files outside `docs`, and the pages that they become."""

API: dict[str, dict[str, tuple[str, ...]]] = {
    "score": {
        "lightning_modules.scoring.score": ("score", "table"),
        "lightning_modules.scoring.records": ("summarize", "Record", "Sums", "read_records", "write_records"),
        "lightning_modules.scoring.config": ("ScoreConfig", "InspectConfig"),
    },
    "evaluator": {"lightning_modules.scoring.scored_model": ("ScoredModel", "open_evaluator", "score_text")},
    "page": {"lightning_modules.visualization.page": ()},
    "functional": {"lightning_modules.functional": ()},
    "metrics": {"lightning_modules.metrics": ()},
    "objectives": {"lightning_modules.objectives": ()},
    "module": {"lightning_modules.long_context_lm": (), "lightning_modules.batch": ("PackedBatch",)},
    "trainers": {"lightning_modules.integrations": ()},
    "callbacks": {"callbacks": ()},
    "datamodules": {"datamodules": ()},
}
"""Modules of each page of the API, with their public names; without names, all that a module exports."""

FRAME = """\
<iframe class="inspect" src="images/inspect.html#token-7110" title="Key tokens of a report"></iframe>

*Point at a word or tap it; the keys `n` and `p` go to the next and the previous key token.
[Open the page in full](images/inspect.html#token-7110).*
"""
"""The page of `inspect` that the pictures of README show."""

_LINK = re.compile(r"\]\((?!\w+:)([^)#\s]+)((?:#[^)\s]*)?)\)")
_FENCE = re.compile(r"(^```.*?^```$)", re.MULTILINE | re.DOTALL)
_PICTURE = re.compile(r"<picture>.*?</picture>\n", re.DOTALL)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages, and the other files of the repository that pages link to."""
    for path, page in PAGES.items():
        files.append(File.generated(config, page, content=(ROOT / path).read_text(encoding="utf-8")))
    for name, modules in API.items():
        files.append(File.generated(config, f"api/{name}.md", content=describe(modules)))
    for path in sorted(linked_files(files)):
        files.append(File.generated(config, site_path(path), content=(ROOT / path).read_bytes()))
    return files


def on_page_markdown(markdown: str, page: Any, **kwargs: Any) -> str:
    """Turn the links of a page into links within the site, and README's picture into the page that it shows."""
    source = repository_path(page.file.src_uri)
    if source == "README.md":
        markdown = _PICTURE.sub(FRAME, markdown)
        return "\n".join(_localize(block, source, page.file.src_uri) for block in markdown.split("\n"))
    return _localize(markdown, source, page.file.src_uri)


def repository_path(page: str) -> str:
    """Return the path in the repository of a page of the site."""
    return {page: path for path, page in PAGES.items()}.get(page, f"docs/{page}")


def site_path(path: str) -> str:
    """Return the path in the site of a file of the repository."""
    if path in PAGES:
        return PAGES[path]
    return path.removeprefix("docs/") if path.startswith("docs/") else f"files/{path}"


def linked_files(files: Files) -> set[str]:
    """Return the files of the repository that pages link to and that the site does not have yet."""
    targets: set[str] = set()
    for file in files.documentation_pages():
        source = repository_path(file.src_uri)
        for block in _FENCE.split(file.content_string)[::2]:
            targets |= {_resolve(source, target) for target, _ in _LINK.findall(block)}
    return {path for path in targets if (ROOT / path).is_file() and files.get_file_from_path(site_path(path)) is None}


def describe(modules: dict[str, tuple[str, ...]]) -> str:
    """Return a page in Markdown that shows the docstrings of public names, which are read without an import."""
    sections = []
    for module, names in modules.items():
        exports = exported_names(module)
        docstring = ast.get_docstring(ast.parse(_source(module).read_text(encoding="utf-8"))) or ""
        sections.append(f"# {module}\n\n{docstring}")
        for name in names or exports:
            heading = f"    options:\n      heading: {name}\n      toc_label: {name}"
            sections.append(f"::: {exports[name]}\n{heading}")
    return "\n\n".join(sections) + "\n"


def exported_names(module: str) -> dict[str, str]:
    """Return the public names of a module, and where each is defined."""
    body = ast.parse(_source(module).read_text(encoding="utf-8")).body
    own = [node.name for node in body if isinstance(node, ast.ClassDef | ast.FunctionDef)]
    names = {name: f"{module}.{name}" for name in own if not name.startswith("_")}
    if _source(module).name != "__init__.py":
        return names
    for node in body:
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith(module):
            names |= {alias.name: f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "_MODULES":  # imported on first use
            lazy = ast.literal_eval(node.value)
            names |= {name: f"{module}.{file}.{name}" for name, file in lazy.items()}
    return names


def _source(module: str) -> Path:
    path = ROOT.joinpath(*module.split("."))
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def _resolve(source: str, target: str) -> str:
    return posixpath.normpath(posixpath.join(posixpath.dirname(source), target))


def _localize(markdown: str, source: str, page: str) -> str:
    def replace(found: re.Match[str]) -> str:
        path = _resolve(source, found[1])
        if not (ROOT / path).exists():  # the strict build reports it
            return found[0]
        return f"]({posixpath.relpath(site_path(path), posixpath.dirname(page) or '.')}{found[2]})"

    blocks = _FENCE.split(markdown)
    return "".join(block if index % 2 else _LINK.sub(replace, block) for index, block in enumerate(blocks))
