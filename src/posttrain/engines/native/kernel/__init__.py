"""The native kernel of decoding on a CPU: its source, its building where a compiler is, and which one is in use."""
