"""
Adds to the site what is outside docs/: a hook of mkdocs, named in mkdocs.yml.

Pages of the repository's root (`ROOT_PAGES`) become pages of the site. A link to any other file outside docs/ becomes the
file's path, because the site has no such file: `[a pod](../examples/pod.yaml)` reads "a pod (`examples/pod.yaml`)". The
links also work where the pages are read as files.
"""

import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
ROOT_PAGES = ("CONTRIBUTING.md", "CHANGELOG.md")
OUTSIDE = re.compile(r"\[([^\]]*)\]\((?:\.\./)+([^)#]+)(#[^)]*)?\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the pages of the root, with links to the pages beside them, and a list of the decisions."""
    for name in ROOT_PAGES:
        text = (ROOT / name).read_text().replace("](docs/", "](")
        files.append(File.generated(config, name, content=text))
    records = sorted((Path(config.docs_dir) / "decisions").glob("0*.md"))
    titles = [f"- [{record.read_text().partition(chr(10))[0].removeprefix('# ')}]({record.name})" for record in records]
    content = "\n".join(["# Decisions", "", *titles])
    files.append(File.generated(config, "decisions/index.md", content=content))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Rewrites links that lead out of docs/. Raises PluginError if one leads to no file."""

    def rewritten(link: re.Match[str]) -> str:
        text, path, anchor = link.groups()
        if path in ROOT_PAGES:
            return f"[{text}]({path}{anchor or ''})"
        if files.get_file_from_path(path) is not None:  # from docs/decisions to a page of docs/
            return link[0]
        if not (ROOT / path).exists():
            raise PluginError(f"{page.file.src_path} links to {path}, and there is no such file")
        return f"`{path}`" if text.strip("`") == path else f"{text} (`{path}`)"

    return OUTSIDE.sub(rewritten, markdown)
