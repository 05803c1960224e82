"""Drafting inside other people's engines."""
