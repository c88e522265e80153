"""posttrain evaluate: of one model, of several, against one another."""

# Sections whose keys are options: --task.path, --template.preamble, --engine.url
SECTIONS = ("task", "template", "engine")
