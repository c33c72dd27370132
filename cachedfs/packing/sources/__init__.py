"""The kinds of sources, a module each; each is imported where it is asked for, with the library that it needs."""
