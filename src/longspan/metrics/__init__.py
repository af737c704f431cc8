"""What is measured: likelihood by position, retrieval, attention mass."""
