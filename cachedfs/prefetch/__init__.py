"""Prefetch plans: fetch declared objects in the order in which they will be read."""
