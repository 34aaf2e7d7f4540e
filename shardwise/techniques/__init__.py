"""The techniques, a folder each: words, values, prices, what a rank does, how it is applied."""
