"""Which language a text is written in: the one place that knows ``langdetect``."""

from __future__ import annotations

from functools import cache
from typing import Any

from posttrain.errors import MissingExtra

MAX_CHARS = 10_000  # as many as the detector looks at


def detect_language(text: str) -> str | None:
    """The ISO 639-1 code of the likeliest language (``zh-cn``, ``zh-tw`` of Chinese); None where there are no letters.

    A function of the text alone: the detector draws its samples with a fixed seed. It reads lower case,
    because it skips words in capitals. Short texts are guesses.

    Source: langdetect, a port of Shuyo's language-detection (2010), which the reference of IFEval uses.

    Raises:
        MissingExtra: ``langdetect`` is not installed.
    """
    factory = _load_factory()
    from langdetect.lang_detect_exception import LangDetectException

    detector = factory.create()
    detector.append(text[:MAX_CHARS].lower())
    try:
        code: str = detector.detect()
    except LangDetectException:
        return None
    return None if code == detector.UNKNOWN_LANG else code


def known_languages() -> frozenset[str]:
    """The codes that ``detect_language`` may give.

    Raises:
        MissingExtra: ``langdetect`` is not installed.
    """
    return frozenset(_load_factory().get_lang_list())


@cache
def _load_factory() -> Any:
    try:
        from langdetect.detector_factory import PROFILES_DIRECTORY, DetectorFactory
    except ImportError:
        raise MissingExtra("langdetect", "tasks", "telling languages apart (the task ifeval)") from None
    factory = DetectorFactory()
    factory.load_profile(PROFILES_DIRECTORY)
    factory.set_seed(0)
    return factory
