"""Tasks and data: rows to examples, messages to tokens and masks, chat templates."""
