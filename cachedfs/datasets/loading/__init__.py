"""`Loader`, and what it is made of."""
