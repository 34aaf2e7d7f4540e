"""this package is the techniques, one a file; none imports another."""
