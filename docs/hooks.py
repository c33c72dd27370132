"""What building the site does beyond markdown."""

import re
from pathlib import Path
from typing import Any

import griffe
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File

# What a browser fetches by itself. Links that a person follows are no part of it.
_FETCHED = re.compile(
    r"<(?:script|link|img|iframe|source|object)\b[^>]*?(?:src|href|data)=[\"']?(?:https?:)?//[^>]*>"
)


_ROOT = Path(__file__).parent.parent
_EXAMPLES = _ROOT / "examples"


def on_files(files: Any, config: Any, **_: Any) -> Any:
    """Return the files of the site with the examples and llms.txt among them, which lie beside the pages."""
    for path in sorted(_EXAMPLES.glob("*.*")):
        files.append(File.generated(config, f"examples/{path.name}", abs_src_path=str(path)))
    for name in ("llms.txt", "skills/cachedfs/SKILL.md"):
        text = re.sub(r"\]\(docs/([\w-]+)\.md", r"](\1.html", (_ROOT / name).read_text(encoding="utf-8"))
        # Not .md, which would become a page.
        files.append(
            File.generated(
                config, name.replace("/SKILL.md", ".txt"), content=text.replace("/SKILL.md", ".txt")
            )
        )
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Return the page with nothing but its language behind a fence: the rest (`needs torch`, `about`) is for the tests.

    The examples lie beside the pages; those that a table lists are shown below it.
    """
    markdown = re.sub(r"^(```\w+) .+$", r"\1", markdown, flags=re.MULTILINE).replace(
        "](../examples/", "](examples/"
    )
    if page.file.src_uri == "examples.md":
        for name in re.findall(r"^\| .* \| \[(\w+)\.py\]", markdown, re.MULTILINE):
            program = (_EXAMPLES / f"{name}.py").read_text(encoding="utf-8")
            markdown = markdown.replace(f"](examples/{name}.py)", f"](#{name}py)")
            markdown += f"\n## {name}.py\n\n```python\n{program}```\n"
    return markdown


def on_page_content(html: str, page: Any, **_: Any) -> str:
    """Return the page; that of the libraries in a box of its own, by which site.css knows it."""
    return f'<div class="libraries">{html}</div>' if page.file.src_uri == "works-with.md" else html


def on_post_page(output: str, page: Any, **_: Any) -> str:
    """Return the page as it is. One that would fetch something from elsewhere ends the build."""
    if found := _FETCHED.search(output):
        raise PluginError(f"{page.file.src_uri} is not self-contained: {found[0]}")
    return output


class Commands(griffe.Extension):
    """Shows an attribute that wraps a function as the method that it is: `put = command(GCSService.do_put)` of a simulated
    cloud, and `created = sync_wrapper(_created)`.
    """

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        """Replace such attributes of the handles by what does it, under their own names."""
        if "sim" not in pkg.modules:
            return
        for module in [*pkg["sim"].modules.values(), pkg["origins.drive.filesystem"]]:
            for cls in module.classes.values():
                if not cls.is_alias:
                    self._replace_in(cls)

    def _replace_in(self, cls: griffe.Class) -> None:
        for name, member in list(cls.members.items()):
            value = None if member.is_alias or not member.is_attribute else member.value
            if isinstance(value, griffe.ExprCall) and value.canonical_path.endswith(
                (".command", ".sync_wrapper")
            ):
                does = cls.modules_collection[value.arguments[0].canonical_path]
                shown = griffe.Function(
                    name,
                    lineno=does.lineno,
                    endlineno=does.endlineno,
                    parameters=does.parameters,
                    returns=does.returns,
                    docstring=does.docstring,
                    parent=cls,
                )
                cls.set_member(name, shown)
