"""Figures and the page, drawn from result dataclasses only."""
