"""longspan: longer context for real checkpoints."""
