"""Messages to token ids and back: prompt templates, safe encoding, and where the answer is found.

Nothing here reads a file. A prompt is a list of pieces, trusted (written by us or by the recipe) or
untrusted (from the data); only trusted pieces can become special tokens.
"""

from posttrain.render.assistant import decode_response, encode_response
from posttrain.render.encoding import Piece, encode_plain
from posttrain.render.template import Template, encode_prompt, end_id, stop_ids
from posttrain.render.words import boxed, chat, document, plain, r1_zero, xml_reasoning

__all__ = [
    "Piece",
    "Template",
    "boxed",
    "chat",
    "decode_response",
    "document",
    "encode_plain",
    "encode_prompt",
    "encode_response",
    "end_id",
    "plain",
    "r1_zero",
    "stop_ids",
    "xml_reasoning",
]
