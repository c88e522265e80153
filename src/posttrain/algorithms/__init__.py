"""Pure mathematics: objectives, advantages, aggregation, correction, selection, KL control. No models, files or
devices.
"""
