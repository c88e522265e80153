"""posttrain serve and posttrain serve-command: a model behind HTTP, and who may ask a server of this machine."""
