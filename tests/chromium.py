"""What the tests of pages in chromium share: flags, what went wrong on a page, pictures."""

from __future__ import annotations

import os
from pathlib import Path

from playwright.sync_api import Page

NAMES = ("chromium", "chromium-browser", "google-chrome")
FLAGS = [
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
LONGEST_WAIT = 60_000.0  # milliseconds that anything on a page may take: a bound for the slowest of machines


def watch(page: Page, errors: list[str]) -> None:
    """Note what goes wrong on a page."""
    page.on("pageerror", lambda error: errors.append(f"exception: {error}"))
    page.on("dialog", lambda dialog: errors.append(f"dialog: {dialog.message}"))
    page.on("request", lambda request: _note_foreign(request.url, errors))


def _note_foreign(url: str, errors: list[str]) -> None:
    if not url.startswith(
        ("http://127.0.0.1:", "http://localhost:", "http://evil.localhost:", "file:", "data:", "blob:")
    ):
        errors.append(f"asked {url}")


def picture(page: Page, name: str) -> None:
    """Keep a picture of the page for who wants to look, in ``$POSTTRAIN_PICTURES``."""
    folder = os.environ.get("POSTTRAIN_PICTURES")
    if not folder:
        return
    for scheme in ("light", "dark"):
        for width in (480, 1280):
            page.emulate_media(color_scheme=scheme)
            page.set_viewport_size({"width": width, "height": 900})
            page.wait_for_timeout(600)  # what fades has faded
            page.screenshot(path=str(Path(folder) / f"{name}-{scheme}-{width}.png"), full_page=True)
    page.emulate_media(color_scheme="light")
    page.set_viewport_size({"width": 1280, "height": 900})
