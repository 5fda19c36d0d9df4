"""Inputs of the model: images, texts, masked texts and the bundled sets."""
