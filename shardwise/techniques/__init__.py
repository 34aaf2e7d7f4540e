"""The techniques, a folder each: words, values, what a rank does, how it is applied."""
