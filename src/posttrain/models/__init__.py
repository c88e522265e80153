"""Models: lookup, loading, adapters, quantization, heads, forward passes."""

import logging

# If bitsandbytes is installed, peft imports it for every adapter, which logs warnings about an unused kernel.
logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
