"""The public Python interface: training, measuring and looking into runs without a command line (docs/reference)."""
