"""Converting messages to tokens and back: prompt formats, safe encoding, answer extraction.

Nothing here reads files. Prompts are lists of pieces, either trusted (from posttrain or the recipe) or untrusted (from
data). Only trusted pieces may become special tokens.
"""

from posttrain.data.render.assistant import decode_response, encode_response
from posttrain.data.render.encoding import Piece, encode_plain
from posttrain.data.render.template import Template, encode_prompt, end_id, end_ids, stop_ids, without_end

__all__ = [
    "Piece",
    "Template",
    "decode_response",
    "encode_plain",
    "encode_prompt",
    "encode_response",
    "end_id",
    "end_ids",
    "stop_ids",
    "without_end",
]
