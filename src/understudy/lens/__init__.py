"""CFS beside importance and similarity: what a researcher holds it against."""
