"""A chromium that is driven."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, Page, sync_playwright

from chromium import FLAGS, LONGEST_WAIT, NAMES, watch


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
