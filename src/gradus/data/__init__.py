"""Tokenizers, text and image sources, and the loader whose order is a pure function of (seed, epoch, position)."""
