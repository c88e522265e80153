"""What runs inside a vLLM server whose weights follow training: this folder goes on the server's PYTHONPATH."""
