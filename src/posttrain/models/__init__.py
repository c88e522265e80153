"""Models: found by name, loaded, adapted, quantized, given heads, and run forward."""

import logging

# Where bitsandbytes is installed, peft imports it for every adapter, and it warns of a kernel that is not used here.
logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
