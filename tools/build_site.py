"""Build the site in ``build/site``, write its equations as MathML, and check what it links to.

Pages load nothing from outside: no script, no font, no picture. Every link inside the site leads to a file, and its
anchor exists. Run this with the Python of the environment that has zensical and latex2mathml.
"""

from __future__ import annotations

import html
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

ROOT = Path(__file__).resolve().parent.parent
SITE = ROOT / "build" / "site"
LINKED_FOLDERS = ("examples",)  # files of the repository that pages link to
LOADED = {"script": "src", "img": "src", "iframe": "src", "source": "src", "link": "href"}
# Relations of a <link> that a browser does not load.
NOT_LOADED = {"canonical", "prev", "next", "alternate"}
_EQUATION = re.compile(r'<(span|div) class="arithmatex">\\([(\[])(.*?)\\[)\]]</\1>', re.DOTALL)
# The builder counts a link to a file next to ``docs`` from the folder of the repository, one above the site's.
_OUTSIDE = re.compile(rf'href="\.\./((?:\.\./)*(?:{"|".join(LINKED_FOLDERS)})/)')
_VERSION = re.compile(r'^__version__ = "([^"]+)"', re.MULTILINE)


@dataclass
class Page(HTMLParser):
    """The links, the anchors and the loaded files of a page."""

    links: list[str] = field(default_factory=list)
    loaded: list[str] = field(default_factory=list)
    anchors: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        super().__init__()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Keep what an element links to, loads, or is called."""
        values = {name: value for name, value in attrs if value is not None}
        self.anchors |= {values[name] for name in ("id", "name") if name in values}
        if tag == "a" and "href" in values:
            self.links.append(values["href"])
        if tag in LOADED and LOADED[tag] in values and not NOT_LOADED & set(values.get("rel", "").split()):
            self.loaded.append(values[LOADED[tag]])


def build() -> None:
    """Build the pages, strictly, with the files of the repository that they link to.

    Raises:
        SystemExit: the builder says that something is wrong.
    """
    builder = Path(sys.executable).with_name("zensical")
    done = subprocess.run([builder, "build", "--strict", "--clean", "-f", ROOT / "mkdocs.yml"], cwd=ROOT, check=False)
    if done.returncode:
        raise SystemExit(done.returncode)
    for folder in LINKED_FOLDERS:
        shutil.copytree(ROOT / folder, SITE / folder, ignore=shutil.ignore_patterns("__pycache__"))


def finish_pages() -> int:
    """Write the TeX of every page as MathML, and lead links to files of the repository to their copies.

    Returns:
        The number of equations.
    """
    number = 0
    for path in sorted(SITE.rglob("*.html")):
        text = path.read_text(encoding="utf-8")
        written, found = _EQUATION.subn(as_mathml, text)
        written = _OUTSIDE.sub(r'href="\1', written)
        number += found
        if written != text:
            path.write_text(written, encoding="utf-8")
    return number


def as_mathml(match: re.Match[str]) -> str:
    """Return an equation of a page as MathML, in an element that can scroll."""
    from latex2mathml.converter import convert

    display = "inline"
    if match[2] == "[":
        display = "block"
    return f'<span class="equation">{convert(html.unescape(match[3]), display=display)}</span>'


def read_pages() -> dict[Path, Page]:
    """Return every page of the site, parsed."""
    pages = {}
    for path in sorted(SITE.rglob("*.html")):
        page = Page()
        page.feed(path.read_text(encoding="utf-8"))
        pages[path] = page
    return pages


def find_faults(pages: dict[Path, Page]) -> list[str]:
    """Return a line for every link that leads nowhere, and for everything that is loaded from outside."""
    faults = []
    for path, page in pages.items():
        name = path.relative_to(SITE).as_posix()
        for address in page.loaded:
            if urlsplit(address).netloc:
                faults.append(f"{name}: loads {address} from outside")
        for address in {*page.links, *page.loaded}:
            fault = find_fault(path, address, pages)
            if fault:
                faults.append(f"{name}: {address}: {fault}")
    return sorted(faults)


def find_fault(path: Path, address: str, pages: dict[Path, Page]) -> str:
    """Return what is wrong with a link, or an empty text. Links to other sites are not followed."""
    parts = urlsplit(address)
    if parts.scheme or parts.netloc:
        return ""
    target = path
    if parts.path:
        base = path.parent
        if parts.path.startswith("/"):
            base = SITE
        target = (base / unquote(parts.path).lstrip("/")).resolve()
        if target.is_dir():
            target = target / "index.html"
    if not target.is_relative_to(SITE) or not target.is_file():
        return "there is no such file in the site"
    anchor = unquote(parts.fragment)
    if anchor and target in pages and anchor not in pages[target].anchors and not anchor.startswith("__"):
        return f"the page has no anchor {anchor!r}"
    return ""


def find_wrong_version() -> list[str]:
    """Return a line if the site names another version than the package."""
    package = (ROOT / "src" / "posttrain" / "__init__.py").read_text(encoding="utf-8")
    version = _VERSION.search(package)
    assert version is not None
    if f"copyright: posttrain {version[1]}\n" in (ROOT / "mkdocs.yml").read_text(encoding="utf-8"):
        return []
    return [f"mkdocs.yml: copyright does not name version {version[1]}, which is the package's"]


def main() -> int:
    build()
    equations = finish_pages()
    pages = read_pages()
    faults = [*find_faults(pages), *find_wrong_version()]
    for fault in faults:
        print(fault, file=sys.stderr)
    links = sum(len(page.links) for page in pages.values())
    print(f"{len(pages)} pages, {equations} equations, {links} links: {len(faults)} faults")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
