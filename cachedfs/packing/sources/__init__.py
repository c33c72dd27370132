"""Sources of samples, one module for each kind.

`detect` imports them, and their libraries, on demand.
"""
