"""Messages to token ids and back: prompt templates, safe encoding, and where the answer is found.

Nothing here reads a file. A prompt is a list of pieces, trusted (written by us or by the recipe) or
untrusted (from the data); only trusted pieces can become special tokens.
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
