"""One verb a file: a dataclass out for every question asked."""
