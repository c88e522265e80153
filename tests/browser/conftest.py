"""A chromium that is driven, and what it shows and posts."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, sync_playwright

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


@pytest.fixture(scope="session")
def chromium() -> Iterator[Browser]:
    path = next(filter(None, map(shutil.which, NAMES)), None)
    assert path is not None, "there is no chromium; `make test-browser` says how to install it"
    flags = list(FLAGS)
    if os.geteuid() == 0:
        flags.append("--no-sandbox")  # it refuses to start as root otherwise
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=path, args=flags)
        yield browser
        browser.close()


@pytest.fixture
def errors() -> list[str]:
    """What went wrong on a page: exceptions of scripts, and requests that left this machine."""
    return []


@pytest.fixture
def page(chromium: Browser, errors: list[str]) -> Iterator[Page]:
    """An empty page in a profile without a past. At its end nothing may have gone wrong."""
    context = chromium.new_context(viewport={"width": 1280, "height": 900})
    context.set_default_timeout(LONGEST_WAIT)
    page = context.new_page()
    watch(page, errors)
    yield page
    context.close()
    assert errors == []


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
            page.screenshot(path=str(Path(folder) / f"{name}-{scheme}-{width}.png"), full_page=True)
    page.emulate_media(color_scheme="light")
    page.set_viewport_size({"width": 1280, "height": 900})
