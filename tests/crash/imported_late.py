"""What a run imports only where it comes to it, imported before forking: a fresh process spends three seconds there."""

from transformers.conversion_mapping import get_checkpoint_conversion_mapping
from transformers.models.qwen3 import modeling_qwen3

from posttrain.data.stories import task
from posttrain.models import load
from posttrain.sampling.native import engine
from posttrain.training import build

get_checkpoint_conversion_mapping("qwen3")  # hundreds of patterns, compiled once in a process, when it first saves
IMPORTED = (modeling_qwen3, engine, load, task, build)
