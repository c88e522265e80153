"""Write docs/reference/architectures.md: two steps of GRPO and of SFT with every architecture, in tiny (3 minutes).

``--check`` only says whether the rows in the repository are what the runs give.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
os.environ.setdefault("HF_HUB_OFFLINE", "1")
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "train")]

import transformers  # noqa: E402
from architectures import ARCHITECTURES, DOCUMENT, row_of, train_two_steps  # noqa: E402

HEADING = """# Architectures

Two steps of GRPO and two of SFT were run with a tiny model (4 layers, random weights, windows and chunks of 12
tokens) of each of these {count} text architectures of transformers {version}, and what GRPO saved was loaded
again. In each, the KL from sampler to trainer was below 1e-6 nats per token. Written by
`tools/write_architectures.py`; `make test-slow` runs them again.

**Sampling.** `fast` is the path of the Qwen3, Qwen2 and Llama families. `own modules` runs the model's modules
over a shared cache of keys and values. `own cache` is for layers that keep other states (linear attention,
convolutions, chunks): prompts of one length at a time. With `no cache` every token reads all tokens before it.
A run says which slower path it takes, and why. The path is chosen by comparing log-probabilities with the
model's own forward pass, never by name; rows that get past a window or chunk may take another path than shorter
ones.

**Training.** `packed` rows share one stream; `padded` ones are slower. Rows longer than a window are padded.

| architecture | class | sampling | training |
|---|---|---|---|
"""


def main() -> int:
    """Run them all and write the document, or compare it."""
    rows = []
    for name in sorted(ARCHITECTURES):
        with tempfile.TemporaryDirectory() as folder:
            rows.append(row_of(train_two_steps(name, Path(folder))))
    text = HEADING.format(count=len(rows), version=transformers.__version__) + "\n".join(rows) + "\n"
    if "--check" in sys.argv:
        return 0 if DOCUMENT.read_text(encoding="utf-8") == text else 1
    DOCUMENT.write_text(text, encoding="utf-8")
    print(f"wrote {DOCUMENT.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
