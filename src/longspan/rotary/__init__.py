"""Way one a position enters attention: queries and keys are turned by it."""
