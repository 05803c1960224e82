"""Do two commits decode alike? See `__main__`."""
