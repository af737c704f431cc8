"""What any training loop here needs: learning rates, kept states, positions of every row."""
