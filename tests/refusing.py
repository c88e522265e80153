"""What a refusal must say: which error it is, and the keys, names and places that its reader looks for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest


@contextmanager
def refuses(error: type[BaseException], *named: str) -> Iterator[pytest.ExceptionInfo[Any]]:
    """Expect an error whose message says each of some keys, names or places, and shows no traceback."""
    with pytest.raises(error) as caught:
        yield caught
    message = str(caught.value)
    assert [name for name in named if name not in message] == [], message
    assert "Traceback" not in message
