"""The native kernel: what decoding and the layers of an update compute in C++ on a CPU, where a recipe asks for it."""
