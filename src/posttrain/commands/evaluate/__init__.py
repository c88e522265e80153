"""posttrain evaluate: single models, tables of models, and pairwise comparisons."""

# Sections whose keys are options: --task.path, --template.preamble, --engine.url
SECTIONS = ("task", "template", "engine")
